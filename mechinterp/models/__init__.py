"""Hooked models, hand-built models, and initial weights for training."""

from mechinterp.rooms import names_of

HOMES = {
    "HookedPredictor": "mechinterp.models.hooked.runner",
    "gd_plus_plus_model": "mechinterp.models.constructions.descent",
    "initial_deep_weights": "mechinterp.training.general.trainer",
    "initial_weights": "mechinterp.training.one_layer.step",
    "interleaved": "mechinterp.models.layers",
    "predict_deep": "mechinterp.models.run.general",
    "preprocess_then_optimise_model": "mechinterp.models.constructions.sparse",
    "rotated": "mechinterp.models.constructions.descent",
    "with_noise": "mechinterp.models.constructions.descent",
}

__getattr__ = names_of(__name__, HOMES)
