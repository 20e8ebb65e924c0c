"""Closed forms from the papers."""

from mechinterp.rooms import names_of

HOMES = {
    "merged_heads": "mechinterp.theory.linear",
    "modes": "mechinterp.theory.linear",
    "population_moments": "mechinterp.theory.linear",
    "predict_jumps": "mechinterp.theory.linear_jumps",
    "reduced_rank_coefficient": "mechinterp.theory.reduced_rank",
    "separate_heads": "mechinterp.theory.linear",
    "two_head_flow": "mechinterp.theory.softmax",
}

__getattr__ = names_of(__name__, HOMES)
