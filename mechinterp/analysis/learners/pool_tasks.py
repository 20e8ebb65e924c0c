"""Prompts with tasks of a pool and with new tasks, and how close a model's predictions are to those of each Bayes predictor."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.patching.pairing import with_task_vectors
from mechinterp.analysis.stats import estimates, mean_and_sem, require_moderate, without_worst
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import frame_of, with_sem
from mechinterp.icl.predictors import Pool, dmmse, require_pool, ridge
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.predictor import Learner, Source, is_learner, predictor_of
from mechinterp.progress import progress

TASK_KINDS = ("pool", "new")
"""Kinds of prompts: with tasks of the pool, and with fresh tasks."""
MOST_LENGTHS = 16
"""Largest number of default context lengths."""
ERROR_COLUMN = 5
"""Column of `Sample.squares` with the squared error of the model; the next columns are those of
dMMSE and ridge."""
DROPPED_ONE_IN = 1000
"""The strategy is decided without the worst prompts, one in this number."""
PREDICTORS = ("model", "dmmse", "ridge")
CLOSENESS_COLUMNS = {
    "carried_by_few": "True if the worst 1% of the prompts make up more than half of the model's overall.risk.",
    "tasks": "Tasks of the prompts: those of the pool, or new ones.",
    "context_length": "Number of pairs before the query.",
    "distance_dmmse": "Mean of |f - dMMSE|^2 / d_x.",
    "distance_ridge": "Mean of |f - ridge|^2 / d_x.",
    "relative": "distance_dmmse / (distance_dmmse + distance_ridge): 0 at dMMSE, 1 at ridge.",
    "weight_dmmse": "Weight a of the nearest mixture a dMMSE + (1 - a) ridge, by least squares.",
    "unexplained": "Mean squared distance to that mixture, divided by the mean squared distance between dMMSE and ridge.",
    "risk": "Excess risk of the model; the loss adds the variance of the noise.",
    "risk_dmmse": "Excess risk of dMMSE.",
    "risk_ridge": "Excess risk of ridge.",
    "prompts": "Prompts of the means: trimmed (without the worst 0.1%) or all.",
    **{
        f"median_risk_{name}": f"Median over prompts of the squared error of {name}."
        for name in PREDICTORS
    },
}
"""Meanings of the columns of distances to dMMSE and ridge."""


@dataclass(frozen=True, eq=False)
class PoolTask:
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
        one_pass = source is not None and not is_learner(source)
        own = predictor_of(source).predict_at_every(full) if one_pass else None
        cut = full.shortened if own is None else full.prefix
        prompts = [cut(length) for length in lengths]
        memory = partial(dmmse, pool=self.pool, noise_var=self.task.noise_variance)
        return Sample(
            prompts,
            [memory(each) for each in progress(prompts, f"dMMSE on {kind} tasks")],
            [ridge(each, penalty=self.task.posterior_penalty) for each in prompts],
            None if own is None else [own[:, length] for length in lengths],
        )


@dataclass(frozen=True, eq=False)
class Sample:
    """Prompts at several context lengths, with the predictions of dMMSE and ridge."""

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


def closeness(
    squares: Float[np.ndarray, "prompt kind *axes square"], few: int = 0, **axis: Sequence[int]
) -> pd.DataFrame:
    """Means over prompts of the `squares` of a sample, and ratios of these means, one row per kind and value of an axis.

    Args:
        few: Number of rows at the end that replace dropped prompts; they enter standard errors
            only.
    """
    to_dmmse, to_ridge, inner, gap, norm, *errors = np.moveaxis(squares, -1, 0)
    # The weight minimises a mean square, so its error changes that mean in second order only.
    # The standard error needs no term for it.
    weight, weight_sem = trimmed_ratio(inner, gap, few)
    one = np.ones_like(gap)
    means = (to_dmmse, to_ridge, *errors)
    names = ("distance_dmmse", "distance_ridge", "risk", "risk_dmmse", "risk_ridge")
    numbers = estimates(
        **{n: trimmed_ratio(each, one, few) for n, each in zip(names, means, strict=True)},
        relative=trimmed_ratio(to_dmmse, to_dmmse + to_ridge, few),
        weight_dmmse=(weight, weight_sem),
        unexplained=trimmed_ratio(norm - 2 * weight * inner + weight**2 * gap, gap, few),
    )
    columns = with_sem(*(name for name in CLOSENESS_COLUMNS if name in numbers))
    return frame_of(SimpleNamespace(**numbers), *columns, tasks=TASK_KINDS[: gap.shape[1]], **axis)


def trimmed_closeness(
    squares: Float[np.ndarray, "prompt kind square"], one_in: int
) -> pd.DataFrame:
    """`closeness` without the worst prompts of each kind: 1 in `one_in`, by the model's error."""
    few = len(squares) // one_in
    kinds = [trimmed(kind, kind[:, ERROR_COLUMN], one_in) for kind in np.moveaxis(squares, 1, 0)]
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


def trimmed_ratio(
    numerator: Float[np.ndarray, " prompt *axes"],
    denominator: Float[np.ndarray, " prompt *axes"],
    few: int,
) -> tuple[Float[np.ndarray, "*axes"], Float[np.ndarray, "*axes"]]:
    """Ratios of means over the prompts without the last `few`, and their standard errors with these.

    With a denominator of ones they are means. NaN if the mean of the denominator is 0.
    """
    kept = len(numerator) - few
    size = denominator[:kept].mean(0)
    size = np.where(size, size, np.nan)
    ratio = numerator[:kept].mean(0) / size
    residual = (numerator - ratio * denominator) / size
    _, sem = mean_and_sem(residual[:kept])
    cut = np.square(residual[kept:]).sum(0) / len(numerator) ** 2
    return ratio, np.sqrt(np.square(sem) + cut)


def setting_of(source: Source, task: TaskLike | None, pool: Pool | None, analysis: str) -> PoolTask:
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
        return PoolTask(task, task.pool(), own=True)
    if task.drift != 1:
        raise ValueError(
            f"{analysis} needs a task that does not drift, got task.drift {task.drift}."
        )
    if len(task.noise_levels) > 1:
        raise ValueError(f"{analysis} needs one noise level, got task.noise_var {task.noise_var}.")
    require_pool(pool, task.d_x, task.d_y)
    return PoolTask(task, pool.to("cpu", torch.float64), own=False)


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
    return spread_lengths(shortest, longest)


def spread_lengths(shortest: int, longest: int) -> list[int]:
    """At most MOST_LENGTHS context lengths, evenly spaced.

    Example:
        >>> spread_lengths(1, 31)
        [1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31]
    """
    count = min(longest - shortest + 1, MOST_LENGTHS)
    return [int(length) for length in np.linspace(shortest, longest, count).round()]
