"""Errors of a model with heads or MLPs masked, and each head's share of its layer's rises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import heatmaps
from mechinterp.analysis.stats import require_moderate
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.hooked.runner import require_runs
from mechinterp.models.run.predictor import predictor_of
from mechinterp.progress import ProgressCallback, no_progress

Metric = Callable[[Tensor, Prompts], Tensor]
"""Function from predictions [batch, d_y] and prompts to one number per prompt."""


def squared_error(predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
    """Squared error against the clean target, mean over responses; its mean is the excess risk."""
    return (predictions.double() - prompts.y_query_clean.to(predictions)).square().mean(1)


@dataclass(frozen=True)
class Masking:
    """Method of masking, and the metric that is measured under it."""

    method: str = "zero"
    """"zero", "mean" or "resample"."""
    function: Metric = squared_error
    metric: str = "excess risk"
    """Name of the metric."""
    unit: str = "y²"

    def values(self, predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
        """The metric for each prompt.

        Raises:
            ValueError: If it is not one finite number per prompt.
        """
        values = self.function(predictions, prompts)
        if not isinstance(values, Tensor):
            values = torch.as_tensor(values, device="cpu")
        if values.shape != (len(prompts),):
            raise ValueError(
                f"metric must give one number per prompt, [{len(prompts)}], got {list(values.shape)}."
            )
        if not values.isfinite().all():
            raise ValueError(f"metric must be finite, got {values[~values.isfinite()][0]}.")
        return values.double()


EXCESS = Masking()
"""Zero ablation and the excess risk."""


@dataclass(frozen=True, kw_only=True)
class OfMetric:
    """Name and unit of the metric of a result."""

    metric: str = EXCESS.metric
    """Name of the metric. The excess risk is the mean of (y_hat - y_query_clean)^2."""
    unit: str = EXCESS.unit
    """Unit of the metric; empty if unknown."""

    @property
    def metric_in_unit(self) -> str:
        """Name of the metric with its unit, for an axis."""
        return f"{self.metric} ({self.unit})" if self.unit else self.metric


def masked_values(
    source: object,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    how: Masking,
    *,
    mlps: Sequence[Sequence[int]] | None = None,
    at: int | None = None,
    progress: ProgressCallback = no_progress,
) -> Float[np.ndarray, "unit mask"]:
    """A metric under each mask, for independent units.

    A unit is a prompt; for resample ablation, where two prompts swap, it is the mean of a pair.
    """
    predictions = predictor_of(source).run(
        prompts, masks, method=how.method, mlps=mlps, at=at, progress=progress
    )
    require_moderate(predictions)
    values = torch.stack([how.values(each, prompts) for each in predictions], 1)
    values = values.unflatten(0, (-1, 2)).mean(1) if how.method == "resample" else values
    return values.numpy(force=True)


def masked_errors(
    source: object,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    progress: ProgressCallback = no_progress,
) -> Float[np.ndarray, "prompt mask"]:
    """Squared error against the clean target under each mask, zero ablation, mean over responses."""
    return masked_values(source, prompts, masks, EXCESS, progress=progress)


def single_masks(
    source: object,
    prompts: Prompts,
    how: Masking = EXCESS,
    *,
    runs: str = "one",
    progress: ProgressCallback = no_progress,
) -> tuple[Float[np.ndarray, " unit"], Float[np.ndarray, "unit layer head"]]:
    """The metric of the full model on each unit, and its rise when each head alone is masked.

    Args:
        runs: "one" masks a head in one layer; "all" masks it in all runs of its block, and the axis
            is then of blocks.
    Raises:
        ValueError: If there are fewer than two units, or runs is neither "one" nor "all".
    """
    predictor = predictor_of(source)
    require_runs(runs)
    each = [[head] for head in predictor.heads]
    if runs == "all":
        together = (tuple(predictor.hooked.in_all_runs(heads)) for heads in each)
        each = [list(heads) for heads in dict.fromkeys(together)]
    values = masked_values(predictor, prompts, [[], *each], how, progress=progress)
    if len(values) < 2:
        raise ValueError(f"At least 2 prompts (or pairs of prompts) are needed, got {len(values)}.")
    rises = values[:, 1:] - values[:, :1]
    return values[:, 0], rises.reshape(len(rises), -1, predictor.n_heads)


def layer_shares(
    rise: Float[np.ndarray, "*axes layer head"],
) -> Float[np.ndarray, "*axes layer head"]:
    """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head of the
    layer counts.

    Example:
        >>> layer_shares(np.array([[1.0, 3.0], [-1.0, 0.0]])).tolist()
        [[0.25, 0.75], [0.0, 0.0]]
    """
    positive = rise.clip(min=0)
    total = positive.sum(-1, keepdims=True)
    return positive / np.where(total == 0, 1, total)


def rise_heatmap(
    rise: Float[np.ndarray, "layer head"],
    title: str,
    *,
    end: float,
    unit: str = EXCESS.unit,
    mlp_rise: Float[np.ndarray, " layer"] | None = None,
) -> go.Figure:
    """Rises, layers by heads; colours end where a model is no better than predicting 0, if a rise is larger.

    Args:
        end: Rise at which the model is no better than predicting 0.
        mlp_rise: Rise when the MLP of a layer is masked, as a last column.
    """
    mlps = [] if mlp_rise is None else [mlp_rise]
    rises = np.column_stack([rise, *mlps])
    ends = 0 < end < np.abs(rises).max()
    return heatmaps.heatmap(
        rises,
        title=f"{title} (full colour: no better than predicting 0)" if ends else title,
        rows=[f"L{layer}" for layer in range(len(rises))],
        columns=[*(f"H{head}" for head in range(rise.shape[1])), *["MLP" for _ in mlps]],
        unit=unit,
        limit=end if ends else None,
    )
