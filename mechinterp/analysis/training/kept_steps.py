"""Training history of a model: logged losses, weights of saved steps, and figures with a slider
over them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.display import Result
from mechinterp.models.run.predictor import Source

MAX_NUMBERS = 100_000  # largest number of circuit entries on a page, to keep it small


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KeptSteps(Result):
    """Base of results at each saved step, with the losses of training."""

    step: Int[np.ndarray, " snapshot"]
    curve: Float[np.ndarray, "row 2"]
    """Step and eval_loss of the whole history."""

    @property
    def eval_loss(self) -> Float[np.ndarray, " snapshot"]:
        """Last logged eval_loss up to each saved step, unit y^2; NaN without a history."""
        rows = np.searchsorted(self.curve[:, 0], self.step, side="right")
        return np.r_[np.nan, self.curve[:, 1]][rows]

    def _heatmaps(
        self, figure: go.Figure, drawn: Iterable[Iterable[np.ndarray]], title: str
    ) -> go.Figure:
        """Heatmaps of a figure at each step, with a slider."""
        frames = {
            f"{step:,}": [{"z": matrix.astype(np.float32)} for matrix in matrices]
            for step, matrices in zip(self.step, drawn, strict=True)
        }
        titles = [f"{title} at step {name}" for name in frames]
        return figures.with_slider(figure, frames, label="step", titles=titles)

    def _loss_slider(
        self, titles: list[str], *, levels: Float[np.ndarray, " level"] | None = None
    ) -> go.Figure:
        """Loss over training with dotted levels, and a mark that a slider moves along it."""
        curve, step, loss = self.curve, self.step, self.eval_loss
        later = curve[curve[:, 0] > 0]
        # Step 0 cannot be shown on a logarithmic axis: it is drawn at the left edge.
        left = later[0, 0] / 2 if len(later) else 0.5
        shown = np.column_stack([np.maximum(curve[:, 0], left), curve[:, 1]])
        figure = figures.lines(
            shown[:, 0],
            {"eval_loss": shown[:, 1]},
            title="",
            x_title="step (step 0 at the left edge)",
            y_title="loss (y²)",
            levels=() if levels is None else levels,
            log_x=True,
            log_y=levels is None,
        )
        figure.add_scatter(
            x=[left],
            y=[loss[-1]],
            mode="markers",
            name="this step",
            marker={"size": 13, "color": figures.COLORS[1]},
        )
        # Both axes include the mark of every step.
        ends = np.array([left, *shown[:, 0], *step[step > 0]])
        heights = np.concatenate([shown[:, 1], loss[np.isfinite(loss)]])
        figure.update_xaxes(figures.log_ticks([ends]), range=figures.log_range(ends))
        if levels is None:
            figure.update_yaxes(figures.log_ticks([heights]), range=figures.log_range(heights))
        frames = {
            f"{at:,}": [{"x": [float(max(at, left))], "y": [float(value)]}]
            for at, value in zip(step, loss, strict=True)
        }
        return figures.with_slider(figure, frames, label="step", titles=titles, traces=[1])


def with_snapshots(source: Source, analysis: str) -> Checkpoint | HookedModule:
    """A checkpoint, or a module watched by a monitor, with weights of earlier steps.

    Raises:
        ValueError: If it has no such weights, or is another model.
    """
    if not getattr(source, "snapshots", None):
        raise ValueError(f"{analysis} needs a checkpoint with snapshots, got {_without(source)}.")
    return source  # type: ignore[return-value]


def snapshots_of(source: Source, analysis: str) -> Checkpoint:
    """A checkpoint with weights of earlier steps.

    Raises:
        ValueError: If it is another model, or has no such weights.
    """
    return checkpoint_of(with_snapshots(source, analysis), analysis)


def with_history(source: Source | pd.DataFrame, analysis: str) -> pd.DataFrame:
    """History of a checkpoint; a history is returned unchanged.

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


def kept_steps(checkpoint: Checkpoint) -> list[int]:
    """Steps of the snapshots. If they are many and large, every second, third, ... one, including
    the last."""
    steps = list(checkpoint.snapshots)
    stride = -(-len(steps) * checkpoint.weights.circuits.QK.numel() // MAX_NUMBERS)
    return steps[::-stride][::-1]


def loss_curve(checkpoint: Checkpoint | HookedModule) -> Float[np.ndarray, "row 2"]:
    """Step and eval_loss of a checkpoint's history; empty without a history."""
    if checkpoint.history is None:
        return np.zeros((0, 2))
    rows = checkpoint.history.drop_duplicates("step")
    return rows[["step", "eval_loss"]].to_numpy(dtype=np.float64)
