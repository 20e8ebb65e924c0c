"""Loss of a model on its task, next to ridge regression and predicting 0; doubts about the task."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import best_factor, mean_and_sem, ratio_and_sem
from mechinterp.icl.prompts import Prompts

FACTOR_OFF, ERRORS, LEAST_R2 = 0.1, 4.0, 0.05
"""The task is doubted if the best factor on the prediction differs from 1 by more than FACTOR_OFF
and by more than ERRORS standard errors. The R^2 at that factor must exceed LEAST_R2: otherwise the
model does not do the task at all."""


@dataclass(frozen=True)
class TaskLoss:
    """Mean squared error against the noisy response on the same prompts, unit y^2."""

    model: float
    model_sem: float
    zero: float
    """Loss of predicting 0."""
    zero_sem: float
    ridge: float
    """Loss of ridge regression at the task's own penalty."""
    ridge_sem: float
    scaled_r2: float
    """R^2 = 1 - loss / loss of predicting 0, for the prediction times its best factor; NaN if all
    predictions are 0."""
    scaled_r2_sem: float

    @property
    def r2(self) -> float:
        """1 - loss / loss of predicting 0; NaN if all responses are 0."""
        return 1 - self.model / self.zero if self.zero else math.nan

    def __str__(self) -> str:
        return (
            f"{with_error(self.model, self.model_sem)} y² (ridge regression: "
            f"{with_error(self.ridge, self.ridge_sem)}; predicting 0: {with_error(self.zero, self.zero_sem)})"
        )


def task_doubt(factor: tuple[float, float], r2: tuple[float, float]) -> str:
    """Sentence that the model may have been trained on another task; empty if nothing suggests it.

    Args:
        factor: Best factor on the prediction, with its standard error.
        r2: 1 - loss / loss of predicting 0 for the prediction times that factor, with its standard
            error. Without the factor, a prediction twice too large would be no better than
            predicting 0. No task changes the sign of a
            prediction: a factor below 0 raises no doubt.
    Example:
        >>> task_doubt((0.61, 0.02), (0.3, 0.03))
        'the task may be another one: the best factor on its prediction is 0.61 ± 0.02 (1 for the
        task of its training); state the task by --task (task=)'
        >>> task_doubt((1.05, 0.01), (0.8, 0.01)), task_doubt((-1220, 30), (0.3, 0.03))
        ('', '')
    """
    value, sem = factor
    off = abs(value - 1)
    clear = (
        value > 0 and off > max(FACTOR_OFF, ERRORS * sem) and r2[0] > max(LEAST_R2, ERRORS * r2[1])
    )
    if not clear:
        return ""
    return (
        f"the task may be another one: the best factor on its prediction is {with_error(value, sem)} "
        "(1 for the task of its training); state the task by --task (task=)"
    )


def task_loss(
    prediction: Float[Tensor, "batch d_y"], ridge: Float[Tensor, "batch d_y"], prompts: Prompts
) -> TaskLoss:
    """Loss of a model, next to ridge regression and predicting 0.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, seed=0)
        >>> found = task_loss(torch.zeros(8, 1), prompts.y_query, prompts)
        >>> found.model == found.zero, found.ridge
        (True, 0.0)
    """
    target = prompts.y_query
    errors = [
        (learned - target).square().mean(1).double().numpy()
        for learned in (prediction, torch.zeros_like(target), ridge)
    ]
    factor, _ = best_factor(prediction, prompts.y_query_clean)
    scaled = (factor * prediction - target).square().mean(1).double().numpy()
    unexplained, sem = ratio_and_sem(scaled, errors[1])
    numbers = [number for each in errors for number in mean_and_sem(each)]
    return TaskLoss(*map(float, (*numbers, 1 - unexplained, sem)))
