"""Training history of a checkpoint: logged rows, and weights of earlier steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.number_format import digits
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.display import Result
from mechinterp.models.run.predictor import Source

MAX_NUMBERS = 100_000  # entries of all circuits together: a page with them stays small


def with_snapshots(source: Source, analysis: str) -> Checkpoint | HookedModule:
    """A checkpoint, or a module that a monitor watched, that has weights of earlier steps.

    Raises:
        ValueError: If it has none, or is another model.
    """
    if not getattr(source, "snapshots", None):
        raise ValueError(f"{analysis} needs a checkpoint with snapshots, got {_told(source)}.")
    return source  # type: ignore[return-value]


def with_history(source: Source, analysis: str) -> pd.DataFrame:
    """The history of a checkpoint.

    Raises:
        ValueError: If there is none.
    """
    history = getattr(source, "history", None)
    if history is None:
        raise ValueError(f"{analysis} needs a checkpoint with a history, got {_told(source)}.")
    return history


@dataclass(frozen=True)
class Training:
    """How a model was trained, in words."""

    eval_on: str = "fixed prompts"
    """What eval_loss is the loss on."""
    how: str = ""
    """Optimiser, step size and rows of the history, a sentence; empty if that is not known."""

    @property
    def sentences(self) -> list[str]:
        """The sentence, if there is one."""
        return [self.how] if self.how else []


NOT_KNOWN = Training()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LoggedSteps(Result):
    """Losses of one model at its logged steps."""

    step: Int[np.ndarray, " row"]
    """Number of updates."""
    loss: Float[np.ndarray, " row"]
    """Mean training loss since the last row, NaN at step 0; unit y^2."""
    eval_loss: Float[np.ndarray, " row"]
    """Loss on a fixed set of prompts that training never sees, or on the population where training is on that; unit y^2."""
    training: Training = NOT_KNOWN
    """How the model was trained."""

    def __repr__(self) -> str:
        last = f"{self.step[-1]} steps, final eval_loss {self.eval_loss[-1]:.4f}"
        return f"{type(self).__name__}({last})"

    def _over_steps(
        self, curves: Mapping[str, np.ndarray], title: str, y_title: str, **how: Any
    ) -> go.Figure:
        """Curves over the logged steps but step 0, which has no place on a logarithmic axis."""
        later = self.step > 0
        shown = {name: values[later] for name, values in curves.items()}
        return figures.lines(
            self.step[later],
            shown,
            title=title,
            x_title="step",
            y_title=y_title,
            log_x=True,
            **how,
        )

    @property
    def ended(self) -> str:
        """How many steps, and where the loss ends."""
        return f"{self.step[-1]} steps; final loss on {self.training.eval_on} {digits(self.eval_loss[-1])} y²."


def logged_steps(history: pd.DataFrame, source: Source | pd.DataFrame) -> dict[str, Any]:
    """The fields of `LoggedSteps`, from a history and the checkpoint that it may be of."""
    per_step = history.drop_duplicates("step")
    losses = {name: per_step[name].to_numpy() for name in ("step", "loss", "eval_loss")}
    return {**losses, "training": training_of(source)}


def training_of(source: Source | pd.DataFrame) -> Training:
    """How a checkpoint of this package was trained; of other files and of a history alone that is not known.

    Example:
        >>> from mechinterp import load
        >>> training_of(load("checkpoints/linear-merged-s0")).how[:77]
        'Exact gradient flow on the population, as long as descent of step size 0.031;'
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
        "gradient_flow": "Exact gradient flow on the population, as long as descent of",
        "gradient_descent": "Full-batch gradient descent of",
    }[train.optimizer]
    return Training(
        "the population",
        f"{how} step size {train.learning_rate:g}; {rows}. loss is that of the data trained on at the step itself, "
        "eval_loss that of the population; both are exact.",
    )


def _told(source: Source) -> str:
    path = getattr(source, "path", None)
    return type(source).__name__ if path is None else f"{path} without"


def kept_steps(checkpoint: Checkpoint) -> list[int]:
    """Steps of the snapshots; of very many large ones every second, third, ... and the last."""
    steps = list(checkpoint.snapshots)
    stride = -(-len(steps) * checkpoint.weights.circuits.QK.numel() // MAX_NUMBERS)
    return steps[::-stride][::-1]


def loss_curve(checkpoint: Checkpoint | HookedModule) -> Float[np.ndarray, "row 2"]:
    """Step and eval_loss of a checkpoint's history; no rows if there is none."""
    if checkpoint.history is None:
        return np.zeros((0, 2))
    rows = checkpoint.history.drop_duplicates("step")
    return rows[["step", "eval_loss"]].to_numpy(dtype=np.float64)


def loss_at(curve: Float[np.ndarray, "row 2"], steps: list[int]) -> Float[np.ndarray, " snapshot"]:
    """The loss of the last logged step up to each of the steps; NaN where there is none."""
    rows = np.searchsorted(curve[:, 0], steps, side="right") - 1
    return np.array([curve[row, 1] if row >= 0 else np.nan for row in rows])
