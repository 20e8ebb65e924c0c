"""Head ablation of a multilayer model at the saved steps of its training."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.ablation.single import LayerShares, ablate_heads
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.kept_steps import KeptSteps, loss_curve, with_snapshots
from mechinterp.display import frame_of, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source
from mechinterp.progress import ProgressCallback, no_progress

N_PROMPTS = 512
"""Default number of prompts for every saved step."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class DeepSnapshots(LayerShares, KeptSteps):
    """Excess risk, and the distribution of rises over the heads of each layer, at each saved step."""

    risk: Float[np.ndarray, " snapshot"]
    """Excess risk of the full model, unit y^2."""
    risk_sem: Float[np.ndarray, " snapshot"]
    rise: Float[np.ndarray, "snapshot layer head"]
    """Rise of the excess risk when one head is masked, unit y^2."""
    effective_heads: Float[np.ndarray, "snapshot layer"]
    """exp(entropy of `importance`) of each layer."""
    effective_heads_sem: Float[np.ndarray, "snapshot layer"]

    def __repr__(self) -> str:
        return f"DeepSnapshots({len(self.step)}, risk {self.risk[0]:.3g} to {self.risk[-1]:.3g})"

    def sentences(self) -> list[str]:
        """Effective number of heads of the first layer at each step."""
        rows = zip(self.step, self.effective_heads[:, 0], strict=True)
        first = ", ".join(f"{number:.1f} at step {step:,}" for step, number in rows if step)
        return [f"{len(self.step)} saved steps. Effective heads of the first layer: {first}."]

    def tables(self) -> dict[str, Table]:
        """Table of all layers at every saved step."""
        return {"snapshots": Table(self.to_frame(), "Layers at the saved steps")}

    def figures(self) -> dict[str, go.Figure]:
        """Loss and importance, with a shared slider."""
        return {"snapshot_loss": self.plot_loss(), "snapshot_importance": self.plot()}

    def to_frame(self) -> pd.DataFrame:
        """One row per snapshot and layer."""
        names = (*with_sem("risk", "effective_heads"), "top_head", "top_rise")
        return frame_of(self, *names, step=self.step, layer=range(self.rise.shape[1]))

    def plot(self) -> go.Figure:
        """Importance, layers by heads, with a slider over the steps."""
        title = "Importance: share of the layer's rise"
        figure = heatmaps.layers_by_heads(
            self.importance[-1], title=title, unit="share", limit=1.0, signed=False
        )
        return self._heatmaps(figure, self.importance[:, None], title)

    def plot_loss(self) -> go.Figure:
        """Loss over training with a mark that a slider moves over the steps."""
        titles = [
            f"Step {step:,}: excess risk {with_error(risk, sem)} y²"
            for step, risk, sem in zip(self.step, self.risk, self.risk_sem, strict=True)
        ]
        return self._loss_slider(titles)


def deep_snapshots(
    checkpoint: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int = N_PROMPTS,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> DeepSnapshots:
    """Zero ablation of every head at each saved step, on the same prompts.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        progress: Optional progress callback.
    Raises:
        ValueError: If the checkpoint has no snapshots.
    See also:
        `ablate_heads`, `training_snapshots`.
    Example:
        >>> from mechinterp.checkpoints.checkpoint import load
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> checkpoint = load("checkpoints/sparse-h4-noise0.1-s0")
        >>> prompts = sample_prompts(checkpoint.config.task, 64, generator=generator_for(0, "eval", 0))
        >>> deep_snapshots(checkpoint, prompts).rise.shape
        (7, 4, 4)
    """
    trained = with_snapshots(checkpoint, "deep_snapshots")
    prompts = evaluation_prompts(trained, prompts, n_prompts=n_prompts, seed=seed)
    kept = progress(list(trained.snapshots.values()), "masking heads of snapshots")
    ablations = [ablate_heads(weights, prompts) for weights in kept]
    names = {"risk": "full_risk", "risk_sem": "full_risk_sem", "rise": "rise"}
    names |= {name: name for name in with_sem("effective_heads")}
    return DeepSnapshots(
        step=np.array(list(trained.snapshots)),
        curve=loss_curve(trained),
        **{own: np.array([getattr(a, name) for a in ablations]) for own, name in names.items()},
    )
