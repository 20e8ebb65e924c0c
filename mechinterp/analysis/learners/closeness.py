"""Distances of predictions to dMMSE and ridge, on prompts with tasks of the pool and with new
tasks."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.patching.pairing import with_task_vectors
from mechinterp.analysis.stats import (
    estimates,
    mean_and_sem,
    ratio_and_sem,
    require_moderate,
    without_worst,
)
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import frame_of
from mechinterp.icl.pools import Pool, dmmse, dmmse_at_every, require_pool
from mechinterp.icl.predictors import ridge, ridge_at_every
from mechinterp.icl.prompts import Prompts, generator_for, task_pool
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Learner, Source, is_learner, predictor_of
from mechinterp.models.run.task import task_for
from mechinterp.progress import ProgressCallback

KINDS = ("pool", "new")
"""Kinds of prompts: with tasks of the pool, and with fresh tasks."""
MOST_LENGTHS = 16
ERROR = 5
"""Column of `Sample.squares` with the squared error of the model; the next columns are those of
dMMSE and ridge."""


@dataclass(frozen=True, eq=False)
class Closeness:
    """Distances of predictions f to dMMSE and to ridge, for each kind of prompts and each length or
    step."""

    distance_dmmse: Float[np.ndarray, "*axes"]
    """Mean of |f - dMMSE|^2 / d_x, unit y^2."""
    distance_dmmse_sem: Float[np.ndarray, "*axes"]
    distance_ridge: Float[np.ndarray, "*axes"]
    """Mean of |f - ridge|^2 / d_x, unit y^2."""
    distance_ridge_sem: Float[np.ndarray, "*axes"]
    relative: Float[np.ndarray, "*axes"]
    """distance_dmmse / (distance_dmmse + distance_ridge): 0 at dMMSE, 1 at ridge."""
    relative_sem: Float[np.ndarray, "*axes"]
    weight_dmmse: Float[np.ndarray, "*axes"]
    """Weight a of the nearest mixture a dMMSE + (1 - a) ridge, by least squares."""
    weight_dmmse_sem: Float[np.ndarray, "*axes"]
    unexplained: Float[np.ndarray, "*axes"]
    """Mean squared distance to that mixture, divided by the mean squared distance between dMMSE and
    ridge."""
    unexplained_sem: Float[np.ndarray, "*axes"]
    risk: Float[np.ndarray, "*axes"]
    """Excess risk of the model, unit y^2; the loss adds the variance of the noise."""
    risk_sem: Float[np.ndarray, "*axes"]
    risk_dmmse: Float[np.ndarray, "*axes"]
    """Excess risk of dMMSE, unit y^2."""
    risk_dmmse_sem: Float[np.ndarray, "*axes"]
    risk_ridge: Float[np.ndarray, "*axes"]
    """Excess risk of ridge, unit y^2."""
    risk_ridge_sem: Float[np.ndarray, "*axes"]

    def frame(self, **axis: Int[np.ndarray, " value"]) -> pd.DataFrame:
        """One row per kind of prompts, and per value of the second axis if there is one."""
        return frame_of(self, *(field.name for field in fields(self)), tasks=KINDS, **axis)

    def plot(self, values: Int[np.ndarray, " value"], title: str, x_title: str) -> go.Figure:
        """Relative distance over the second axis, on prompts of both kinds."""
        return figures.lines(
            values,
            figures.named((f"{kind} tasks" for kind in KINDS), self.relative, self.relative_sem),
            levels=[0.5],
            title=title,
            x_title=x_title,
            y_title="relative distance",
        )

    def plot_risks(self, values: Int[np.ndarray, " value"], title: str, x_title: str) -> go.Figure:
        """Excess risks of the model, dMMSE and ridge over the second axis, on both kinds of prompts."""
        named = {"model": "risk", "dMMSE": "risk_dmmse", "ridge": "risk_ridge"}
        risks = {
            f"{who}, {kind} tasks": (getattr(self, name)[i], getattr(self, f"{name}_sem")[i])
            for i, kind in enumerate(KINDS)
            for who, name in named.items()
        }
        return figures.lines(
            values,
            risks,
            title=title,
            x_title=x_title,
            y_title="excess risk (y²)",
            log_y=x_title == "step",
        )


@dataclass(frozen=True, eq=False)
class Setting:
    """A task and the pool that models are compared with."""

    task: TaskConfig
    pool: Pool
    own: bool
    """True if the pool is the task's own."""

    def sample(
        self,
        kind: str,
        n_prompts: int,
        lengths: Sequence[int],
        seed: int,
        progress: ProgressCallback,
        source: Source | Learner | None = None,
    ) -> "Sample":
        """Prompts of one kind with dMMSE and ridge at each context length.

        Args:
            source: Model whose predictions at every x come from one pass; its prompts of each length then end with the next
                x. None, or any other model: all lengths have the same query.
        """
        full = evaluation_prompts(
            self.task,
            n_prompts=n_prompts,
            seed=seed,
            context_length=max(lengths),
            new_tasks=kind == "new" or not self.own,
            fitted=1,  # one fitted scalar: the weight
        )
        if kind == "pool" and not self.own:
            rows = torch.randint(
                len(self.pool), (n_prompts,), generator=generator_for(seed, "pool", 0), device="cpu"
            )
            full = with_task_vectors(full, self.pool[rows].to(full.x))
        law: dict[str, Any] = {"pool": self.pool, "noise_var": self.task.noise_var}
        penalty = self.task.posterior_penalty
        one_pass = source is not None and not is_learner(source)
        own = predictor_of(source).predict_at_every(full) if one_pass else None
        if own is not None:
            curves = dmmse_at_every(full, **law), ridge_at_every(full, penalty=penalty), own
            each = [[curve[:, length] for length in lengths] for curve in curves]
            return Sample([full.prefix(length) for length in lengths], *each)
        prompts = [full.shortened(length) for length in lengths]
        shown = progress(prompts, f"dMMSE on {kind} tasks")
        return Sample(
            prompts,
            [dmmse(each, **law) for each in shown],
            [ridge(each, penalty=penalty) for each in prompts],
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """The same prompts at several context lengths, with dMMSE and ridge."""

    prompts: list[Prompts]
    dmmse: list[Tensor]
    ridge: list[Tensor]
    own: list[Tensor] | None = None
    """Predictions of the model, if one pass gave them at every length."""

    def squares(self, predictions: list[Tensor]) -> Float[np.ndarray, "prompt length square"]:
        """Columns per prompt and length, for predictions f: |f - dMMSE|^2 / d_x, |f - ridge|^2 /
        d_x, <f - ridge, dMMSE - ridge>, |dMMSE - ridge|^2, |f - ridge|^2, and the squared errors of
        f, dMMSE and ridge.

        Raises:
            ValueError: If predictions overflow.
        """
        require_moderate(torch.cat(predictions))
        rows = []
        for prompts, D, R, f in zip(self.prompts, self.dmmse, self.ridge, predictions, strict=True):
            d_x, target, f = prompts.x.shape[2], prompts.y_query_clean, f.double()
            near = [(f - D).square() / d_x, (f - R).square() / d_x]
            line = [(f - R) * (D - R), (D - R).square(), (f - R).square()]
            errors = [(each - target).square() for each in (f, D, R)]
            rows.append(torch.stack([each.mean(1) for each in (*near, *line, *errors)], 1))
        return torch.stack(rows, 1).numpy(force=True)


def closeness(squares: Float[np.ndarray, "prompt *axes square"], few: int = 0) -> Closeness:
    """Means over prompts of the `squares` of a sample, and ratios of these means.

    Args:
        few: Number of rows at the end that replace dropped prompts; they enter standard errors
            only.
    """
    to_dmmse, to_ridge, inner, gap, norm, *errors = np.moveaxis(squares, -1, 0)
    # The weight minimises a mean square, so its error changes that mean in second order only.
    # The standard error needs no term for it.
    weight, weight_sem = trimmed_ratios(inner, gap, few)
    risk, risk_dmmse, risk_ridge = (trimmed_mean(each, few) for each in errors)
    numbers = estimates(
        distance_dmmse=trimmed_mean(to_dmmse, few),
        distance_ridge=trimmed_mean(to_ridge, few),
        relative=trimmed_ratios(to_dmmse, to_dmmse + to_ridge, few),
        weight_dmmse=(weight, weight_sem),
        unexplained=trimmed_ratios(norm - 2 * weight * inner + weight**2 * gap, gap, few),
        risk=risk,
        risk_dmmse=risk_dmmse,
        risk_ridge=risk_ridge,
    )
    return Closeness(**numbers)


def trimmed_closeness(squares: Float[np.ndarray, "prompt kind square"], one_in: int) -> Closeness:
    """`closeness` without the worst prompts of each kind: 1 in `one_in`, by the model's error."""
    few = len(squares) // one_in
    kinds = [trimmed(kind, kind[:, ERROR], one_in) for kind in np.moveaxis(squares, 1, 0)]
    return closeness(np.stack(kinds, 1), few)


def trimmed(
    values: Float[np.ndarray, " prompt *axes"], sizes: Float[np.ndarray, " prompt"], one_in: int
) -> Float[np.ndarray, " prompt *axes"]:
    """Values in which the worst prompts are replaced: 1 in `one_in`, by `sizes`.

    First come the other prompts. Then comes the worst of these, once for each replaced prompt.
    These last rows enter standard errors only, as the standard error of a trimmed mean needs.
    """
    stay = without_worst(sizes, one_in)
    kept = values[stay]
    worst = kept[sizes[stay].argmax()]
    return np.concatenate([kept, np.repeat(worst[None], len(values) - len(kept), 0)])


def trimmed_mean(values: np.ndarray, few: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the first axis without the last `few` rows, and its standard error with them."""
    kept = len(values) - few
    mean, sem = mean_and_sem(values[:kept])
    return mean, _with_cut(sem, values[kept:] - mean, len(values))


def trimmed_ratios(
    numerator: np.ndarray, denominator: np.ndarray, few: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ratios of means over the first axis and their standard errors, separately along the other
    axes."""
    n, shape = len(numerator), numerator.shape[1:]
    kept = n - few
    columns = [each[:kept].reshape(kept, -1).T for each in (numerator, denominator)]
    pairs = [ratio_and_sem(top, bottom) for top, bottom in zip(*columns, strict=True)]
    ratio, sem = (np.array(each, dtype=float).reshape(shape) for each in zip(*pairs, strict=True))
    residual = (numerator - ratio * denominator)[kept:] / denominator[:kept].mean(0)
    return ratio, _with_cut(sem, residual, n)


def _with_cut(sem: np.ndarray, residual: np.ndarray, n_prompts: int) -> np.ndarray:
    return np.sqrt(np.square(sem) + np.square(residual).sum(0) / n_prompts**2)


def setting_of(source: Source, task: TaskLike | None, pool: Pool | None, analysis: str) -> Setting:
    """Task and pool of a comparison.

    Raises:
        ValueError: If there is no task or no pool, or the sizes of the pool differ from the task's.
    """
    task = task_for(source, task, analysis)
    if pool is None:
        if task.n_tasks is None:
            raise ValueError(
                f"{analysis} needs a pool: pass a pool, or a task with n_tasks, got n_tasks null."
            )
        return Setting(task, task_pool(task), own=True)
    require_pool(pool, task.d_x, task.d_y)
    return Setting(task, pool.to("cpu", torch.float64), own=False)


def lengths_of(
    source: Source, task: TaskConfig, context_lengths: Sequence[int] | None
) -> list[int]:
    """Context lengths of a comparison, rising: from the shortest of a checkpoint's training, or 1,
    to the task's own.

    Raises:
        ValueError: If a length is below 1, or there are none.
    """
    if context_lengths is not None:
        if not context_lengths or min(context_lengths) < 1:
            raise ValueError(f"context_lengths must be >= 1, got {list(context_lengths)}.")
        return sorted(set(context_lengths))
    longest = task.context_length
    # At lengths that a model was not trained on, its prediction is arbitrary; for linear attention
    # it is often huge.
    shortest = min(getattr(source, "shortest_trained", None) or 1, longest)
    count = min(longest - shortest + 1, MOST_LENGTHS)
    return sorted({int(length) for length in np.linspace(shortest, longest, count).round()})
