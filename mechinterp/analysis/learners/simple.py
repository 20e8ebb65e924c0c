"""Table of simple learners of linear regression, and their fits to a model on given prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.learners.penalised import own_penalty, penalised
from mechinterp.analysis.stats import FOLDS, best_factor
from mechinterp.config import TaskConfig
from mechinterp.icl.given import PENALTIES
from mechinterp.icl.predictors import (
    adaptive_ridge,
    debiased_gd,
    dmmse,
    kalman,
    nadaraya_watson,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import gradient_descent, preprocess_then_optimise

STEPS = 128
"""Largest number of steps of `gd` and of `algorithm_1`."""
KERNEL_PROMPTS = 8192
"""Largest number of prompts that omega of the kernel head is fitted to."""
OMEGA_STEP = 1e-4
"""Step of the differences that give derivatives with respect to omega, in units of 1 / E x_i^2."""
Predictions = Float[np.ndarray, "prompt d_y"]


@dataclass(frozen=True)
class SimpleLearner:
    """Learner with at most one factor that is fitted to a model, or one setting that is chosen."""

    predict: Callable[[Prompts, Any], Tensor]
    """Function of prompts and their task, which most do not need: predictions [batch, d_y], or [setting, batch, d_y] if
    there are `settings`."""
    factor: str = ""
    """Name of the factor on the prediction that is fitted to the model by least squares; empty if
    there is none."""
    settings: Sequence[float] = ()
    """Settings of which the one with the smallest excess risk is taken, which favours the learner."""
    without: str = ""
    """Name of the same learner without an intercept; empty if it has none."""

    @property
    def is_fitted(self) -> bool:
        """True if a factor or a setting is fitted to the prompts."""
        return bool(self.factor or self.settings)


@dataclass(frozen=True)
class Fit:
    """Prediction of a learner at its fitted factor and its setting."""

    prediction: Predictions
    factor: float = np.nan
    factor_sem: float = np.nan
    """Standard error of `factor` over prompts."""
    setting: float = np.nan
    """omega of the kernel head (1/x^2), penalty (x^2) or number of steps; NaN if there is none."""


LEARNERS = {
    "zero": SimpleLearner(lambda prompts, task: zero_prediction(prompts)),
    "vanilla_gd": SimpleLearner(lambda prompts, task: vanilla_gd(prompts, eta=1.0), factor="eta"),
    "debiased_gd": SimpleLearner(lambda prompts, task: debiased_gd(prompts, eta=1.0), factor="eta"),
    "kernel_head": SimpleLearner(  # at omega 1; `fitted` searches the nearest omega
        lambda prompts, task: nadaraya_watson(prompts, omega=1.0, mu=1.0), factor="mu"
    ),
    "ridge": SimpleLearner(lambda prompts, task: ridge(prompts, penalty=task.posterior_penalty)),
    "dmmse": SimpleLearner(
        lambda prompts, task: dmmse(prompts, pool=task.pool(), noise_var=task.noise_variance)
    ),
    "adaptive_ridge": SimpleLearner(
        lambda prompts, task: adaptive_ridge(
            prompts, levels=task.noise_levels, beta_var=task.beta_variance
        )
    ),
    "kalman": SimpleLearner(lambda prompts, task: kalman(prompts, task=task)),
    "least_squares": SimpleLearner(lambda prompts, task: ridge(prompts, penalty=0)),
    "best_ridge": SimpleLearner(
        lambda prompts, task: penalised(prompts, PENALTIES), settings=PENALTIES
    ),
    "gd": SimpleLearner(
        lambda prompts, task: gradient_descent(prompts, steps=STEPS), settings=range(STEPS + 1)
    ),
    "algorithm_1": SimpleLearner(
        lambda prompts, task: preprocess_then_optimise(prompts, steps=STEPS),
        settings=range(STEPS + 1),
    ),
    "ridge_with_intercept": SimpleLearner(
        lambda prompts, task: penalised(prompts, own_penalty(task), intercept=True)[0],
        without="ridge",
    ),
    "least_squares_with_intercept": SimpleLearner(
        lambda prompts, task: penalised(prompts, (0.0,), intercept=True)[0],
        without="least_squares",
    ),
}
"""Learners by name. Ridge has the penalty of the task's law; dmmse needs a task with a pool, the Kalman filter and
adaptive ridge regression a known law of Gaussian task vectors."""
FOR_SOME_TASKS = {
    "dmmse": lambda task: task.n_tasks is not None,
    "adaptive_ridge": lambda task: len(task.noise_levels) > 1,
    "kalman": lambda task: task.drift != 1,
}
"""Learners that are the posterior mean of some tasks only, and whether a task is one of them."""
CROSS_VALIDATED = {"ridge": False, "ridge_with_intercept": True}
"""Learners whose penalty is cross-validated if the law is unknown; True: with an intercept."""


def fitted(name: str, prompts: Prompts, law: TaskConfig | None, model: Predictions) -> Fit:
    """A learner of `LEARNERS` on prompts, its factor fitted to a model's predictions.

    Without pairs every learner but dmmse predicts 0.

    Args:
        law: Law of the prompts; None: unknown, and the penalty of ridge regression is chosen by
            cross-validation over prompts.

    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(d_x=3)
        >>> prompts = draw_prompts(task, 64, dtype=torch.float64)
        >>> found = fitted("vanilla_gd", prompts, task, vanilla_gd(prompts, eta=0.5).numpy())
        >>> round(found.factor, 9), round(found.factor_sem, 9)
        (0.5, 0.0)
    """
    learner, clean = LEARNERS[name], prompts.y_query_clean.numpy(force=True)
    if not prompts.x.shape[1] and name != "dmmse":
        return Fit(np.zeros_like(clean))
    if learner.factor and not np.isfinite(model).all():
        return Fit(np.full_like(clean, np.nan))
    if name == "kernel_head":
        return _kernel_fit(prompts, model)
    if law is None and name in CROSS_VALIDATED:
        return cross_validated(prompts, intercept=CROSS_VALIDATED[name])
    found = learner.predict(prompts, law).double().numpy(force=True)
    if learner.settings:
        best = int(np.square(found - clean).mean((1, 2)).argmin())
        return Fit(found[best], setting=float(learner.settings[best]))
    if learner.factor:
        factor, sem = best_factor(found, model)
        return Fit(factor * found, factor, sem)
    if law is None or name not in CROSS_VALIDATED:
        return Fit(found)
    return Fit(found, setting=own_penalty(law)[0])


def cross_validated(prompts: Prompts, *, intercept: bool = False) -> Fit:
    """Ridge regression whose penalty for each fifth of the prompts has the smallest loss on the others.

    The setting is the penalty with the smallest loss on all prompts.

    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> prompts = draw_prompts(TaskConfig(noise_var=0.0), 64, dtype=torch.float64)
        >>> cross_validated(prompts).setting
        0.0
    """
    every = penalised(prompts, PENALTIES, intercept=intercept).double().numpy(force=True)
    losses = np.square(every - prompts.y_query.numpy(force=True)).mean(2)  # [penalty, prompt]
    fold = np.arange(len(prompts)) % FOLDS
    best = [int(losses[:, fold != each].mean(1).argmin()) for each in range(FOLDS)]
    prediction = every[np.array(best)[fold], np.arange(len(prompts))]
    return Fit(prediction, setting=float(PENALTIES[int(losses.mean(1).argmin())]))


def _kernel_fit(prompts: Prompts, model: Predictions) -> Fit:
    """The kernel head nearest to a model.

    (-omega, -mu) predicts nearly the same as (omega, mu); hence the factor is mu times the sign of
    omega.
    """
    first = prompts[:KERNEL_PROMPTS]
    omega, through_omega = _kernel_omega(model[: len(first)], first)
    shape = nadaraya_watson(prompts, omega=omega, mu=1.0).double().numpy(force=True)
    factor, _ = best_factor(shape, model)
    sem = _kernel_factor_sem(shape, model, factor, through_omega)
    return Fit(factor * shape, -factor if omega < 0 else factor, sem, omega)


def _kernel_omega(
    prediction: Predictions, prompts: Prompts
) -> tuple[float, Float[np.ndarray, " prompt"]]:
    """Fits omega of the kernel head closest to a model's predictions; mu is fitted for each omega.

    Returns:
        omega, and the influence of each prompt on the best mu through omega, times the number of
        prompts.
    """
    from scipy.optimize import minimize_scalar  # slow import

    @cache
    def at(omega: float) -> tuple[float, float]:
        """The best mu and the mean squared distance."""
        shape = nadaraya_watson(prompts, omega=omega, mu=1.0).double().numpy(force=True)
        factor, _ = best_factor(shape, prediction)
        return factor, float(np.square(prediction - factor * shape).mean())

    size = prompts.x.square().mean().item()
    top = 2 / size / prompts.x.shape[2] ** 0.5 if size else np.inf
    if np.isinf(top):  # x is 0: every kernel smoother is the mean of y
        return 0.0, np.zeros(len(prompts))
    both = [
        minimize_scalar(
            lambda omega: at(float(omega))[1],
            bounds=bounds,
            method="bounded",
            options={"xatol": 1e-4},
        ).x
        for bounds in ((0.0, top), (-top, 0.0))
    ]
    omega = float(min(both, key=lambda omega: at(float(omega))[1]))
    return omega, _through_omega(prompts, prediction, omega, at(omega)[0])


def _through_omega(
    prompts: Prompts, prediction: Predictions, omega: float, factor: float
) -> Float[np.ndarray, " prompt"]:
    """Influence of each prompt on the best mu through the best omega, times the number of prompts.

    (omega, mu) minimise D = mean |f - mu s(omega)|^2. With 1 / n more weight on a prompt they move by -H^-1 psi_i / n. H has
    the second derivatives of D, and psi_i the first derivatives of |f_i - mu s_i|^2 of this prompt. The result is the motion of mu minus its motion at a fixed omega.
    """
    prompts, step = prompts.to(torch.float64), OMEGA_STEP / prompts.x.square().mean().item()
    below, s, above = (
        nadaraya_watson(prompts, omega=omega + change, mu=1.0).numpy(force=True)
        for change in (-step, 0.0, step)
    )
    ds, dds = (above - below) / (2 * step), (above - 2 * s + below) / step**2
    left = prediction - factor * s
    by_omega, by_mu = -2 * factor * (left * ds).mean(1), -2 * (left * s).mean(1)
    omega_twice = 2 * factor * (factor * ds**2 - left * dds).mean()
    mixed, mu_twice = 2 * (factor * s * ds - left * ds).mean(), 2 * (s**2).mean()
    determinant = omega_twice * mu_twice - mixed**2
    if not determinant > 0:  # no prediction depends on omega, or the search ended at its bound
        return np.zeros(len(s))
    return mixed * (by_omega - mixed / mu_twice * by_mu) / determinant


def _kernel_factor_sem(
    shape: Predictions,
    prediction: Predictions,
    factor: float,
    through_omega: Float[np.ndarray, " first"],
) -> float:
    """Standard error of the kernel head's mu over prompts, including their influence through omega.

    Args:
        through_omega: Influence through omega as returned by `_kernel_omega`, for the prompts that
            omega was fitted to.
    """
    residual = (shape * (prediction - factor * shape)).mean(1) / np.square(shape).mean()
    influence = residual / len(residual)
    influence[: len(through_omega)] += through_omega / len(through_omega)
    return float(np.sqrt(len(influence)) * influence.std(ddof=1))
