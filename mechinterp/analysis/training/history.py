"""Losses and heads during training: the history of a checkpoint, of a run of files, or of a module
that a monitor watched."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.circuits import Circuits
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import HEAD_COLUMNS, Table, known
from mechinterp.display import Result, counted
from mechinterp.models.run.predictor import Source

CURVES = {
    "share": "Share of the layer's output",
    "rise": "Rise of the excess risk without the head (y²)",
    "omega": "omega (1/x²)",
    "mu": "mu",
    "qk_norm": "Norm of QK",
    "ov_norm": "Norm of OV",
}
"""Columns of the heads that are drawn, with the titles of their axes."""
LOSS_COLUMNS = ("eval_loss", "loss")
MOST_HEAD_CURVES = 8
"""Largest number of heads with a curve each; of more heads a curve is the root mean square over a layer."""

HEAD_CURVES = ("qk_diagonal", "qk_norm", "ov_last_entry", "ov_norm")
"""Numbers of heads that are those of `circuits`."""


@dataclass(frozen=True, eq=False, repr=False)
class History(Result):
    """Losses and heads of one model at its logged steps."""

    history: pd.DataFrame
    """One row per step, layer and head."""
    eval_on: str = "fixed prompts"
    """Data of eval_loss."""
    how: str = ""
    """Sentence with optimiser, step size and logging interval; empty if unknown."""
    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "step": "Number of updates.",
        "eval_loss": "Loss on the same data at every step, which training never uses or of which it uses all.",
        **{name: known(Circuits)[name] for name in HEAD_CURVES},
        "omega": "Mean of omega over coordinates.",
        "mu": "Diagonal of OV on y, mean over responses.",
        "loss": "Mean training loss since the last row; NaN at step 0 and for weights from files.",
        "share": "Standard deviation of the head's output, divided by the sum of these over its layer's heads.",
        "rise": "Rise of the excess risk when the head is masked.",
    }
    UNITS: ClassVar = {"y²": ("eval_loss", "loss", "rise"), "1/x²": ("omega",)}

    def __repr__(self) -> str:
        return f"History({self.step[-1]} steps, final eval_loss {self.eval_loss[-1]:.4f})"

    @property
    def logarithmic(self) -> bool:
        """True if figures have a logarithmic axis without step 0; False for a few files or copies."""
        return "eval_loss_sem" not in self.history

    @property
    def per_step(self) -> pd.DataFrame:
        """The first row of each step."""
        return self.history.drop_duplicates("step")

    @property
    def step(self) -> Int[np.ndarray, " row"]:
        """Number of updates."""
        return self.per_step["step"].to_numpy()

    @property
    def eval_loss(self) -> Float[np.ndarray, " row"]:
        return self.per_step["eval_loss"].to_numpy()

    @property
    def omega(self) -> Float[np.ndarray, "row head"]:
        return self.heads("omega").to_numpy()

    @property
    def mu(self) -> Float[np.ndarray, "row head"]:
        return self.heads("mu").to_numpy()

    @property
    def group_mu(self) -> Float[np.ndarray, "row sign"]:
        """Sum of the positive mu, and sum of the negative mu."""
        return np.stack([self.mu.clip(min=0).sum(1), self.mu.clip(max=0).sum(1)], 1)

    def heads(self, name: str) -> pd.DataFrame:
        """A column of the history: one row per step, one column per layer and head."""
        every = {"layer": 0} | dict(self.history.items())
        return pd.DataFrame(every).pivot(index="step", columns=["layer", "head"], values=name)

    def sentences(self) -> list[str]:
        """Number of steps, final loss, and training settings if known."""
        last = self.history.iloc[-1]
        loss = digits(last["eval_loss"])
        if "eval_loss_sem" in self.history:
            loss = with_error(last["eval_loss"], last["eval_loss_sem"])
        steps = f"{counted(len(self.step), 'logged step')}, {self.step[0]:,} to {self.step[-1]:,}"
        return [f"{steps}; loss at the end on {self.eval_on} {loss} y².", *filter(None, [self.how])]

    def to_frame(self) -> pd.DataFrame:
        """A copy of the history."""
        return self.history.copy()

    def tables(self) -> dict[str, Table]:
        """The history; a short table has the last steps."""
        return {"history": Table(self.to_frame(), "Logged steps", by="step")}

    def figures(self) -> dict[str, go.Figure]:
        """Losses, then the columns of the heads. Each loss of several layers has a figure of its own, as spikes of the
        training loss would hide the other."""
        heads = {name: self.plot_heads(name) for name in CURVES if name in self.history}
        if self.heads("loss").columns.get_level_values("layer").nunique() == 1:
            return {"loss": self.plot_loss(), **heads}
        return {name: self.plot_loss(name) for name in LOSS_COLUMNS} | heads

    def plot(self) -> go.Figure:
        """omega of every head over training; of models without omega the loss."""
        return self.plot_heads("omega") if "omega" in self.history else self.plot_loss()

    def plot_mu(self) -> go.Figure:
        """mu of every head over training."""
        return self.plot_heads("mu")

    def plot_heads(self, name: str) -> go.Figure:
        """A column of the history over the steps, one curve per head; per layer for many heads."""
        heads = self.heads(name)
        several = heads.columns.get_level_values("layer").nunique() > 1
        heads.columns = [f"L{n}H{h}" if several else f"head {h}" for n, h in heads.columns]
        title = f"{CURVES[name].partition(' (')[0]} during training"
        if several and len(heads.columns) > MOST_HEAD_CURVES:
            layers = heads.columns.str.partition("H").get_level_values(0)
            heads = heads.pow(2).T.groupby(layers, sort=False).mean().pow(0.5).T
            title += ", root mean square over the heads of a layer"
        later = heads[heads.index >= self.logarithmic]
        return figures.lines(
            later.index.to_numpy(),
            {each: later[each].to_numpy() for each in later},
            title=title,
            x_title="step",
            y_title=CURVES[name],
            log_x=self.logarithmic,
            zero_line=True,
        )

    def plot_loss(self, *names: str) -> go.Figure:
        """Training and evaluation loss over training. A training loss over less than half as many
        updates as the one before is left out, such as the last one.

        Args:
            names: Losses to draw; none: both.
        """
        updates = np.diff(self.step)
        few = np.r_[False, False, updates[1:] < updates[:-1] / 2][: len(self.step)]
        rows = self.per_step.assign(loss=self.per_step["loss"].where(~few))
        rows = rows[rows["step"] >= self.logarithmic]
        curves = {name: rows[name].to_numpy() for name in names or LOSS_COLUMNS}
        drawn: dict[str, figures.Curve] = {n: v for n, v in curves.items() if np.isfinite(v).any()}
        if "eval_loss_sem" in rows and "eval_loss" in drawn:
            drawn["eval_loss"] = (curves["eval_loss"], rows["eval_loss_sem"].to_numpy())
        return figures.lines(
            rows["step"].to_numpy(),
            drawn,
            title="Evaluation loss during training"
            if names == ("eval_loss",)
            else "Loss during training",
            x_title="step",
            y_title="loss (y²)",
            log_x=self.logarithmic,
            log_y=self.logarithmic,
        )


def history(source: Source | pd.DataFrame) -> History:
    """Losses during training, with the scales of the heads of one attention layer, or the norms of
    other heads.

    A logged row has the mean training loss since the previous row, and eval_loss on prompts that
    training never uses, or on the population for models trained on it. Norms are Frobenius norms,
    that of QK with the scale; of many heads a curve is the root mean square over a layer.

    Args:
        source: A checkpoint, or its history.
    Raises:
        ValueError: If there is no history, or it lacks step, head, loss or eval_loss.
    Source:
        After He et al. 2025, arXiv 2503.12734, section 3.
    See also:
        `over_steps`, `jump_forecast`.
    Example:
        >>> from mechinterp import load
        >>> history(load("checkpoints/softmax-h1-s0")).omega.shape[1]
        1
        >>> history(load("checkpoints/sparse-h4-noise0.1-s0")).heads("qk_norm").shape[1]
        16
    """
    rows = source if isinstance(source, pd.DataFrame) else getattr(source, "history", None)
    if rows is None:
        path = getattr(source, "path", None)
        got = type(source).__name__ if path is None else f"{path} without"
        raise ValueError(f"history needs a checkpoint with a history, got {got}.")
    if missing := {"step", "head", "loss", "eval_loss"} - set(rows.columns):
        raise ValueError(
            f"history needs columns {', '.join(sorted(missing))}; the given history lacks them."
        )
    order = [name for name in ("step", "layer", "head") if name in rows]
    rows = rows.sort_values(order, kind="stable", ignore_index=True)
    return History(rows, *_training_of(source))


def _training_of(source: Source | pd.DataFrame) -> tuple[str, str]:
    """Data of eval_loss, and a sentence on the training of a checkpoint of this package; the
    sentence is empty for other files and for a history alone."""
    train = getattr(source, "training", None)
    if train is None:
        return "fixed prompts", ""
    size, rows = f"step size {train.learning_rate:g}", f"a row every {train.log_every} steps"
    if train.optimizer == "adam":
        return "fixed prompts", f"Adam, {size}, {train.batch_size} fresh prompts a step; {rows}."
    how = {
        "gradient_flow": "Exact gradient flow on the population, equivalent to descent with",
        "gradient_descent": "Full-batch gradient descent with",
    }[train.optimizer]
    return "the population", (
        f"{how} {size}; {rows}. loss is that of the training data at the step itself, "
        "eval_loss that of the population; both are exact."
    )
