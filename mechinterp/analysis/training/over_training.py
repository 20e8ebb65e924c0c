"""Losses during training, with the scales or norms of the heads, from a checkpoint's history."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.run_over_training import RunOverTraining
from mechinterp.display import Result, frame_of, head_axes
from mechinterp.models.run.predictor import Source

SCALARS = ("omega", "mu", "qk_diagonal", "ov_last_entry")
NORMS = {"qk_norm": "QK", "ov_norm": "OV"}


@dataclass(frozen=True)
class Training:
    """How a model was trained, as text."""

    eval_on: str = "fixed prompts"
    """Data of eval_loss."""
    how: str = ""
    """Sentence with optimiser, step size and logging interval; empty if unknown."""


NOT_KNOWN = Training()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LoggedSteps(Result):
    """Losses of one model at its logged steps."""

    step: Int[np.ndarray, " row"]
    """Number of updates."""
    loss: Float[np.ndarray, " row"]
    """Mean training loss since the last row, NaN at step 0; unit y^2."""
    eval_loss: Float[np.ndarray, " row"]
    """Loss on fixed prompts that training never uses, or on the population for models trained on
    it; unit y^2."""
    training: Training = NOT_KNOWN
    """How the model was trained."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.step[-1]} steps, final eval_loss {self.eval_loss[-1]:.4f})"

    def _over_steps(
        self, curves: Mapping[str, np.ndarray], title: str, y_title: str, **how: Any
    ) -> go.Figure:
        """Curves over the logged steps, without step 0, which a logarithmic axis cannot show."""
        later = self.step > 0
        shown = {name: values[later] for name, values in curves.items()}
        return figures.lines(
            self.step[later], shown, title=title, x_title="step", y_title=y_title, log_x=True, **how
        )

    def _sentences(self, *between: str) -> list[str]:
        """Number of steps, final loss, and training settings if known."""
        loss = f"final loss on {self.training.eval_on} {digits(self.eval_loss[-1])} y²"
        return list(filter(None, (f"{self.step[-1]} steps; {loss}.", *between, self.training.how)))


def logged_steps(history: pd.DataFrame, source: Source | pd.DataFrame) -> dict[str, Any]:
    """Fields of `LoggedSteps`, from a history and the checkpoint that it belongs to."""
    per_step = history.drop_duplicates("step")
    losses = {name: per_step[name].to_numpy() for name in ("step", "loss", "eval_loss")}
    return {**losses, "training": training_of(source)}


def training_of(source: Source | pd.DataFrame) -> Training:
    """Training of a checkpoint of this package; unknown for other files and for a history alone.

    Example:
        >>> from mechinterp import load
        >>> training_of(load("checkpoints/linear-merged-s0")).how[:81]
        'Exact gradient flow on the population, equivalent to descent with step size 0.031'
    """
    train = getattr(source, "training", None)
    if train is None:
        return NOT_KNOWN
    rows = f"a row every {train.log_every} steps"
    if train.optimizer == "adam":
        return Training(
            "fixed prompts",
            f"Adam, step size {train.learning_rate:g}, {train.batch_size} fresh prompts a step; {rows}.",
        )
    how = {
        "gradient_flow": "Exact gradient flow on the population, equivalent to descent with",
        "gradient_descent": "Full-batch gradient descent with",
    }[train.optimizer]
    return Training(
        "the population",
        f"{how} step size {train.learning_rate:g}; {rows}. loss is that of the training data at the step itself, "
        "eval_loss that of the population; both are exact.",
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TrainingDynamics(LoggedSteps):
    """Logged steps of one model."""

    omega: Float[np.ndarray, "row head"]
    """Mean of each head's omega, unit 1/x^2."""
    mu: Float[np.ndarray, "row head"]
    """Diagonal of OV on y (contribution of a head per unit of y), mean over responses."""
    qk_diagonal: Float[np.ndarray, "row head"]
    """Norm of the diagonal of QK's x block over that of the block; 1 if the block is diagonal."""
    ov_last_entry: Float[np.ndarray, "row head"]
    """Norm of mu over that of OV; 1 if only y is read."""

    @property
    def share(self) -> Float[np.ndarray, "row head"]:
        """|mu omega| of a head divided by the sum over heads (its part of a gradient step); 0 if
        all are 0."""
        step = np.abs(self.mu * self.omega)
        total = step.sum(1, keepdims=True)
        return np.divide(step, total, out=np.zeros_like(step), where=total > 0)

    @property
    def group_mu(self) -> Float[np.ndarray, "row sign"]:
        """Sum of the positive mu, and sum of the negative mu."""
        return np.stack([self.mu.clip(min=0).sum(1), self.mu.clip(max=0).sum(1)], 1)

    def sentences(self) -> list[str]:
        """Number of steps, final loss, and training settings."""
        return self._sentences()

    def tables(self) -> dict[str, Table]:
        """Table of all logged steps."""
        return {"history": Table(self.to_frame(), "Logged steps")}

    def figures(self) -> dict[str, go.Figure]:
        """Loss, then scales of the heads."""
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
        """Sums of the positive mu, of the negative mu and of all mu over training."""
        positive, negative = self.group_mu.T
        sums = {"positive heads": positive, "negative heads": negative, "all": positive + negative}
        return self._over_steps(sums, "Sums of mu during training", "sum of mu", zero_line=True)

    def plot_loss(self) -> go.Figure:
        """Training and evaluation loss over training. A training loss over less than half as many
        updates as the one before is left out, such as the last one."""
        updates = np.diff(self.step)
        few = np.r_[False, False, updates[1:] < updates[:-1] / 2][: len(self.step)]
        curves = {"eval_loss": self.eval_loss, "loss": np.where(few, np.nan, self.loss)}
        return self._over_steps(curves, "Loss during training", "loss (y²)", log_y=True)

    def _plot_heads(self, name: str, title: str, y_title: str) -> go.Figure:
        heads = {f"head {head}": values for head, values in enumerate(getattr(self, name).T)}
        colors = [figures.head_color(head) for head in range(len(heads))]
        return self._over_steps(heads, title, y_title, colors=colors, zero_line=True)


def training_dynamics(source: Source | pd.DataFrame) -> TrainingDynamics:
    """Scales of the heads from the history of a checkpoint with one layer of attention.

    Args:
        source: A checkpoint, or its history.

    Raises:
        ValueError: If the history lacks a column.
    Source:
        After He et al. 2025, arXiv 2503.12734, section 3.
    See also:
        `over_steps`, `jump_forecast`.
    Example:
        >>> from mechinterp import load
        >>> training_dynamics(load("checkpoints/softmax-h1-s0")).omega.shape[1]
        1
    """
    history = _history_of(source, "training_dynamics")
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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NormsOverTraining(LoggedSteps):
    """Losses and norms of the heads of a model at its logged steps."""

    qk_norm: Float[np.ndarray, "row layer head"]
    """Frobenius norm of the head's QK, scale included."""
    ov_norm: Float[np.ndarray, "row layer head"]
    """Frobenius norm of the head's OV."""

    COLUMNS: ClassVar = {
        f"{name}_{what}": f"{name} at the {text}."
        for name in NORMS
        for what, text in (
            ("first", "first logged step"),
            ("factor", "last logged step divided by that at the first"),
        )
    }

    def sentences(self) -> list[str]:
        """Final loss, the layer whose norms changed most, and training settings."""
        sentences = []
        for name, what in NORMS.items():
            factors = np.median(getattr(self, name)[-1] / getattr(self, name)[0], axis=1)
            listed = ", ".join(f"{factor:.3g}" for factor in factors)
            sentences.append(
                f"Norm of {what} of the median head at the end, relative to its first value, layer by layer: {listed}. It "
                f"changed most in layer {int(np.abs(np.log(factors)).argmax())}."
            )
        return self._sentences(*sentences)

    def to_frame(self) -> pd.DataFrame:
        """One row per logged step, layer and head."""
        heads = head_axes(self.qk_norm[0])
        return frame_of(self, "loss", "eval_loss", *NORMS, step=self.step, **heads)

    def norm_frame(self) -> pd.DataFrame:
        """One row per head: norms at the first and the last logged step, and their ratio."""
        frame = frame_of(self, **head_axes(self.qk_norm[0]))
        for name in NORMS:
            first, last = getattr(self, name)[[0, -1]].reshape(2, -1)
            frame = frame.assign(
                **{f"{name}_first": first, name: last, f"{name}_factor": last / first}
            )
        return frame

    def tables(self) -> dict[str, Table]:
        """Norms before and after training, and all logged steps."""
        return {
            "norms": Table(self.norm_frame(), "Norms of the heads, first and last"),
            "history": Table(self.to_frame(), "Logged steps", brief=False),
        }

    def figures(self) -> dict[str, go.Figure]:
        """Losses, then norms layer by layer."""
        return {
            "eval_loss": self.plot(),
            "loss": self._losses("loss", "Training loss, mean since the previous row"),
            **{name: self.plot_norm(name) for name in NORMS},
        }

    def plot(self) -> go.Figure:
        """Loss on prompts that training never uses."""
        return self._losses(
            "eval_loss", "Loss during training, on prompts that training never uses"
        )

    def plot_norm(self, name: str) -> go.Figure:
        """Root mean square of `qk_norm` or `ov_norm` over the heads of a layer, one curve per
        layer."""
        curves = np.sqrt(np.square(getattr(self, name)).mean(2)).T
        layers = {f"layer {layer}": curve for layer, curve in enumerate(curves)}
        norm = f"orm of {NORMS[name]}"
        return self._over_steps(layers, f"N{norm} during training, layer by layer", f"n{norm}")

    def _losses(self, name: str, title: str) -> go.Figure:
        # Separate figures: spikes of the training loss would hide the other loss.
        return self._over_steps({name: getattr(self, name)}, title, "loss (y²)", log_y=True)


def history_of(
    source: Source | pd.DataFrame,
) -> TrainingDynamics | NormsOverTraining | RunOverTraining:
    """Losses during training, with the scales of the heads of one attention layer, or the norms of
    other heads.

    A logged row has the mean training loss since the previous row, and eval_loss on prompts that
    training never uses, or on the population for models trained on it. Norms are Frobenius norms,
    that of QK with the scale; a curve is their root mean square over the heads of a layer.

    Args:
        source: A checkpoint, or its history.
    Raises:
        ValueError: If there is no history.
    See also:
        `training_dynamics`, `over_steps`.
    Example:
        >>> from mechinterp import load
        >>> history_of(load("checkpoints/sparse-h4-noise0.1-s0")).qk_norm.shape[1:]
        (4, 4)
    """
    history = _history_of(source, "training")
    if "eval_loss_sem" in history:
        return RunOverTraining(history)
    if "omega" in history:
        return training_dynamics(source)
    per_step = history.drop_duplicates("step")
    shape = (len(per_step), int(history["layer"].max()) + 1, int(history["head"].max()) + 1)
    ordered = history.sort_values(["step", "layer", "head"], kind="stable")
    return NormsOverTraining(
        **logged_steps(history, source),
        **{name: ordered[name].to_numpy().reshape(shape) for name in NORMS},
    )


def _history_of(source: Source | pd.DataFrame, analysis: str) -> pd.DataFrame:
    """The history of a checkpoint, or a history itself.

    Raises:
        ValueError: If there is none.
    """
    history = source if isinstance(source, pd.DataFrame) else getattr(source, "history", None)
    if history is None:
        raise ValueError(f"{analysis} needs a checkpoint with a history, got {_without(source)}.")
    return history


def _without(source: Source) -> str:
    path = getattr(source, "path", None)
    return type(source).__name__ if path is None else f"{path} without"
