"""Distances of a model to the posterior mean of its pool and to ridge, at the saved steps of its
training."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Int

from mechinterp.analysis.learners.closeness import (
    ERROR,
    KINDS,
    Closeness,
    lengths_of,
    setting_of,
    trimmed_closeness,
)
from mechinterp.analysis.learners.priors import CLEAR, FEW
from mechinterp.analysis.stats import carried_by_few
from mechinterp.analysis.training.kept_steps import snapshots_of
from mechinterp.config import TaskLike
from mechinterp.display import Result
from mechinterp.icl.pools import Pool
from mechinterp.models.run.predictor import Source, learner_of
from mechinterp.progress import ProgressCallback, no_progress

EARLIEST = 1000
"""First step at which being closer to ridge counts."""


@dataclass(frozen=True, eq=False, repr=False)
class PriorSnapshots(Result):
    """Distances of a model to dMMSE and to ridge at each saved step, over all context lengths."""

    n_tasks: int
    """Size of the pool."""
    step: Int[np.ndarray, " snapshot"]
    closeness: Closeness
    """Closeness [kind, snapshot], for the kinds pool and new, without the 0.1% of the prompts with
    the largest error of the snapshot (none of fewer than 1,000 prompts)."""
    carried_by_few: Bool[np.ndarray, "kind snapshot"]
    """True: the worst 1% of the prompts make up more than half of the mean risk."""

    @property
    def transient(self) -> int | None:
        """First step clearly closer to ridge on new tasks, if the model ends clearly closer to
        dMMSE there; else None.

        "Clearly" means two standard errors from 0.5. Steps before `EARLIEST` do not count: a model
        that predicts almost 0 is closer to ridge, which shrinks too."""
        relative, sem = self.closeness.relative[1], self.closeness.relative_sem[1]
        above = (relative - CLEAR * sem > 0.5) & (self.step >= EARLIEST)
        if not above.any() or not relative[-1] + CLEAR * sem[-1] < 0.5:
            return None
        return int(self.step[above.argmax()])

    def __repr__(self) -> str:
        ends = [
            f"{kind} {rows[0]:.3g} to {rows[-1]:.3g}"
            for kind, rows in zip(KINDS, self.closeness.relative, strict=True)
        ]
        first = self.transient
        note = "" if first is None else f", closer to ridge first, from step {first:,}"
        return f"PriorSnapshots({len(self.step)}, pool of {self.n_tasks}: relative distance {', '.join(ends)}{note})"

    def to_frame(self) -> pd.DataFrame:
        """One row per kind of tasks and snapshot."""
        frame = self.closeness.frame(step=self.step)
        return frame.assign(carried_by_few=self.carried_by_few.ravel())

    def plot(self) -> go.Figure:
        """Relative distance over the steps, on tasks of the pool and on new tasks."""
        title = "Nearer to the pool's posterior (0) or to ridge (1) during training"
        return self.closeness.plot(self.step, title, "step")

    def plot_risks(self) -> go.Figure:
        """Excess risks of the model, dMMSE and ridge over the steps, on both kinds of tasks."""
        title = "Excess risk during training, on tasks of the pool and on new ones"
        return self.closeness.plot_risks(self.step, title, "step")


def prior_snapshots(
    checkpoint: Source,
    task: TaskLike | None = None,
    pool: Pool | None = None,
    *,
    context_lengths: Sequence[int] | None = None,
    n_prompts: int = 2048,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> PriorSnapshots:
    """`compare_priors` at each saved step, on the same prompts.

    Args:
        task: Law of the prompts; None means the model's own.
        pool: Task vectors; None means those of the task.
        context_lengths: Lengths to average over. None means up to 16 lengths, from 1 or the
            shortest length in a checkpoint's training to the task's own.
        n_prompts: Number of prompts of each kind.
        progress: Optional progress callback.
    Raises:
        ValueError: If the checkpoint has no snapshots, and as in `compare_priors`.
    Source:
        As for `compare_priors`.
    See also:
        `compare_priors`.
    """
    trained = snapshots_of(checkpoint, "prior_snapshots")
    setting = setting_of(trained, task, pool, "prior_snapshots")
    lengths = lengths_of(trained, setting.task, context_lengths)
    samples = [setting.sample(kind, n_prompts, lengths, seed, no_progress) for kind in KINDS]
    kept = progress(list(trained.snapshots.values()), "comparing snapshots with dMMSE and ridge")
    squares = [
        np.stack(
            [
                each.squares([model(prompts) for prompts in each.prompts]).mean(1)
                for each in samples
            ],
            axis=1,
        )
        for model in map(learner_of, kept)
    ]  # [prompt, kind, square] of each step
    found = [trimmed_closeness(each, FEW) for each in squares]
    by_step = {
        field.name: np.stack([getattr(each, field.name) for each in found], 1)
        for field in fields(Closeness)
    }
    return PriorSnapshots(
        n_tasks=len(setting.pool),
        step=np.array(list(trained.snapshots)),
        closeness=Closeness(**by_step),
        carried_by_few=np.stack([carried_by_few(each[..., ERROR]) for each in squares], 1),
    )
