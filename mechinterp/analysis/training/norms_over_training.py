"""Norms of the heads of any model during training, from a checkpoint's history; scales where heads have them."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.histories import LoggedSteps, logged_steps, with_history
from mechinterp.analysis.training.over_training import TrainingDynamics, training_dynamics
from mechinterp.analysis.training.run_over_training import RunOverTraining
from mechinterp.display import frame_of, head_axes
from mechinterp.models.run.predictor import Source

NORMS = {"qk_norm": "QK", "ov_norm": "OV"}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NormsOverTraining(LoggedSteps):
    """Losses and norms of the heads of a model at its logged steps."""

    qk_norm: Float[np.ndarray, "row layer head"]
    """Frobenius norm of the head's QK, the scale in it."""
    ov_norm: Float[np.ndarray, "row layer head"]
    """Frobenius norm of the head's OV."""

    @property
    def qk_norm_first(self) -> Float[np.ndarray, "layer head"]:
        """qk_norm at the first logged step."""
        return self.qk_norm[0]

    @property
    def ov_norm_first(self) -> Float[np.ndarray, "layer head"]:
        """ov_norm at the first logged step."""
        return self.ov_norm[0]

    @property
    def qk_norm_factor(self) -> Float[np.ndarray, "layer head"]:
        """qk_norm at the last logged step over that at the first."""
        return self.qk_norm[-1] / self.qk_norm[0]

    @property
    def ov_norm_factor(self) -> Float[np.ndarray, "layer head"]:
        """ov_norm at the last logged step over that at the first."""
        return self.ov_norm[-1] / self.ov_norm[0]

    def sentences(self) -> list[str]:
        """Where the loss ends, in which layer norms have changed most, and how the model was trained."""
        told = [self.ended]
        for name, what in NORMS.items():
            factors = np.median(getattr(self, f"{name}_factor"), axis=1)
            listed = ", ".join(f"{factor:.3g}" for factor in factors)
            told.append(
                f"The norm of {what} of the median head ends at {listed} times its first value, layer by layer: it has "
                f"changed most in layer {int(np.abs(np.log(factors)).argmax())}."
            )
        return told + self.training.sentences

    def to_frame(self) -> pd.DataFrame:
        """One row per logged step, layer and head."""
        heads = head_axes(self.qk_norm[0])
        return frame_of(self, "loss", "eval_loss", *NORMS, step=self.step, **heads)

    def norm_frame(self) -> pd.DataFrame:
        """One row per head: its norms at the first and the last logged step, and the factor between them."""
        layer, head = (index.ravel() for index in np.indices(self.qk_norm.shape[1:]))
        columns = {"layer": layer, "head": head}
        for name in NORMS:
            columns[f"{name}_first"] = getattr(self, name)[0].ravel()
            columns[name] = getattr(self, name)[-1].ravel()
            columns[f"{name}_factor"] = getattr(self, f"{name}_factor").ravel()
        return pd.DataFrame(columns)

    def tables(self) -> dict[str, Table]:
        """Norms before and after, and every logged step."""
        return {
            "norms": Table(self.norm_frame(), "Norms of the heads, first and last"),
            "history": Table(self.to_frame(), "Logged steps", brief=False),
        }

    def figures(self) -> dict[str, go.Figure]:
        """Losses, then norms layer by layer."""
        return {
            "eval_loss": self.plot(),
            "loss": self._curves("loss", "Training loss, mean since the row before"),
            **{name: self.plot_norm(name) for name in NORMS},
        }

    def plot(self) -> go.Figure:
        """Loss on prompts that training never sees."""
        return self._curves(
            "eval_loss", "Loss during training, on prompts that training never sees"
        )

    def plot_norm(self, name: str) -> go.Figure:
        """Root mean square over the heads of a layer of `qk_norm` or `ov_norm`, a curve per layer."""
        later = self.step > 0  # step 0 has no place on a logarithmic axis
        curves = np.sqrt(np.square(getattr(self, name)[later]).mean(2)).T
        return figures.lines(
            self.step[later],
            {f"layer {layer}": curve for layer, curve in enumerate(curves)},
            title=f"Norm of {NORMS[name]} during training, layer by layer",
            x_title="step",
            y_title=f"norm of {NORMS[name]}",
            log_x=True,
        )

    def _curves(self, name: str, title: str) -> go.Figure:
        # One figure each: a training loss with spikes would leave no room for the other.
        later = self.step > 0
        return figures.lines(
            self.step[later],
            {name: getattr(self, name)[later]},
            title=title,
            x_title="step",
            y_title="loss (y²)",
            log_x=True,
            log_y=True,
        )


def history_of(
    source: Source | pd.DataFrame,
) -> TrainingDynamics | NormsOverTraining | RunOverTraining:
    """Losses during training, with the scales of the heads of one layer of attention or the norms of any others.

    A logged row has the mean training loss since the row before, and eval_loss on prompts that training never sees, or
    of the population where training is on that. Norms are Frobenius norms, that of QK with the scale in it; a curve is
    their root mean square over the heads of a layer.

    Args:
        source: A checkpoint, or its history.
    Raises:
        ValueError: If there is no history.
    Example:
        >>> from mechinterp import load
        >>> history_of(load("checkpoints/sparse-h4-noise0.1-s0")).qk_norm.shape[1:]
        (4, 4)
    """
    given = isinstance(source, pd.DataFrame)
    history: pd.DataFrame = source if given else with_history(source, "training")
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
