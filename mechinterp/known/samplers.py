"""A judge for estimators of the local learning coefficient: bias and coverage where the value is known."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.display import Result
from mechinterp.known.entries import Entry, Suite, suite
from mechinterp.progress import ProgressCallback, no_progress

Sampler = Callable[[Entry, int], tuple[float, float]]


@dataclass(frozen=True, eq=False, repr=False)
class Judgement(Result):
    """Estimates of a sampler beside the exact learning coefficients."""

    sampler: str
    rows: pd.DataFrame
    """One row per entry and seed: entry, seed, estimate, sem, exact."""

    def __repr__(self) -> str:
        total = self.summary().iloc[-1]
        return (
            f"Judgement({self.sampler}: bias {total.bias:+.2%} ± {total.bias_sem:.1g}, within 1 standard error "
            f"{total.within_1:.0%}, within 2 {total.within_2:.0%}, {total.estimates:.0f} estimates)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per entry and seed."""
        return self.rows

    def summary(self) -> pd.DataFrame:
        """One row per entry and one for all: mean relative error with its standard error, and the fraction of estimates
        within 1 and 2 of their own standard errors (a right one: 68% and 95%)."""
        rows = self.rows
        error = rows["estimate"] - rows["exact"]
        scored = pd.DataFrame(
            {
                "entry": rows["entry"],
                "exact": rows["exact"],
                "bias": error / rows["exact"],
                "within_1": (error.abs() <= rows["sem"]).astype(float),
                "within_2": (error.abs() <= 2 * rows["sem"]).astype(float),
            }
        )
        every = scored.assign(entry="all", exact=np.nan)
        grouped = pd.concat([scored, every]).groupby("entry", sort=False)
        frame = grouped[["exact", "bias", "within_1", "within_2"]].mean()
        frame.insert(2, "bias_sem", grouped["bias"].sem())
        frame["estimates"] = grouped["bias"].count()
        return frame.reset_index()

    def plot(self) -> go.Figure:
        """Relative error of the estimates of each entry."""
        frame = self.summary()
        return figures.bars(
            frame["entry"].tolist(),
            {self.sampler: (frame["bias"].to_numpy(), frame["bias_sem"].fillna(0).to_numpy())},
            title="Error of the learning coefficient",
            y_title="(estimate − exact) / exact",
        )


def judge_sampler(
    sampler: Sampler,
    entries: Suite | None = None,
    *,
    seeds: Sequence[int] = range(4),
    progress: ProgressCallback = no_progress,
) -> Judgement:
    """Bias and coverage of an estimator of the learning coefficient, on entries whose coefficient is known.

    Args:
        sampler: Function of an entry and a seed that gives the estimate and its standard error. `entry.module` has the
            parameters that count, `entry.loss(module, batch)` the loss, and `entry.loss(module)` the exact one.
        entries: The suite; None: version 1 with the trained models of the package.
        seeds: Seeds; each entry is estimated with each.
    Raises:
        ValueError: If an estimate is no number or an error is negative. NaN is an estimate that was refused, and is
            never within its error.
    Example:
        >>> from mechinterp.known import suite
        >>> def half_the_parameters(entry, seed):
        ...     return sum(p.numel() for p in entry.module.parameters()) / 2, 0.0
        >>> found = judge_sampler(half_the_parameters, suite(trained="none"), seeds=[0])
        >>> found.to_frame()["exact"].tolist()
        [3.5, 6.0, 7.5, 8.0]
    """
    known = suite() if entries is None else entries
    having = [e for e in known.values() if e.truth.learning_coefficient is not None]
    rows = []
    for entry, seed in progress([(e, s) for e in having for s in seeds], "judging"):
        estimate, sem = map(float, sampler(entry.without_truth, seed))
        if sem < 0:
            raise ValueError(f"the standard error for {entry.name} must be >= 0, got {sem}.")
        exact = entry.truth.learning_coefficient.value
        rows.append((entry.name, seed, estimate, sem, exact))
    name = getattr(sampler, "__name__", type(sampler).__name__)
    return Judgement(
        name, pd.DataFrame(rows, columns=["entry", "seed", "estimate", "sem", "exact"])
    )
