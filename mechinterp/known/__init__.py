"""Models whose heads, edges, algorithm or learning coefficient are known, to score other methods on."""

from mechinterp.rooms import names_of

HOMES = {
    "Entry": "mechinterp.known.entries",
    "Submission": "mechinterp.known.submissions",
    "Suite": "mechinterp.known.entries",
    "compare_submissions": "mechinterp.known.comparing",
    "read_submission": "mechinterp.known.submissions",
    "suite": "mechinterp.known.entries",
    "judge_sampler": "mechinterp.known.judging",
    "score": "mechinterp.known.scores",
}

__getattr__ = names_of(__name__, HOMES)
