"""Kept steps of a training: their losses, and figures that a slider moves over them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.analysis.training.histories import loss_at, loss_curve
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.plain_modules import HookedModule
from mechinterp.display import Result


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KeptSteps(Result):
    """Something of a model at each kept step, with its losses."""

    step: Int[np.ndarray, " snapshot"]
    eval_loss: Float[np.ndarray, " snapshot"]
    """Of the last logged step up to here, unit y^2; NaN without a history."""
    curve: Float[np.ndarray, "row 2"]
    """Step and eval_loss of the whole history."""

    def _heatmaps(
        self, figure: go.Figure, drawn: Iterable[Iterable[np.ndarray]], title: str
    ) -> go.Figure:
        """The heatmaps of a figure at each step, with a slider."""
        frames = {
            f"{step:,}": [{"z": matrix.astype(np.float32)} for matrix in matrices]
            for step, matrices in zip(self.step, drawn, strict=True)
        }
        titles = [f"{title} at step {name}" for name in frames]
        return figures.with_slider(figure, frames, label="step", titles=titles)

    def _loss_slider(
        self, titles: list[str], *, levels: Float[np.ndarray, " level"] | None = None
    ) -> go.Figure:
        """The loss over training, dotted levels, and a mark that a slider moves along it."""
        curve, step, loss = self.curve, self.step, self.eval_loss
        later = curve[curve[:, 0] > 0]
        # Step 0 has no place on a logarithmic axis: it stands at the left edge.
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
        # The axes hold the mark of every step.
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


def kept_losses(checkpoint: Checkpoint | HookedModule, steps: list[int]) -> dict[str, Any]:
    """The fields of `KeptSteps`."""
    curve = loss_curve(checkpoint)
    return {"step": np.array(steps), "eval_loss": loss_at(curve, steps), "curve": curve}
