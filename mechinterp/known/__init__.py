"""Models whose heads, edges, algorithm or learning coefficient are known, to score other methods on."""

from mechinterp.rooms import names_of

HOMES = {
    "Entry": "mechinterp.known.entries",
    "Suite": "mechinterp.known.entries",
    "suite": "mechinterp.known.entries",
    "judge_sampler": "mechinterp.known.scores",
    "score": "mechinterp.known.scores",
}

__getattr__ = names_of(__name__, HOMES)
