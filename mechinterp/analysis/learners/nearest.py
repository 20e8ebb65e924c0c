"""Simple learners nearest to a model's predictions, and its loss next to ridge regression and predicting 0.

The learners are fitted on prompts of the model's task.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.labels import LEARNER_TEXTS
from mechinterp.analysis.number_format import explained, with_error
from mechinterp.analysis.stats import best_factor, estimates, mean_and_sem, ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.display import frame_of
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts

NEAR_R2 = 0.5
"""R² of the nearest learner from which on it counts as close."""
OMEGAS = 2 * np.geomspace(1, 0.03, 12)
"""Scales of the kernel smoothers that a model is compared with, in units of 1 / (E x_i^2
sqrt(d_x)); each is tried with both signs."""
UNSCALED = ("least_squares", "ridge")
"""Learners that are compared without a fitted factor."""
FACTOR_OFF = 0.1
"""The task is doubted if the best factor on the prediction differs from 1 by more than this, and by more than
`DOUBT_ERRORS` standard errors."""
DOUBT_ERRORS = 4.0
"""Number of standard errors of a clear doubt."""
LEAST_R2 = 0.05
"""The R² at the best factor must exceed this, and `DOUBT_ERRORS` standard errors: otherwise the model does not do the task
at all."""


@dataclass(frozen=True, eq=False)
class Nearby:
    """R² of simple learners, fitted to a model, against its predictions."""

    learners: tuple[str, ...]
    """Names, nearest first."""
    r2: Float[np.ndarray, " learner"]
    """1 - mean (model - learner)^2 / mean model^2."""
    r2_sem: Float[np.ndarray, " learner"]
    lead: Float[np.ndarray, " learner"]
    """R² of the reference (the model's own formula, else the nearest learner) minus R² of this
    learner. The formula has its best factor."""
    lead_sem: Float[np.ndarray, " learner"]
    """Standard error of `lead`, paired over prompts."""

    @property
    def is_near(self) -> bool:
        """True if the R² of the nearest learner is at least NEAR_R2."""
        return bool(self.r2[0] >= NEAR_R2)

    def records(self) -> list[dict[str, object]]:
        """One dict per learner."""
        names = ("r2", "r2_sem", "lead", "lead_sem")
        return frame_of(self, *names, learner=self.learners).to_dict(orient="records")

    def in_words(self, n: int = 0) -> str:
        """Name of a learner with its R²."""
        return f"{LEARNER_TEXTS[self.learners[n]]}, {explained(self.r2[n], self.r2_sem[n])}"

    @property
    def sentence(self) -> str:
        """The nearest learner, and whether its R² reaches NEAR_R2."""
        far = "" if self.is_near else f" (below {NEAR_R2:g}: not close)"
        return f"the nearest simple learner is {self.in_words()}{far}"


def nearby(
    prediction: Float[Tensor, "batch d_y"],
    families: Mapping[str, Float[Tensor, "member batch d_y"]],
    formula: Float[Tensor, "batch d_y"] | None = None,
) -> Nearby:
    """R² of the best member of each family of learners, at its best factor.

    Args:
        families: Predictions of the members. Ridge regression and least squares are used without a
            factor.
        formula: Prediction of the model's own formula; None if it has none.
    Example:
        >>> line = torch.tensor([[1.0], [2.0]])
        >>> nearby(3 * line, {"vanilla_gd": line[None]}).r2.tolist()
        [1.0]
    """
    size = prediction.square().mean(1).numpy()
    each = [
        _nearest(prediction, members, scaled=name not in UNSCALED)
        for name, members in families.items()
    ]
    gaps = np.stack(each, axis=1)
    own = gaps[:, gaps.mean(0).argmin()]
    if formula is not None:
        own = _nearest(prediction, formula[None])
    unexplained, sem = ratio_and_sem(gaps, size)
    lead, lead_sem = ratio_and_sem(gaps - own[:, None], size)
    order = np.argsort(np.nan_to_num(unexplained, nan=np.inf), kind="stable")
    columns = (column[order] for column in (1 - unexplained, sem, lead, lead_sem))
    return Nearby(tuple(list(families)[n] for n in order), *columns)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Prompts of a task with the moments for one gradient step."""

    prompts: Prompts
    task: TaskConfig
    moment: Float[Tensor, "batch d_x d_y"]
    """(1/L) sum_l x_l y_l."""
    centred_moment: Float[Tensor, "batch d_x d_y"]
    """(1/L) sum_l (x_l - mean(x)) y_l."""

    def gradient_step(
        self, preconditioner: Float[Tensor, "d_y d_x d_x"], *, centred: bool
    ) -> Float[Tensor, "batch d_y"]:
        """One step of (debiased) gradient descent from zero: x_query^T Gamma_n moment_n."""
        moment = self.centred_moment if centred else self.moment
        return torch.einsum("bi,nij,bjn->bn", self.prompts.x_query, preconditioner, moment)

    @cached_property
    def ridge(self) -> Float[Tensor, "batch d_y"]:
        """Predictions of ridge regression at the task's own penalty."""
        return ridge(self.prompts, penalty=self.task.posterior_penalty)

    @cached_property
    def families(self) -> dict[str, Float[Tensor, "member batch d_y"]]:
        """Predictions of simple learners, up to a factor; kernel smoothers at several scales, from flat to sharp.

        Without noise ridge is least squares, and is left out.
        """
        x, y, query = self.prompts.x, self.prompts.y, self.prompts.x_query
        size = float(x.square().mean()) or 1.0  # every scale is the mean of y if all x are 0
        unit = 1 / (size * x.shape[2] ** 0.5)
        scores = torch.einsum("blx,bx->bl", x, query)
        smoothed = [
            torch.einsum("bl,bln->bn", torch.softmax(float(sign * omega * unit) * scores, 1), y)
            for omega in OMEGAS
            for sign in (1, -1)
        ]
        learned = {
            "vanilla_gd": torch.einsum("bx,bxn->bn", query, self.moment)[None],
            "debiased_gd": torch.einsum("bx,bxn->bn", query, self.centred_moment)[None],
            "kernel_head": torch.stack(smoothed),
            "least_squares": ridge(self.prompts, penalty=0)[None],
        }
        return learned | ({"ridge": self.ridge[None]} if self.task.noise_variance else {})


@lru_cache(maxsize=16)
def evaluation(task: TaskConfig, n_prompts: int, seed: int, attend_to_self: bool) -> Evaluation:
    """Prompts drawn once for all models of a task; with `attend_to_self` the token (x_query, 0) is
    a key too."""
    prompts = evaluation_prompts(task, n_prompts=n_prompts, seed=seed, fitted=1)
    keys = prompts.tokens if attend_to_self else prompts.context_tokens
    x, y = keys.split([task.d_x, task.d_y], dim=-1)
    # Linear attention divides by the length of the context, whatever the number of keys.
    length = prompts.x.shape[1]
    moment = x.mT @ y
    centred = moment - x.mean(1)[:, :, None] * y.sum(1)[:, None]
    return Evaluation(prompts, task, moment / length, centred / x.shape[1])


def _nearest(
    prediction: Float[Tensor, "batch d_y"],
    members: Float[Tensor, "member batch d_y"],
    *,
    scaled: bool = True,
) -> Float[np.ndarray, " batch"]:
    """Squared distance to the nearest member, scaled to fit."""
    inner, size = (members * prediction).sum((1, 2)), members.square().sum((1, 2))
    factor = inner / size.clamp_min(1e-300) if scaled else torch.ones_like(inner)
    best = int((2 * factor * inner - factor.square() * size).argmax())
    return (prediction - factor[best] * members[best]).square().mean(1).numpy()


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
        value > 0
        and off > max(FACTOR_OFF, DOUBT_ERRORS * sem)
        and r2[0] > max(LEAST_R2, DOUBT_ERRORS * r2[1])
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
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, seed=0)
        >>> loss = task_loss(torch.zeros(8, 1), prompts.y_query, prompts)
        >>> loss.model == loss.zero, loss.ridge
        (True, 0.0)
    """
    target = prompts.y_query
    factor, _ = best_factor(prediction, prompts.y_query_clean)
    learned = (prediction, torch.zeros_like(target), ridge, factor * prediction)
    own, zero, best, scaled = (
        (each - target).square().mean(1).double().numpy() for each in learned
    )
    unexplained, sem = ratio_and_sem(scaled, zero)
    numbers = {"model": own, "zero": zero, "ridge": best}
    losses = {name: mean_and_sem(each) for name, each in numbers.items()}
    return TaskLoss(**estimates(**losses, scaled_r2=(1 - unexplained, sem)))
