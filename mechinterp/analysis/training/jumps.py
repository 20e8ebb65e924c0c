"""Jumps of the loss of linear attention, predicted from the initial weights of heads of rank one.

The forecast says when each head learns which eigenvector, on which levels the loss rests, and its course in between.
Nothing is trained or fitted.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.config import ExperimentConfig, TaskConfig, value_of
from mechinterp.display import Result, frame_of
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.linear import SeparateHeads, modes
from mechinterp.theory.linear_jumps import claims_not_applying, predict_jumps, predicted_loss
from mechinterp.training.linear_models import initial_heads, task_moments

N_POINTS = 400
"""Number of points of a predicted curve."""


@dataclass(frozen=True, eq=False, repr=False)
class JumpForecast(Result):
    """Jumps predicted from the initial weights, in the order of time."""

    step: Float[np.ndarray, " jump"]
    time: Float[np.ndarray, " jump"]
    direction: Int[np.ndarray, " jump"]
    eigenvalue: Float[np.ndarray, " jump"]
    vector: Float[np.ndarray, "jump d_x"]
    """Its entries; the sign is arbitrary."""
    head: Int[np.ndarray, " jump"]
    levels: Float[np.ndarray, " level"]
    """Loss before the first jump, between jumps and after the last; unit y^2."""
    curve: Float[np.ndarray, "point 2"]
    """Step and predicted loss."""
    notes: tuple[str, ...]
    """Limits of the prediction for this config, as sentences."""
    COLUMNS: ClassVar = {
        "head": "Head that learns it.",
        "step": "Middle of the drop in loss, in steps.",
        "time": "step in units of tau.",
        "direction": "Eigenvector learned, 0 for the largest eigenvalue.",
        "eigenvalue": "Its eigenvalue.",
        "jump": "Number of the jump, from 1.",
        "loss_before": "Level of the loss before the jump.",
        "loss_after": "Level of the loss after the jump.",
    }
    UNITS: ClassVar = {"x²": ("eigenvalue",), "y²": ("loss_before", "loss_after")}

    def __repr__(self) -> str:
        jumps = (f"{d}@{s:.4g}" for d, s in zip(self.direction, self.step, strict=True))
        return f"JumpForecast({', '.join(jumps)})"

    def sentences(self) -> list[str]:
        """The levels, and the limits of the prediction."""
        levels = ", ".join(f"{level:.4f}" for level in self.levels)
        return [f"Levels of the loss (y²): {levels}.", *self.notes]

    def to_frame(self) -> pd.DataFrame:
        """One row per jump."""
        names = ("step", "time", "direction", "eigenvalue", "head")
        frame = frame_of(self, *names, jump=range(1, len(self.step) + 1))
        return frame.assign(loss_before=self.levels[:-1], loss_after=self.levels[1:])

    def plot(self) -> go.Figure:
        """The predicted loss over the steps, its levels dotted and the jumps dashed."""
        figure = figures.lines(
            self.curve[:, 0],
            {"predicted loss": self.curve[:, 1]},
            title="Loss predicted from the initial weights: levels (dotted) and jumps (dashed)",
            x_title="step",
            y_title="loss (y²)",
            levels=self.levels,
            log_x=True,
        )
        for step, mode, head in zip(self.step, self.direction, self.head, strict=True):
            text = {"textangle": -90, "yanchor": "top", "xanchor": "right"}
            text["text"] = f"head {head} learns e{mode}"
            figure.add_vline(float(step), line_dash="dash", line_width=1, annotation=text)
        return figure


def jump_forecast(source: ExperimentConfig | Checkpoint) -> JumpForecast:
    """Jumps of the loss in the training of a config, from its initial weights alone.

    Args:
        source: A config, or a checkpoint that was trained by one.
    Raises:
        ValueError: If the source is neither, the config is not of linear attention with separate heads of rank one that is trained on
            moments, or eigenvalues of its covariance repeat.
    Source:
        Derived in theory.linear_jumps from Zhang et al. 2025, arXiv 2501.16265, eq. (19) to (21).
    See also:
        `linear_components`, `over_steps`, `local_learning_coefficient`.
    Example:
        >>> from mechinterp.presets import preset
        >>> jump_forecast(preset("linear-separate"))
        JumpForecast(0@851.4, 1@1334, 2@1598, 3@9714)
    """
    config = source.config if isinstance(source, Checkpoint) else source
    if not isinstance(config, ExperimentConfig):
        raise ValueError(
            f"jump_forecast needs a config, or a checkpoint that was trained by one, got a {type(source).__name__}."
        )
    heads, eigenvalues = _rank_one_heads(config), _eigenvalues(config.task)
    directions = modes(task_moments(config.task))
    jumps = predict_jumps(heads, directions)
    steps_per_tau = 1 / (2 * config.train.learning_rate)
    step = jumps.time * steps_per_tau
    # Times from long before the first jump to long after the last, dense near each jump.
    wide = np.geomspace(jumps.time[0] / 10, 3 * jumps.time[-1], N_POINTS)
    near = 1 + np.linspace(-0.3, 0.3, N_POINTS // 4)
    time = np.unique(np.concatenate([wide, np.outer(jumps.time, near).ravel()]))
    return JumpForecast(
        step=step,
        time=jumps.time,
        direction=jumps.mode,
        eigenvalue=eigenvalues[jumps.mode],
        vector=directions.vectors.T[jumps.mode],
        head=jumps.head,
        levels=directions.variance - np.r_[0.0, np.cumsum(directions.gains[jumps.mode])],
        curve=np.column_stack([time * steps_per_tau, predicted_loss(time, jumps, directions)]),
        notes=_notes(config, eigenvalues, step),
    )


def _rank_one_heads(config: ExperimentConfig) -> SeparateHeads:
    needed = {"model.score": "linear/L", "model.merged_qk": False, "model.d_head": 1}
    for name, value in needed.items():
        got = config.d_head if name == "model.d_head" else value_of(config, name)
        if got != value:
            raise ValueError(
                "Jumps are predicted for linear attention with separate heads of rank one: "
                f"{name} must be {json.dumps(value)}, got {json.dumps(got)}."
            )
    heads = initial_heads(config)
    assert isinstance(heads, SeparateHeads)
    return heads


def _eigenvalues(task: TaskConfig) -> Float[np.ndarray, " mode"]:
    """Eigenvalues of the covariance, descending and distinct."""
    values = np.linalg.eigvalsh(covariance_matrix(task.covariance, task.d_x))[::-1].copy()
    repeated = claims_not_applying(values, rank=1, n_heads=task.d_x)
    if repeated:
        raise ValueError(
            f"task.covariance must have distinct eigenvalues, got {values.round(6).tolist()}. {repeated[0]}"
        )
    return values


def _notes(config: ExperimentConfig, eigenvalues: np.ndarray, step: np.ndarray) -> tuple[str, ...]:
    notes = list(claims_not_applying(eigenvalues, rank=1, n_heads=config.model.n_heads))
    late = int((step > config.train.steps).sum())
    if late:
        notes.append(
            f"{late} of {len(step)} jumps would come after the last step, {config.train.steps}."
        )
    if config.task.n_sequences is not None:
        notes.append(
            f"The jumps are those of the population; a training set of {config.task.n_sequences} sequences moves them."
        )
    return tuple(notes)
