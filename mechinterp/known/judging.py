"""Bias, coverage and cost of estimators of the learning coefficient, on entries whose coefficient is known."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp import figures
from mechinterp.display import Result
from mechinterp.known.entries import Entry, Suite, suite
from mechinterp.progress import progress

Sampler = Callable[..., Any]
"""Function of an entry and a seed, or of a model with a keyword `seed`."""


@dataclass(frozen=True, eq=False, repr=False)
class Judgement(Result):
    """Estimates of a sampler beside the exact learning coefficients."""

    sampler: str
    rows: pd.DataFrame
    """One row per entry and seed: entry, seed, estimate, sem, exact, and gradients, NaN if the sampler does not say."""

    def __repr__(self) -> str:
        total = self.summary().iloc[-1]
        return (
            f"Judgement({self.sampler}: bias {total.bias:+.2%} ± {total.bias_sem:.1g}, within 1 standard error "
            f"{total.within_1:.0%}, within 2 {total.within_2:.0%}, {total.estimates:.0f} estimates)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per entry and seed."""
        return self.rows.copy()

    def summary(self) -> pd.DataFrame:
        """One row per entry and one for all: mean relative error with its standard error, the fraction of estimates
        within 1 and 2 of their own standard errors (a right one: 68% and 95%), and the mean number of gradients."""
        rows = self.rows
        error = rows["estimate"] - rows["exact"]
        within = {f"within_{n}": (error.abs() <= n * rows["sem"]).astype(float) for n in (1, 2)}
        scored = rows[["entry", "exact", "gradients"]].assign(bias=error / rows["exact"], **within)
        every = scored.assign(entry="all", exact=np.nan)
        grouped = pd.concat([scored, every]).groupby("entry", sort=False)
        frame = grouped[["exact", "bias", *within, "gradients"]].mean()
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
    sampler: Sampler, entries: Suite | None = None, *, seeds: Sequence[int] = range(4)
) -> Judgement:
    """Bias, coverage and cost of an estimator of the learning coefficient, on entries whose coefficient is known.

    Args:
        sampler: Function of an entry and a seed that gives the estimate and its standard error, and if known the number of
            gradients. `entry.module` has the parameters that count, `entry.loss(module, batch)` the loss, and
            `entry.loss(module)` the exact one. Or a function of a model with the keyword `seed`, such as
            `local_learning_coefficient`, whose result has `estimate` and `sem`; it gets `entry.checkpoint`.
        entries: The suite; None: the newest version with the trained models of the package.
        seeds: Seeds; each entry is estimated with each.
    Raises:
        ValueError: If there is no seed or no such entry, the answer is something else, an estimate is no number, or an error is negative. NaN is an estimate
            that was refused, and is never within its error.
    Example:
        >>> from mechinterp.known import suite
        >>> def half_the_parameters(entry, seed):
        ...     return sum(p.numel() for p in entry.module.parameters()) / 2, 0.0
        >>> found = judge_sampler(half_the_parameters, suite(1, trained="none"), seeds=[0])
        >>> found.to_frame()["exact"].tolist()
        [3.5, 6.0, 7.5, 8.0]
    """
    known = suite() if entries is None else entries
    exact = {e: law.value for e in known.values() if (law := e.truth.learning_coefficient)}
    if not exact or not len(seeds):
        what = "an entry whose learning coefficient is known" if not exact else "a seed"
        raise ValueError(f"judge_sampler needs at least one estimate, but there is not {what}.")
    own, rows = getattr(sampler, "__name__", type(sampler).__name__), []
    for entry, seed in progress([(e, s) for e in exact for s in seeds], "judging"):
        estimate, sem, gradients = _estimated(sampler, entry.without_truth, seed)
        if sem < 0:
            raise ValueError(f"the standard error for {entry.name} must be >= 0, got {sem}.")
        rows.append((entry.name, seed, estimate, sem, exact[entry], gradients))
    columns = ["entry", "seed", "estimate", "sem", "exact", "gradients"]
    return Judgement(own, pd.DataFrame(rows, columns=columns))


def _estimated(sampler: Sampler, entry: Entry, seed: int) -> tuple[float, float, float]:
    """Estimate, standard error and number of gradients; NaN for an unknown number."""
    taken = signature(sampler).parameters.get("seed")
    if taken is not None and taken.kind is Parameter.KEYWORD_ONLY:
        found = sampler(entry.checkpoint, seed=seed)
        answer: Any = tuple(getattr(found, name, None) for name in ("estimate", "sem"))
    else:
        answer = sampler(entry, seed)
    try:
        estimate, sem, *rest = map(float, answer)
        (gradients,) = rest or [math.nan]
    except (TypeError, ValueError):
        raise ValueError(
            f"a sampler must give (estimate, standard error) or these and the number of gradients, got {answer!r:.80}."
        ) from None
    return estimate, sem, gradients
