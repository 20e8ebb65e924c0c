"""Ridge regression at several penalties, with and without an intercept."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge_path
from mechinterp.icl.prompts import Prompts


def own_penalty(task: TaskConfig) -> tuple[float, ...]:
    """Penalty of ridge regression at the task's own law, as the only one to choose from."""
    return (task.posterior_penalty,)


def centred(prompts: Prompts) -> tuple[Prompts, Float[Tensor, "batch d_y"]]:
    """Prompts minus the means of x and y over the pairs of each, and the mean of y.

    Example:
        >>> x = torch.tensor([[[1.0], [3.0]]])
        >>> prompts, mean = centred(Prompts.from_arrays(x, 5 * x, x[:, 0], 5 * x[:, 0]))
        >>> prompts.x.flatten().tolist(), prompts.x_query.item(), mean.item()
        ([-1.0, 1.0], -1.0, 10.0)
    """
    if not prompts.x.shape[1]:
        return prompts, torch.zeros_like(prompts.y_query)
    x, y = (each.mean(1) for each in (prompts.x, prompts.y))
    less = {"x": prompts.x - x[:, None], "y": prompts.y - y[:, None]}
    return replace(prompts, **less, x_query=prompts.x_query - x), y


def penalised(prompts: Prompts, penalties: Sequence[float], *, intercept: bool = False) -> Tensor:
    """Predictions [penalty, batch, d_y] of ridge regression; an intercept is not penalised."""
    if not intercept:
        return ridge_path(prompts, penalties)
    centre, mean = centred(prompts)
    return ridge_path(centre, penalties) + mean
