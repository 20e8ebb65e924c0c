"""The local learning coefficient over training, next to the plateaus of the loss.

On a plateau of linear attention all heads together are at a saddle. The heads that have learned
something are at the best matrix of their rank: sampled alone, with the others fixed, they have the
coefficient of that plateau."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from analyses.lib.theory.linear import level_coefficients
from mechinterp import figures
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.learning_coefficient import (
    LearningCoefficient,
    local_learning_coefficient,
)
from mechinterp.analysis.training.local_losses import is_trained_on_moments
from mechinterp.analysis.training.sampler import Chains
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.display import Result, counted, frame_of
from mechinterp.models.weights import Weights
from mechinterp.progress import progress
from mechinterp.theory.linear import MergedHeads, modes
from mechinterp.training.linear_models import task_moments

LIVE = 0.01
"""A head is live if its |v K^T Q| exceeds this fraction of the largest. A larger limit counts fewer
heads."""
MOST = 12
"""Default number of snapshots, spread evenly over the saved ones."""
NAMES = ("estimate", "sem", "exact", "is_minimum", "fall", "r_hat")
"""Columns of the table, for all heads and for the live heads."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CoefficientSnapshots(Result):
    """The learning coefficient at steps of training, of all heads and of those that have learned something."""

    COLUMNS: ClassVar = {
        f"live_{name}": f"The column {name} for the live heads alone; for all heads if all are live or none is."
        for name in (*NAMES, "reason")
    }
    step: Int[np.ndarray, " snapshot"]
    """Number of updates."""
    curve: Float[np.ndarray, "row 2"]
    """Step and eval_loss of the whole history."""
    whole: tuple[LearningCoefficient, ...]
    """Coefficient for all heads."""
    live: tuple[LearningCoefficient | None, ...]
    """Coefficient for the live heads alone, with the others fixed; None if all are live or none is.
    """
    n_live: Int[np.ndarray, " snapshot"]
    """Number of heads that have learned something."""
    n_learned: Int[np.ndarray, " snapshot"]
    """Number of directions that are more than half learned."""
    levels: Float[np.ndarray, " level"]
    """Loss with 0, 1, ... directions learned, unit y^2."""
    coefficients: Float[np.ndarray, " level"]
    """Coefficient of the minimum over matrices of rank 0, 1, ...."""

    def __repr__(self) -> str:
        return (
            f"CoefficientSnapshots({counted(len(self.step), 'step')}, {self.is_minimum.sum()} at a minimum; "
            f"at the end {self.whole[-1]})"
        )

    @property
    def eval_loss(self) -> Float[np.ndarray, " snapshot"]:
        """Loss at the last logged step up to each, unit y^2."""
        rows = np.searchsorted(self.curve[:, 0], self.step, side="right")
        return self.curve[rows - 1, 1]

    @property
    def is_minimum(self) -> Bool[np.ndarray, " snapshot"]:
        """True if all heads together are at a minimum."""
        return np.array([one.is_minimum for one in self.whole])

    @property
    def level(self) -> Float[np.ndarray, " snapshot"]:
        """Loss with `n_learned` directions learned, unit y^2."""
        return self.levels[self.n_learned]

    @property
    def level_coefficient(self) -> Float[np.ndarray, " snapshot"]:
        """Coefficient of the minimum over matrices of rank `n_learned`."""
        return self.coefficients[self.n_learned]

    def to_frame(self) -> pd.DataFrame:
        """One row per snapshot; NaN if the weights are not at a minimum."""
        alone = [live or whole for live, whole in zip(self.live, self.whole, strict=True)]
        whole, live = (
            pd.concat([one.to_frame() for one in each], ignore_index=True)
            for each in (self.whole, alone)
        )
        names = ("eval_loss", "n_learned", "level", "n_live", "level_coefficient")
        frame = pd.concat(
            [frame_of(self, *names, step=self.step), whole, live.add_prefix("live_")], axis=1
        )
        order = ["step", "eval_loss", "n_learned", "level", *NAMES, "n_live", "level_coefficient"]
        return frame[[*order, *(f"live_{name}" for name in NAMES), "reason", "live_reason"]]

    def plot(self) -> go.Figure:
        """Estimates over training; the coefficients of the levels are dotted."""
        frame = self.to_frame()
        names = {"all heads": "", "live heads alone": "live_"}
        return figures.lines(
            self.step.astype(float),
            {
                name: (frame[f"{prefix}estimate"].to_numpy(), frame[f"{prefix}sem"].to_numpy())
                for name, prefix in names.items()
            },
            title="Learning coefficient at minima, and its levels (dotted)",
            x_title="step",
            y_title="learning coefficient",
            levels=self.coefficients,
        ).update_traces(mode="markers")

    def plot_loss(self) -> go.Figure:
        """Loss over training with its levels dotted, and the steps of the estimates."""
        figure = figures.lines(
            self.curve[:, 0],
            {"eval_loss": self.curve[:, 1]},
            title="Loss during training and its levels (dotted)",
            x_title="step",
            y_title="loss (y²)",
            levels=self.levels,
        )
        for name, chosen in (("minimum", self.is_minimum), ("no minimum", ~self.is_minimum)):
            figure.add_scatter(
                x=self.step[chosen], y=self.eval_loss[chosen], mode="markers", name=name
            )
        return figure


def coefficient_snapshots(
    checkpoint: Checkpoint,
    *,
    steps: Sequence[int] | None = None,
    chains: Chains | None = None,
    seed: int = 0,
) -> CoefficientSnapshots:
    """Local learning coefficient of linear attention at saved steps of its training.

    Args:
        steps: Saved steps; None means 12 of them, spread evenly, including the last.
        chains: Number and length of chains; None means 8 chains of 1,000 draws.
    Raises:
        ValueError: If the checkpoint was not trained on moments, or a step is not kept.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> short = Chains(n_chains=4, n_draws=60, n_warmup=40, n_leapfrog=20)
        >>> found = coefficient_snapshots(load("checkpoints/linear-separate-s0"), steps=[0, 20000], chains=short)
        >>> found.is_minimum.tolist(), found.n_learned.tolist()
        ([False, True], [0, 4])
    """
    if not is_trained_on_moments(checkpoint):
        raise ValueError("coefficient_snapshots needs linear attention trained on moments.")
    kept = list(checkpoint.snapshots)
    spread = np.linspace(0, len(kept) - 1, min(len(kept), MOST)).round().astype(int)
    chosen = list(steps or [kept[row] for row in spread])
    moments = task_moments(checkpoint.task)
    directions = modes(moments)
    drawn = partial(local_learning_coefficient, chains=chains, seed=seed)
    whole, alone, live, learned = [], [], [], []
    for step in progress(chosen, "drawing around snapshots"):
        at_step = checkpoint.at(step)
        whole.append(drawn(at_step))
        weights = checkpoint.snapshots[step]
        heads = live_heads(weights)
        part = 0 < len(heads) < weights.n_heads
        alone.append(drawn(at_step, sampled_heads=heads) if part else None)
        live.append(len(heads))
        learned.append(int((directions.learned(heads_of_linear(weights).M) > 0.5).sum()))
    return CoefficientSnapshots(
        step=np.array(chosen),
        curve=checkpoint.loss_curve,
        whole=tuple(whole),
        live=tuple(alone),
        n_live=np.array(live),
        n_learned=np.array(learned),
        levels=directions.levels,
        coefficients=level_coefficients(moments),
    )


def live_heads(weights: Weights) -> list[int]:
    """Heads of linear attention whose |v K^T Q| exceeds the fraction `LIVE` of the largest.

    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> live_heads(load("checkpoints/linear-separate-s2").weights)
        [2, 3, 4]
    """
    heads = heads_of_linear(weights)
    U = heads.U if isinstance(heads, MergedHeads) else heads.K.mT @ heads.Q
    size = np.abs(heads.v) * np.linalg.norm(U, axis=(1, 2))
    return np.flatnonzero(size > LIVE * size.max()).tolist()
