"""Rise of the excess risk, or of another metric, when a head is masked at one position of the prompt."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.ablation.masked_risk import Masking, OfMetric, masked_values
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result, frame_of, head_axes, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import z_name
from mechinterp.models.run.predictor import Predictor
from mechinterp.progress import ProgressCallback


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PositionAblation(OfMetric, Result):
    """Rise of the excess risk, or of another metric, when one head is masked at one position of the prompt."""

    method: str
    """"zero", "mean" or "resample"."""
    positions: tuple[str, ...]
    """Names of the positions: x1, y1, ... for tokens in turn; 1, 2, ..., query for pairs; 0, 1, ... for any others."""
    rise: Float[np.ndarray, "layer head pos"]
    """Metric with the head masked at this position minus that of the full model, unit of the metric."""
    rise_sem: Float[np.ndarray, "layer head pos"]
    """Standard error of `rise`, paired: the same prompts for every mask."""

    def __repr__(self) -> str:
        at = layer, head, pos = np.unravel_index(int(self.rise.argmax()), self.rise.shape)
        rise = with_error(self.rise[at], self.rise_sem[at])
        return f"PositionAblation({self.method}: L{layer}H{head} at {self.positions[pos]} {rise})"

    def to_frame(self) -> pd.DataFrame:
        """One row per head and position."""
        return frame_of(self, *with_sem("rise"), **head_axes(self.rise[..., 0]), pos=self.positions)

    def tables(self) -> dict[str, Table]:
        """The rises; a short table has the largest."""
        title = f"Rise of the {self.metric} when a head is masked at one position"
        return {"ablate_heads": Table(self.to_frame(), title, by="rise")}

    def plot(self) -> go.Figure:
        """Heads by positions."""
        return heatmaps.heatmap(
            self.rise.reshape(-1, len(self.positions)),
            title=f"Rise of the {self.metric} when a head is masked at one position",
            rows=head_names(self.rise.shape[:2]),
            columns=self.positions,
            unit=self.unit,
        )


def masked_by_position(
    predictor: Predictor, prompts: Prompts, how: Masking, progress: ProgressCallback
) -> PositionAblation:
    """Rise of a metric when each head is masked at one position at a time.

    In models of this package nothing reads the last layer but the prediction at the query, so that its heads have no effect
    at other positions and are not run there.
    """
    last = predictor.n_layers - 1
    names = [z_name(layer) for layer in range(predictor.n_layers)]
    _, every_z = predictor.hooked.activations(prompts[:2], names)
    sizes = [z.shape[1] for z in every_z]
    shape = (predictor.n_layers, predictor.n_heads, n_pos := max(sizes))
    rise, sem = np.zeros(shape), np.zeros(shape)
    for at in progress(range(n_pos), "masking heads at each position"):
        idle = predictor.weights is not None and at < n_pos - 1
        heads = [
            (layer, head)
            for layer, head in predictor.heads
            if at < sizes[layer] and not (idle and layer == last)
        ]
        if heads:
            values = masked_values(predictor, prompts, [(), *([h] for h in heads)], how, at=at)
            place = (*np.transpose(heads), at)
            rise[place], sem[place] = mean_and_sem(values[:, 1:] - values[:, :1])
    return PositionAblation(
        method=how.method,
        metric=how.metric,
        unit=how.unit,
        positions=_positions(n_pos, prompts.x.shape[1]),
        rise=rise,
        rise_sem=sem,
    )


def _positions(n_pos: int, n_pairs: int) -> tuple[str, ...]:
    """Names of the positions: pairs, or x and y in turn; numbers for anything else."""
    if n_pos == n_pairs + 1:
        return (*(str(n + 1) for n in range(n_pairs)), "query")
    if n_pos in (2 * n_pairs + 1, 2 * n_pairs + 2):
        return tuple(f"{'xy'[n % 2]}{n // 2 + 1}" for n in range(n_pos))
    return tuple(map(str, range(n_pos)))
