"""What the models of sparse settings are held against: errors of learners on the same prompts."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from analyses.sparse import questions as ask
from analyses.sparse.setting import best, best_lasso, best_ridge
from analyses.sparse.steps import LEARNERS, moments, of_task
from mechinterp import TaskConfig
from mechinterp.analysis.stats import halves
from mechinterp.icl.sparse_predictors import gradient_descent, preprocess_then_optimise

LASSO_PROMPTS = 512
FIXED = {"gd_fixed": "gd", "algorithm_fixed": "algorithm", "lista": "lista"}
"""Learners of as few steps as layers allow, their sizes fitted on prompts of their own."""


@cache
def learners(task: TaskConfig, layers: int, n_prompts: int) -> Mapping[str, np.ndarray]:
    """Excess risk of each measured prompt, by learner; lasso has the last of them."""
    _, prompts = halves(ask.prompts_of(task, n_prompts).to(torch.float64))
    found = {"ridge": best_ridge(prompts), "lasso": best_lasso(prompts[-LASSO_PROMPTS:])}
    found["gd"] = best(gradient_descent(prompts, steps=128), prompts)
    found["algorithm"] = best(preprocess_then_optimise(prompts, steps=128), prompts)
    return found | fixed(task, layers, n_prompts)


@cache
def fixed(task: TaskConfig, layers: int, n_prompts: int) -> Mapping[str, np.ndarray]:
    """The same of FIXED."""
    _, prompts = halves(ask.prompts_of(task, n_prompts).to(torch.float64))
    gram, r, _ = moments(prompts)
    found = {}
    for column, name in FIXED.items():
        w = LEARNERS[name].path(gram, r, of_task(name, task, layers))
        found[column] = best([(w * prompts.x_query).sum(1, keepdim=True)], prompts)
    return found
