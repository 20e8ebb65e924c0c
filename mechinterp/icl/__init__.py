"""Prompts of in-context linear regression, learners that predict on them, and fits of learners' scalars."""

from mechinterp.rooms import names_of

HOMES = {
    "ALGORITHMS": "mechinterp.icl.algorithms",
    "PromptMoments": "mechinterp.icl.algorithm",
    "adaptive_ridge": "mechinterp.icl.predictors",
    "dmmse": "mechinterp.icl.predictors",
    "fit_algorithm": "mechinterp.icl.algorithm",
    "kalman": "mechinterp.icl.predictors",
    "ridge": "mechinterp.icl.predictors",
}

__getattr__ = names_of(__name__, HOMES)
