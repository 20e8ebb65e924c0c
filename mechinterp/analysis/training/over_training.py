"""Losses and head scales during training, from a checkpoint's history."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.histories import LoggedSteps, logged_steps, with_history
from mechinterp.display import frame_of
from mechinterp.models.run.predictor import Source

SCALARS = ("omega", "mu", "qk_diagonal", "ov_last_entry")


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TrainingDynamics(LoggedSteps):
    """Logged steps of one model."""

    omega: Float[np.ndarray, "row head"]
    """Mean of each head's omega, unit 1/x^2."""
    mu: Float[np.ndarray, "row head"]
    """What each head adds per unit of y, mean over responses."""
    qk_diagonal: Float[np.ndarray, "row head"]
    """Norm of the diagonal of QK's x block over that of the block; 1 if diagonal."""
    ov_last_entry: Float[np.ndarray, "row head"]
    """Norm of mu over that of OV; 1 if only y is read."""

    @property
    def share(self) -> Float[np.ndarray, "row head"]:
        """|mu omega| of a head over the sum of that over heads: what it adds to a gradient step; 0 if all are."""
        step = np.abs(self.mu * self.omega)
        total = step.sum(1, keepdims=True)
        return np.divide(step, total, out=np.zeros_like(step), where=total > 0)

    @property
    def group_mu(self) -> Float[np.ndarray, "row sign"]:
        """Sums of the positive and of the negative mu."""
        return np.stack([self.mu.clip(min=0).sum(1), self.mu.clip(max=0).sum(1)], 1)

    def sentences(self) -> list[str]:
        """How many steps, where the loss ends, and how the model was trained."""
        return [self.ended, *self.training.sentences]

    def tables(self) -> dict[str, Table]:
        """Every logged step."""
        return {"history": Table(self.to_frame(), "Logged steps")}

    def figures(self) -> dict[str, go.Figure]:
        """Loss, then the scales of the heads."""
        return {"loss": self.plot_loss(), "omega": self.plot(), "mu": self.plot_mu()}

    def to_frame(self) -> pd.DataFrame:
        """One row per logged step and head."""
        names = ("loss", "eval_loss", *SCALARS)
        return frame_of(self, *names, step=self.step, head=range(self.omega.shape[1]))

    def plot(self) -> go.Figure:
        """omega of every head over training."""
        return self._plot_heads("omega", "omega of each head during training", "omega (1/x²)")

    def plot_mu(self) -> go.Figure:
        """mu of every head over training."""
        return self._plot_heads("mu", "mu of each head during training", "mu")

    def plot_groups(self) -> go.Figure:
        """Sums of the positive and of the negative mu over training, and of all."""
        positive, negative = self.group_mu.T
        sums = {"positive heads": positive, "negative heads": negative, "all": positive + negative}
        return self._over_steps(sums, "Sums of mu during training", "sum of mu", zero_line=True)

    def plot_loss(self) -> go.Figure:
        """Training and evaluation loss over training; a mean of less than half as many updates as the one before
        it, as at the end of a training, is left out."""
        updates = np.diff(self.step)
        few = np.r_[False, False, updates[1:] < updates[:-1] / 2][: len(self.step)]
        curves = {"eval_loss": self.eval_loss, "loss": np.where(few, np.nan, self.loss)}
        return self._over_steps(curves, "Loss during training", "loss (y²)", log_y=True)

    def _plot_heads(self, name: str, title: str, y_title: str) -> go.Figure:
        heads = {f"head {head}": values for head, values in enumerate(getattr(self, name).T)}
        colors = [figures.head_color(head) for head in range(len(heads))]
        return self._over_steps(heads, title, y_title, colors=colors, zero_line=True)


def training_dynamics(source: Source | pd.DataFrame) -> TrainingDynamics:
    """The dynamics in the history of a checkpoint with one layer of attention.

    Args:
        source: A checkpoint, or its history.

    Raises:
        ValueError: If the history lacks a column.
    Example:
        >>> from mechinterp import load
        >>> training_dynamics(load("checkpoints/softmax-h1-s0")).omega.shape[1]
        1
    """
    given = isinstance(source, pd.DataFrame)
    history: pd.DataFrame = source if given else with_history(source, "training_dynamics")
    missing = {"step", "head", "loss", "eval_loss", *SCALARS} - set(history.columns)
    if missing:
        raise ValueError(
            f"training_dynamics needs a history with {', '.join(sorted(missing))}, got one without."
        )
    tables = {name: history.pivot(index="step", columns="head", values=name) for name in SCALARS}
    return TrainingDynamics(
        **logged_steps(history, source),
        **{name: table.to_numpy() for name, table in tables.items()},
    )
