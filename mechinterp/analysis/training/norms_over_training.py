"""Norms of the heads of any model during training, from a checkpoint's history; scales where heads have them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

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

    COLUMNS: ClassVar = {
        f"{name}_{what}": f"{name} at the {text}."
        for name in NORMS
        for what, text in (
            ("first", "first logged step"),
            ("factor", "last logged step over that at the first"),
        )
    }

    def sentences(self) -> list[str]:
        """Where the loss ends, in which layer norms have changed most, and how the model was trained."""
        told = [self.ended]
        for name, what in NORMS.items():
            factors = np.median(getattr(self, name)[-1] / getattr(self, name)[0], axis=1)
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
            first, last = getattr(self, name)[[0, -1]].reshape(2, -1)
            columns |= {f"{name}_first": first, name: last, f"{name}_factor": last / first}
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
            "loss": self._losses("loss", "Training loss, mean since the row before"),
            **{name: self.plot_norm(name) for name in NORMS},
        }

    def plot(self) -> go.Figure:
        """Loss on prompts that training never sees."""
        return self._losses(
            "eval_loss", "Loss during training, on prompts that training never sees"
        )

    def plot_norm(self, name: str) -> go.Figure:
        """Root mean square over the heads of a layer of `qk_norm` or `ov_norm`, a curve per layer."""
        curves = np.sqrt(np.square(getattr(self, name)).mean(2)).T
        layers = {f"layer {layer}": curve for layer, curve in enumerate(curves)}
        norm = f"orm of {NORMS[name]}"
        return self._over_steps(layers, f"N{norm} during training, layer by layer", f"n{norm}")

    def _losses(self, name: str, title: str) -> go.Figure:
        # One figure each: a training loss with spikes would leave no room for the other.
        return self._over_steps({name: getattr(self, name)}, title, "loss (y²)", log_y=True)


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
