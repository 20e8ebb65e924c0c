"""Training, exact training of linear attention, and the weights that training starts from."""

from mechinterp.rooms import names_of

HOMES = {
    "flow": "mechinterp.training.linear",
    "initial_deep_weights": "mechinterp.training.general.trainer",
    "initial_weights": "mechinterp.training.one_layer.step",
}

__getattr__ = names_of(__name__, HOMES)
