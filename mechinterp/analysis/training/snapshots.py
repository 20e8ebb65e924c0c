"""Circuits and pattern of a model at the saved steps of its training."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.one_layer.circuits import Circuits, circuits_of, weights_of
from mechinterp.analysis.one_layer.classify import classify_attention
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.kept_steps import KeptSteps, kept_steps, loss_curve, snapshots_of
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Source
from mechinterp.models.run.task import task_for
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Snapshots(KeptSteps):
    """Circuits, pattern and loss at each saved step."""

    circuits: tuple[Circuits, ...]
    pattern: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    """Labels of the heads, as in `classify`."""

    def __repr__(self) -> str:
        return f"Snapshots({len(self.step)}, {self.pattern[0]} to {self.pattern[-1]})"

    def sentences(self) -> list[str]:
        """Patterns in order of time, each with its first step."""
        before = ("", *self.pattern)
        rows = zip(before, self.pattern, self.step, strict=False)
        changes = [f"{new} from step {step:,}" for old, new, step in rows if new != old]
        return [f"{len(self.step)} saved steps: {', '.join(changes)}."]

    def tables(self) -> dict[str, Table]:
        """Table of all numbers at every saved step."""
        frame = self.to_frame()
        scales = {
            "step",
            "eval_loss",
            "label",
            "head",
            "omega_mean",
            "qk_diagonal",
            "ov_last_entry",
        }
        quiet = tuple(n for n in frame if n not in scales and not n.startswith("mu_"))
        return {"snapshots": Table(frame, "Heads at the saved steps", quiet=quiet)}

    def figures(self) -> dict[str, go.Figure]:
        """Loss and circuits, with a shared slider."""
        circuits = {"snapshot_qk": self.plot(), "snapshot_ov": self.plot_ov()}
        return {"snapshot_loss": self.plot_loss(), **circuits}

    def to_frame(self) -> pd.DataFrame:
        """One row per snapshot and head."""
        parts = []
        for row, circuits in enumerate(self.circuits):
            head = {"step": self.step[row], "eval_loss": self.eval_loss[row]}
            head |= {"pattern": self.pattern[row], "label": list(self.labels[row])}
            parts.append(pd.concat([pd.DataFrame(head), circuits.to_frame()], axis=1))
        return pd.concat(parts, ignore_index=True)

    def plot(self) -> go.Figure:
        """The QK circuits, with a slider over the steps."""
        drawn = [each.QK[:, : each.omega.shape[1]] for each in self.circuits]
        return self._circuits(self.circuits[-1].plot_qk(), drawn, "QK circuits")

    def plot_ov(self) -> go.Figure:
        """The OV circuits, with a slider over the steps."""
        drawn = [each.OV.swapaxes(1, 2) for each in self.circuits]
        return self._circuits(self.circuits[-1].plot_ov(), drawn, "OV circuits")

    def plot_loss(self) -> go.Figure:
        """Loss over training with a mark that a slider moves over the steps."""
        titles = [
            f"Step {step:,}: loss {loss:.4f}, {pattern}"
            for step, loss, pattern in zip(self.step, self.eval_loss, self.pattern, strict=True)
        ]
        return self._loss_slider(titles)

    def _circuits(self, figure: go.Figure, drawn: list[np.ndarray], title: str) -> go.Figure:
        limit = max(float(np.abs(matrices).max()) for matrices in drawn) or 1.0
        return self._heatmaps(figure.update_traces(zmin=-limit, zmax=limit), drawn, title)


def training_snapshots(
    checkpoint: Source,
    *,
    prompts: Prompts | None = None,
    n_prompts: int = 512,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Snapshots:
    """Circuits, pattern and loss of a checkpoint at its `kept_steps`.

    Circuits share one colour scale; each step is classified as the final model is. The loss is the
    last logged eval_loss up to each step.

    Args:
        prompts: Given prompts of an unknown law; None draws them.
        n_prompts: Number of prompts for each classification.
        progress: Optional progress callback.
    Raises:
        ValueError: If the checkpoint has no snapshots.
    Source:
        As for `classify`.
    See also:
        `training_dynamics`, `milestones`.
    Example:
        >>> from mechinterp import load
        >>> training_snapshots(load("checkpoints/softmax-h2-s0"))
        Snapshots(10, unstructured to debiased_gd)
    """
    trained = snapshots_of(checkpoint, "training_snapshots")
    if not trained.predictor.is_one_attention:
        raise ValueError(
            "training_snapshots needs one layer of attention; use deep_snapshots (mechinterp analyse head-snapshots)."
        )
    steps = kept_steps(trained)
    weights = [trained.snapshots[step] for step in steps]
    task = task_for(trained, None, "training_snapshots", prompts)
    classified = [
        classify_attention(each, task, n_prompts=n_prompts, seed=seed)
        for each in progress(weights, "classifying snapshots")
    ]
    return Snapshots(
        circuits=tuple(circuits_of(weights_of(each, "training_snapshots")) for each in weights),
        pattern=tuple(each.pattern for each in classified),
        labels=tuple(each.labels for each in classified),
        step=np.array(steps),
        curve=loss_curve(trained),
    )
