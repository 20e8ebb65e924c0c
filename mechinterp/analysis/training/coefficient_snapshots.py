"""The local learning coefficient over training, beside the levels that the loss rests on.

On a plateau of linear attention all heads together are at a saddle, but those that have learned something are at the
best matrix of their number: drawn alone, with the others fixed, they have that level's coefficient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from mechinterp import figures
from mechinterp.analysis.training.coefficient_result import LearningCoefficient
from mechinterp.analysis.training.histories import snapshots_of
from mechinterp.analysis.training.kept_steps import KeptSteps, kept_losses
from mechinterp.analysis.training.learning_coefficient import (
    is_trained_on_moments,
    local_learning_coefficient,
)
from mechinterp.analysis.training.local_losses import heads_of_linear
from mechinterp.analysis.training.sampler import Chains
from mechinterp.display import counted
from mechinterp.models.run.predictor import Source
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress
from mechinterp.theory.learning_coefficient import level_coefficients
from mechinterp.theory.linear import modes
from mechinterp.theory.linear_heads import MergedHeads, SeparateHeads
from mechinterp.training.linear.trainer import task_moments

LIVE = 0.01
"""Heads whose |v K^T Q| is above this part of the largest have learned something."""
MOST = 12
"""Snapshots that are drawn, spread over the kept ones, if none are named."""
NAMES = ("estimate", "sem", "exact", "is_minimum", "fall", "r_hat")
"""What the table has of all heads and of the live ones."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CoefficientSnapshots(KeptSteps):
    """The learning coefficient at steps of training, of all heads and of those that have learned something."""

    COLUMNS: ClassVar = {
        "level": "Loss with as many directions learned as n_learned says, unit y^2.",
        "level_coefficient": "Coefficient of the minimum over matrices of that rank.",
        **{
            f"live_{name}": f"The column {name} for the live heads alone; for all heads where all are live or none."
            for name in (*NAMES, "reason")
        },
    }
    whole: tuple[LearningCoefficient, ...]
    """Of all heads."""
    live: tuple[LearningCoefficient | None, ...]
    """Of the live heads alone, the others fixed; None where all are live or none."""
    n_live: Int[np.ndarray, " snapshot"]
    """Heads that have learned something."""
    n_learned: Int[np.ndarray, " snapshot"]
    """Directions that are more than half learned."""
    levels: Float[np.ndarray, " level"]
    """Loss with 0, 1, ... directions learned, unit y^2."""
    coefficients: Float[np.ndarray, " level"]
    """Coefficient of the minimum over matrices of rank 0, 1, ...: the staircase."""

    def __repr__(self) -> str:
        minima = int(sum(found.is_minimum for found in self.whole))
        return (
            f"CoefficientSnapshots({counted(len(self.step), 'step')}, {minima} of them at a minimum; "
            f"at the end {self.whole[-1]})"
        )

    @property
    def is_minimum(self) -> Bool[np.ndarray, " snapshot"]:
        """Where all heads together are at a minimum."""
        return np.array([found.is_minimum for found in self.whole])

    def to_frame(self) -> pd.DataFrame:
        """One row per snapshot; NaN where the weights are no minimum."""
        columns = {name: getattr(self, name) for name in ("step", "eval_loss", "n_learned")}
        columns["level"] = self.levels[self.n_learned]
        columns |= _columns("", self.whole)
        columns |= {"n_live": self.n_live, "level_coefficient": self.coefficients[self.n_learned]}
        alone = [
            live if live is not None else whole
            for live, whole in zip(self.live, self.whole, strict=True)
        ]
        columns |= _columns("live_", alone)
        columns["reason"] = [found.reason for found in self.whole]
        columns["live_reason"] = [found.reason for found in alone]
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """The estimates over training, with the staircase dotted."""
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
        """The loss over training with its levels dotted, and the steps that were drawn."""
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
    source: Source,
    *,
    steps: Sequence[int] | None = None,
    chains: Chains | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> CoefficientSnapshots:
    """The local learning coefficient of linear attention at kept steps of its training.

    Args:
        steps: Kept steps; None: 12 of them, spread evenly, the last among them.
        chains: Number and length of chains; None: 8 of 1,000 draws.
    Raises:
        ValueError: If the checkpoint has no snapshots or was not trained on moments, or a step is not kept.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> short = Chains(n_chains=4, n_draws=60, n_warmup=40, n_leapfrog=20)
        >>> found = coefficient_snapshots(load("checkpoints/linear-separate-s0"), steps=[0, 20000], chains=short)
        >>> found.is_minimum.tolist(), found.n_learned.tolist()
        ([False, True], [0, 4])
    """
    checkpoint = snapshots_of(source, "coefficient_snapshots")
    if not is_trained_on_moments(checkpoint):
        raise ValueError(
            "coefficient_snapshots needs linear attention that was trained on moments."
        )
    kept = list(checkpoint.snapshots)
    spread = np.linspace(0, len(kept) - 1, min(len(kept), MOST)).round().astype(int)
    chosen = list(steps or [kept[row] for row in spread])
    moments = task_moments(checkpoint.task)
    found, whole, alone, live, learned = modes(moments), [], [], [], []
    for step in progress(chosen, "drawing around snapshots"):
        whole.append(local_learning_coefficient(checkpoint, step=step, chains=chains, seed=seed))
        weights = checkpoint.snapshots[step]
        heads = live_heads(weights)
        part = 0 < len(heads) < weights.n_heads
        alone.append(
            local_learning_coefficient(
                checkpoint, step=step, sampled_heads=heads, chains=chains, seed=seed
            )
            if part
            else None
        )
        M = heads_of_linear(weights).M
        live.append(len(heads))
        learned.append(int((found.learned(M) > 0.5).sum()))
    return CoefficientSnapshots(
        **kept_losses(checkpoint, chosen),
        whole=tuple(whole),
        live=tuple(alone),
        n_live=np.array(live),
        n_learned=np.array(learned),
        levels=found.levels,
        coefficients=level_coefficients(moments),
    )


def live_heads(weights: Weights) -> list[int]:
    """Heads of linear attention whose |v K^T Q| is above `LIVE` of the largest.

    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> live_heads(load("checkpoints/linear-separate-s2").weights)
        [2, 3, 4]
    """
    heads = heads_of_linear(weights)
    if isinstance(heads, SeparateHeads):
        heads = MergedHeads(v=heads.v, U=np.einsum("hri,hrj->hij", heads.K, heads.Q))
    size = np.abs(heads.v) * np.linalg.norm(heads.U, axis=(1, 2))
    return np.flatnonzero(size > LIVE * size.max()).tolist()


def _columns(prefix: str, found: Sequence[LearningCoefficient]) -> dict[str, list[object]]:
    return {
        f"{prefix}{name}": [
            np.nan if getattr(one, name) is None else getattr(one, name) for one in found
        ]
        for name in NAMES
    }
