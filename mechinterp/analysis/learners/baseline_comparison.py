"""A model's loss on its task beside those of ridge regression and of predicting 0, and what it says of the task."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import best_factor, mean_and_sem, ratio_and_sem
from mechinterp.icl.prompts import Prompts

FACTOR_OFF, ERRORS, LEAST_R2 = 0.1, 4.0, 0.05
"""By how much the best factor on a prediction is off 1 where the task is doubted, by how many of its standard errors,
and the R^2 on the task, at that factor, from which on a model does it at all."""


@dataclass(frozen=True)
class TaskLoss:
    """Mean squared error against the noisy response on the same prompts, unit y^2."""

    model: float
    model_sem: float
    zero: float
    """Of predicting 0."""
    zero_sem: float
    ridge: float
    """Of ridge regression at the task's own penalty."""
    ridge_sem: float
    scaled_r2: float
    """1 - loss / loss of predicting 0 of the prediction times its best factor; NaN where all predictions are 0."""
    scaled_r2_sem: float

    @property
    def r2(self) -> float:
        """1 - loss / loss of predicting 0; NaN where all responses are 0."""
        return 1 - self.model / self.zero if self.zero else math.nan

    def __str__(self) -> str:
        return (
            f"{with_error(self.model, self.model_sem)} y² (ridge regression: "
            f"{with_error(self.ridge, self.ridge_sem)}; predicting 0: {with_error(self.zero, self.zero_sem)})"
        )


def task_doubt(factor: tuple[float, float], r2: tuple[float, float]) -> str:
    """A sentence that the model may have been trained on another task; empty where nothing says so.

    Args:
        factor: The best factor on the prediction, with its standard error.
        r2: 1 - loss / loss of predicting 0 of the prediction times that factor, with its standard error. As it is, a
            prediction twice too large is no better than predicting 0, whatever it says of the task. No task turns its
            sign: of a factor below 0 nothing is said.
    Example:
        >>> task_doubt((0.61, 0.02), (0.3, 0.03))
        'the task may be another one: the best factor on its prediction is 0.61 ± 0.02, 1 for the task it was trained on; --task (task=)'
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
        f"the task may be another one: the best factor on its prediction is {with_error(value, sem)}, "
        "1 for the task it was trained on; --task (task=)"
    )


def task_loss(
    prediction: Float[Tensor, "batch d_y"], ridge: Float[Tensor, "batch d_y"], prompts: Prompts
) -> TaskLoss:
    """The loss of a model beside those of ridge regression and of predicting 0.

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
