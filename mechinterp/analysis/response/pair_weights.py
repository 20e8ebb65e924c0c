"""Predictions of any source, and the weight of each pair in them: a_j = df/dy_j.

Autograd gives the weights of models and of functions in torch. A function that autograd cannot
follow, such as one in numpy, gets central differences.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import (
    Learner,
    Source,
    after_layers,
    is_learner,
    predictor_of,
)

TOGETHER = 256
"""Number of prompts that run together."""
DIFFERENCE = 1e-3
"""Step of the central differences, in standard deviations of y."""


def function_of(source: Source | Learner, layer: int | None = None) -> Learner:
    """Function from prompts to predictions [batch, d_y] that autograd can follow.

    Args:
        layer: Number of layers after which the prediction is read; None: all.
    Raises:
        ValueError: If the source is neither a model nor a function of prompts, or has fewer layers.
    """
    if not is_learner(source):
        predictor = predictor_of(source)
        return lambda prompts: predictor.with_gradients(prompts, layer)
    learner = cast(Learner, source)
    read = -1 if layer is None else layer - 1

    def one(prompts: Prompts) -> Tensor:
        path = after_layers(learner, prompts)
        return path[read if len(path) > 1 else 0]

    return one


def chunks_of(prompts: Prompts) -> Iterator[Prompts]:
    """The prompts in parts of TOGETHER."""
    return (prompts[start : start + TOGETHER] for start in range(0, len(prompts), TOGETHER))


@torch.no_grad()
def values(function: Learner, prompts: Prompts, output: int = 0) -> Float[np.ndarray, " batch"]:
    """Predictions of one response, in float64."""
    parts = [function(part)[:, output] for part in chunks_of(prompts)]
    return torch.cat(parts).double().numpy(force=True)


def pair_weights(
    function: Learner, prompts: Prompts, output: int = 0, of: int | None = None
) -> Float[np.ndarray, "batch context"]:
    """Weight of each pair in the prediction, df/dy_j at the prompt's own y.

    Args:
        output: Number of the predicted response.
        of: Number of the response whose y_j is varied; None: the predicted one.
    Example:
        >>> from functools import partial
        >>> from mechinterp import TaskConfig, sample_prompts
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> prompts = sample_prompts(TaskConfig(d_x=2, context_length=4), 3)
        >>> weights = pair_weights(partial(vanilla_gd, eta=2.0), prompts)
        >>> bool(np.allclose(weights, (prompts.x @ prompts.x_query[:, :, None])[..., 0] / 2, atol=1e-6))
        True
    """
    column = output if of is None else of
    step = DIFFERENCE * float(prompts.y.std())
    parts = []
    for part in chunks_of(prompts):
        exact = _by_autograd(function, part, output)
        parts.append(
            _by_differences(function, part, output, column, step)
            if exact is None
            else exact[..., column]
        )
    return torch.cat(parts).double().numpy(force=True)


def _by_autograd(
    function: Learner, prompts: Prompts, output: int
) -> Float[Tensor, "batch context d_y"] | None:
    """Gradient with respect to y; None if autograd cannot follow the function."""
    y = prompts.y.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        try:
            prediction = function(replace(prompts, y=y))[:, output]
        except RuntimeError:  # "Can't call numpy() on Tensor that requires grad"
            return None
        if not prediction.requires_grad:
            return None
        return torch.autograd.grad(prediction.sum(), y)[0]


@torch.no_grad()
def _by_differences(
    function: Learner, prompts: Prompts, output: int, column: int, step: float
) -> Float[Tensor, "batch context"]:
    """Central differences, two runs per pair."""

    def moved(pair: int, by: float) -> Tensor:
        y = prompts.y.clone()
        y[:, pair, column] += by
        return function(replace(prompts, y=y))[:, output]

    slopes = [
        (moved(pair, step) - moved(pair, -step)) / (2 * step) for pair in range(prompts.x.shape[1])
    ]
    return torch.stack(slopes, 1)
