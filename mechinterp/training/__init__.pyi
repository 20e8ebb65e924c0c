"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.training.general.trainer import initial_deep_weights as initial_deep_weights
from mechinterp.training.linear import flow as flow
from mechinterp.training.one_layer.step import initial_weights as initial_weights
