"""Hooked models, and models built by hand."""

from mechinterp.rooms import names_of

HOMES = {
    "HookedPredictor": "mechinterp.models.hooked.runner",
    "gd_plus_plus_model": "mechinterp.models.constructions.descent",
    "interleaved": "mechinterp.models.layers",
    "predict_deep": "mechinterp.models.run.general",
    "preprocess_then_optimise_model": "mechinterp.models.constructions.sparse",
    "rotated": "mechinterp.models.constructions.descent",
    "with_noise": "mechinterp.models.constructions.descent",
}

__getattr__ = names_of(__name__, HOMES)
