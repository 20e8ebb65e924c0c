"""Algorithms of the package with random scalars, as functions of prompts."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mechinterp import Prompts, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import draw_prompts

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
GD, NEWTON, ALG1, ISTA = (
    "gradient descent",
    "iterative Newton",
    "preprocess then optimise",
    "ISTA",
)
PRE, RIDGE, GDPP = "preconditioned gradient descent", "ridge", "GD++"
Law = Callable[[Prompts], Tensor]
Random = np.random.Generator


def natural(name: str, task: TaskConfig, n_layers: int, random: Random) -> list[float]:
    """Natural scalars for a task, each times a random factor."""
    drawn = draw_prompts(task, 128, seed=1, dtype=torch.float64)
    start = BY_NAME[name].start(PromptMoments(drawn, task), n_layers).numpy()
    if name == ALG1 and task.sparsity is None:
        start = 0.4 * start  # If b has heavy tails, the natural step is too long.
    return (start * random.uniform(0.7, 1.3, len(start))).tolist()


def law_of(name: str, task: TaskConfig, n_layers: int, random: Random, noise: float = 0.0) -> Law:
    """An algorithm whose step in each layer sees x_query through I + noise * G."""
    algorithm, scalars = BY_NAME[name], natural(name, task, n_layers, random)
    G = torch.from_numpy(random.normal(size=(n_layers, task.d_x, task.d_x))) / task.d_x**0.5

    def law(prompts: Prompts) -> Tensor:
        exact = algorithm.predictions(PromptMoments(prompts, task), scalars, n_layers)
        if noise == 0:
            return exact
        rest = []
        for matrix in G:
            seen = Prompts(**{**vars(prompts), "x_query": prompts.x_query @ matrix.mT})
            rest.append(algorithm.predictions(PromptMoments(seen, task), scalars, n_layers))
        return exact + noise * torch.stack([each[layer] for layer, each in enumerate(rest)])

    return law
