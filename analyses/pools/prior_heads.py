"""Heads that memorise and heads that generalise: effects of masking on the distances to dMMSE and
to ridge."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy.special import ndtri

from mechinterp.analysis.learners.pool_tasks import (
    DROPPED_ONE_IN,
    ERROR_COLUMN,
    TASK_KINDS,
    lengths_of,
    setting_of,
    trimmed,
    trimmed_ratio,
)
from mechinterp.analysis.stats import carried_by_few, estimates
from mechinterp.config import TaskLike
from mechinterp.display import Result, frame_of, head_axes, with_sem
from mechinterp.icl.predictors import Pool
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import progress

LEVEL = 0.05
"""Chance that at least one head of a model without any effect is named. A larger level names more
heads."""


@dataclass(frozen=True, eq=False, repr=False)
class PriorHeads(Result):
    """Effects of masking each head on memory (tasks of the pool) and on generalisation (new tasks).

    For each head, the 0.1% of the prompts with the largest error of the full or masked model are
    left out (none of fewer than 1,000 prompts).
    """

    n_tasks: int
    """Size of the pool."""
    weight_change: Float[np.ndarray, "layer head"]
    """Change of the weight on dMMSE on tasks of the pool, masked minus full."""
    weight_change_sem: Float[np.ndarray, "layer head"]
    """Standard error of `weight_change`, paired: the same prompts for every mask."""
    dmmse_rise: Float[np.ndarray, "layer head"]
    """Rise of the distance to dMMSE on tasks of the pool, |f - dMMSE|^2 / d_x; unit y^2."""
    dmmse_rise_sem: Float[np.ndarray, "layer head"]
    ridge_rise: Float[np.ndarray, "layer head"]
    """Rise of the distance to ridge on new tasks, |f - ridge|^2 / d_x; unit y^2."""
    ridge_rise_sem: Float[np.ndarray, "layer head"]
    memory_excess: Float[np.ndarray, "layer head"]
    """Rise of the distance to dMMSE minus rise of the distance to ridge, on tasks of the pool; unit
    y^2."""
    memory_excess_sem: Float[np.ndarray, "layer head"]
    carried_by_few: Bool[np.ndarray, "layer head"]
    """True: 1% of the prompts make up more than half of the mean absolute rise of a distance."""

    @property
    def memorises(self) -> list[tuple[int, int]]:
        """Heads whose masking lowers the weight on dMMSE, and raises the distance to dMMSE more
        than that to ridge.

        Both effects exceed so many standard errors that at most 1 in 20 models without such heads
        has one named."""
        falls = self.weight_change + self._bound * self.weight_change_sem < 0
        further = self.memory_excess - self._bound * self.memory_excess_sem > 0
        return [(layer, head) for layer, head in np.argwhere(falls & further).tolist()]

    @property
    def generalises(self) -> list[tuple[int, int]]:
        """Heads whose masking raises the distance to ridge on new tasks, by the same number of
        standard errors."""
        rises = self.ridge_rise - self._bound * self.ridge_rise_sem > 0
        return [(layer, head) for layer, head in np.argwhere(rises).tolist()]

    @property
    def _bound(self) -> float:
        """Number of standard errors that any of the heads exceeds by chance in a fraction `LEVEL`
        of models."""
        return float(ndtri(1 - LEVEL / 2 / self.weight_change.size))

    def __repr__(self) -> str:
        at = np.unravel_index(int(self.weight_change.argmin()), self.weight_change.shape)
        change, sem = self.weight_change[at], self.weight_change_sem[at]
        memorise, generalise = (
            ", ".join(f"L{layer}H{head}" for layer, head in heads) or "none"
            for heads in (self.memorises, self.generalises)
        )
        return (
            f"PriorHeads(pool of {self.n_tasks}: without L{at[0]}H{at[1]} the weight on dMMSE changes by "
            f"{change:.3g} ± {sem:.1g}; memorise: {memorise}; needed for ridge on new tasks: {generalise})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        names = with_sem("weight_change", "dmmse_rise", "ridge_rise", "memory_excess")
        return frame_of(self, *names, "carried_by_few", **head_axes(self.dmmse_rise))


def prior_heads(
    source: Source,
    task: TaskLike | None = None,
    pool: Pool | None = None,
    *,
    context_lengths: Sequence[int] | None = None,
    n_prompts: int = 1024,
    seed: int = 0,
    method: str = "mean",
) -> PriorHeads:
    """Effects of masking each head on memory (tasks of the pool) and on generalisation (new tasks).

    Args:
        task: Law of the prompts; None means the model's own.
        pool: Task vectors; None means those of the task.
        context_lengths: Lengths to average over. None means up to 16 lengths, from 1 or the
            shortest length in a checkpoint's training to the task's own.
        n_prompts: Number of prompts of each kind.
        method: How a head is masked, "zero", "mean" or "resample".
    Raises:
        ValueError: If the source is no model, and as in `compare_priors`.
    Source:
        Derived here: the regression and the distances of `compare_priors`, under masks.
    """
    predictor = predictor_of(source)
    setting = setting_of(source, task, pool, "prior_heads")
    lengths = lengths_of(source, setting.task, context_lengths)
    masks = [[], *([head] for head in predictor.heads)]
    squares = {}
    for kind in TASK_KINDS:
        sample = setting.sample(kind, n_prompts, lengths, seed)
        runs = [
            predictor.run(prompts, masks, method=method)
            for prompts in progress(sample.prompts, f"masking heads on {kind} tasks")
        ]
        by_mask = [sample.squares([run[mask] for run in runs]) for mask in range(len(masks))]
        squares[kind] = np.stack(by_mask, 1).mean(2)  # [prompt, mask, square]
    pooled, new = (_rises(squares[kind]) for kind in TASK_KINDS)
    few = n_prompts // DROPPED_ONE_IN
    one = np.ones_like(new[..., 0, 0])
    measures = estimates(
        weight_change=trimmed_ratio(pooled[..., 0, 2], pooled[..., 1, 3], few),
        dmmse_rise=trimmed_ratio(pooled[..., 0, 0], one, few),
        ridge_rise=trimmed_ratio(new[..., 0, 1], one, few),
        memory_excess=trimmed_ratio(pooled[..., 0, 0] - pooled[..., 0, 1], one, few),
    )
    distances = np.concatenate([each[:, 1:, :2] - each[:, :1, :2] for each in squares.values()], 2)
    measures["carried_by_few"] = carried_by_few(distances).any(1)
    shape = (predictor.n_layers, predictor.n_heads)
    return PriorHeads(
        n_tasks=len(setting.pool),
        **{name: values.reshape(shape) for name, values in measures.items()},
    )


def _rises(
    squares: Float[np.ndarray, "prompt mask square"],
) -> Float[np.ndarray, "prompt head 2 square"]:
    """Rise of the squares by each mask, and the squares of the full model, with rows as in `trimmed`."""
    full = squares[:, 0]
    return np.stack(
        [
            trimmed(
                np.stack([each - full, full], 1),
                np.maximum(each, full)[:, ERROR_COLUMN],
                DROPPED_ONE_IN,
            )
            for each in squares.swapaxes(0, 1)[1:]
        ],
        axis=1,
    )
