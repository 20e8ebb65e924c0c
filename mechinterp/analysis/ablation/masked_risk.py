"""Errors of a model with heads or MLPs masked: single heads, all pairs, one head after another, and single positions of
the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp import figures, heatmaps
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    halves,
    mean_and_sem,
    ratio_and_sem,
    require_moderate,
)
from mechinterp.display import Result, frame_of, head_axes, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head, z_name
from mechinterp.models.hooked.runner import require_runs
from mechinterp.models.run.predictor import Predictor, predictor_of
from mechinterp.progress import progress

Metric = Callable[[Tensor, Prompts], Tensor]
"""Function from predictions [batch, d_y] and prompts to one number per prompt."""


def squared_error(predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
    """Squared error against the clean target, mean over responses; its mean is the excess risk."""
    return (predictions.double() - prompts.y_query_clean.to(predictions)).square().mean(1)


@dataclass(frozen=True, kw_only=True)
class OfMetric:
    """Method of masking, and name and unit of the metric that is measured under it."""

    method: str = "zero"
    """"zero": the head's output is 0; "mean": its z is the mean over prompts at that position;
    "resample": its z is that of another prompt."""
    metric: str = "excess risk"
    """Name of the metric. The excess risk is the mean of (y_hat - y_query_clean)^2."""
    unit: str = "y²"
    """Unit of the metric; empty if unknown."""

    @property
    def metric_in_unit(self) -> str:
        """Name of the metric with its unit, for an axis."""
        return f"{self.metric} ({self.unit})" if self.unit else self.metric


@dataclass(frozen=True, kw_only=True)
class Masking(OfMetric):
    """Method of masking, and the function that is measured under it."""

    function: Metric = squared_error

    @property
    def named(self) -> dict[str, Any]:
        """Method, name of the metric and unit, by field of a result."""
        return {"method": self.method, "metric": self.metric, "unit": self.unit}

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


def masked_values(
    source: object,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    how: Masking,
    *,
    mlps: Sequence[Sequence[int]] | None = None,
    at: int | None = None,
) -> Float[np.ndarray, "unit mask"]:
    """A metric under each mask, for independent units.

    A unit is a prompt; for resample ablation, where two prompts swap, it is the mean of a pair.
    """
    predictions = predictor_of(source).run(prompts, masks, method=how.method, mlps=mlps, at=at)
    require_moderate(predictions)
    values = torch.stack([how.values(each, prompts) for each in predictions], 1)
    values = values.unflatten(0, (-1, 2)).mean(1) if how.method == "resample" else values
    return values.numpy(force=True)


def masked_errors(
    source: object, prompts: Prompts, masks: Sequence[Sequence[Head]]
) -> Float[np.ndarray, "prompt mask"]:
    """Squared error against the clean target under each mask, zero ablation, mean over responses."""
    return masked_values(source, prompts, masks, EXCESS)


def single_masks(
    source: object, prompts: Prompts, how: Masking = EXCESS, *, runs: str = "one"
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
    values = masked_values(predictor, prompts, [[], *each], how)
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
        columns=[*(f"H{head}" for head in range(rise.shape[1])), *["MLP" for _ in mlps]],
        unit=unit,
        limit=end if ends else None,
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GreedyAblation(OfMetric, Result):
    """Excess risk, or another metric, as heads are masked one after another, on prompts that did not choose the order."""

    heads: tuple[str, ...]
    """Names of the heads (L0H0, ...) in the order of masking."""
    risk: Float[np.ndarray, " size"]
    """Metric with the first 0, 1, ..., all heads masked, unit of the metric."""
    risk_sem: Float[np.ndarray, " size"]
    ratio: Float[np.ndarray, " size"]
    """`risk` divided by that of the full model."""
    ratio_sem: Float[np.ndarray, " size"]
    """Standard error of `ratio`, paired over prompts."""

    @property
    def needed(self) -> int:
        """Smallest number of heads with which the metric is at most twice that of the full model."""
        return int(len(self.heads) - np.flatnonzero(self.ratio <= 2).max())

    def __repr__(self) -> str:
        return (
            f"GreedyAblation({self.needed} of {len(self.heads)} heads needed for at most twice the "
            f"{self.metric})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per number of kept heads."""
        n_kept = range(len(self.heads), -1, -1)
        frame = frame_of(self, *with_sem("risk", "ratio"), n_kept=n_kept)
        frame.insert(1, "masked_next", [*self.heads, ""])
        return frame

    def plot(self) -> go.Figure:
        """Metric over the number of kept heads."""
        return figures.lines(
            np.arange(len(self.heads), -1, -1),
            {"greedy order": (self.risk, self.risk_sem)},
            title=f"{self.metric.capitalize()} against the number of kept heads",
            x_title="heads kept",
            y_title=self.metric_in_unit,
            log_y=True,
        )


def masked_in_greedy_order(predictor: Predictor, prompts: Prompts, how: Masking) -> GreedyAblation:
    """A metric as heads are masked one after another; next is the head that leaves the smallest metric when masked, too.

    The order is chosen on the first half of the prompts, the metric measured on the second half.
    """
    chosen_on, measured_on = halves(prompts)
    order: list[Head] = []
    left = predictor.heads
    for _ in progress(range(len(left)), "greedy order of heads"):
        values = masked_values(predictor, chosen_on, [[*order, head] for head in left], how)
        order.append(left.pop(int(values.mean(0).argmin())))
    masks = [order[:size] for size in range(len(order) + 1)]
    values = masked_values(predictor, measured_on, masks, how)
    return GreedyAblation(
        **how.named,
        heads=tuple(f"L{layer}H{head}" for layer, head in order),
        **estimates(risk=mean_and_sem(values), ratio=ratio_and_sem(values, values[:, 0])),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PairAblation(OfMetric, Result):
    """Extra cost of masking two heads together, compared with the sum of their single costs."""

    names: tuple[str, ...]
    """Names of the heads along both axes: L0H0, L0H1, ..."""
    rise: Float[np.ndarray, "head head"]
    """Metric with both heads masked minus that of the full model, unit of the metric; a single head
    on the diagonal."""
    rise_sem: Float[np.ndarray, "head head"]
    interaction: Float[np.ndarray, "head head"]
    """rise(a, b) - rise(a) - rise(b), unit of the metric: positive for heads that replace each other, negative for
    heads that work only together; 0 on the diagonal."""
    interaction_sem: Float[np.ndarray, "head head"]
    """Standard errors of `interaction`, paired over prompts."""

    def __repr__(self) -> str:
        one, other = np.unravel_index(int(np.abs(self.interaction).argmax()), self.rise.shape)
        size, sem = self.interaction[one, other], self.interaction_sem[one, other]
        return f"PairAblation({self.names[one]} with {self.names[other]}: {size:+.3g} ± {sem:.2g})"

    def to_frame(self) -> pd.DataFrame:
        """One row per pair."""
        pairs = np.triu_indices(len(self.names), 1)
        head, other = (np.array(self.names, dtype=object)[each] for each in pairs)
        values = {name: getattr(self, name)[pairs] for name in with_sem("rise", "interaction")}
        return pd.DataFrame({"head": head, "other": other, **values})

    def plot(self) -> go.Figure:
        """Interaction of every two heads."""
        return heatmaps.heatmap(
            self.interaction,
            title="Interaction: rise with both heads masked minus the sum of their rises",
            rows=self.names,
            columns=self.names,
            unit=self.unit,
        )


def pairs_of(predictor: Predictor, prompts: Prompts, how: Masking) -> PairAblation:
    """Rise of a metric when every pair of heads is masked together, and the interaction of each pair."""
    heads = predictor.heads
    masks = [[], *map(list, combinations_with_replacement(heads, 2))]
    errors = masked_values(predictor, prompts, masks, how)
    one, other = np.triu_indices(len(heads))
    rises = np.zeros((len(errors), len(heads), len(heads)))
    rises[:, one, other] = rises[:, other, one] = errors[:, 1:] - errors[:, :1]
    alone = rises.diagonal(axis1=1, axis2=2)
    # A pair of a head with itself is one mask.
    apart = alone[:, :, None] + alone[:, None] * (1 - np.eye(len(heads)))
    return PairAblation(
        **how.named,
        names=tuple(f"L{layer}H{head}" for layer, head in heads),
        **estimates(rise=mean_and_sem(rises), interaction=mean_and_sem(rises - apart)),
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PositionAblation(OfMetric, Result):
    """Rise of the excess risk, or of another metric, when one head is masked at one position of the prompt."""

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


def masked_by_position(predictor: Predictor, prompts: Prompts, how: Masking) -> PositionAblation:
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
    positions = _positions(n_pos, prompts.x.shape[1])
    return PositionAblation(**how.named, positions=positions, rise=rise, rise_sem=sem)


def _positions(n_pos: int, n_pairs: int) -> tuple[str, ...]:
    """Names of the positions: pairs, or x and y in turn; numbers for anything else."""
    if n_pos == n_pairs + 1:
        return (*(str(n + 1) for n in range(n_pairs)), "query")
    if n_pos in (2 * n_pairs + 1, 2 * n_pairs + 2):
        return tuple(f"{'xy'[n % 2]}{n // 2 + 1}" for n in range(n_pos))
    return tuple(map(str, range(n_pos)))


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HeadAblation(OfMetric, Result):
    """Rise of the excess risk, or of another metric, when one head is masked, and its distribution over the heads of each
    layer."""

    rise: Float[np.ndarray, "layer head"]
    """Metric of the masked model minus that of the full model, unit of the metric."""
    rise_sem: Float[np.ndarray, "layer head"]
    """Standard error of `rise`, paired: the same prompts for every mask. Often underestimated when
    few prompts dominate, as for a head without which later layers break."""
    median_rise: Float[np.ndarray, "layer head"]
    """Median over prompts of the rise, unit of the metric; it is insensitive to a few prompts."""
    carried_by_few: Bool[np.ndarray, "layer head"]
    """True if 1% of the prompts make up more than half of the mean size of the rise; the median is
    then more informative."""
    full_risk: float
    """Metric of the full model, unit of the metric."""
    full_risk_sem: float
    null_risk: float
    """Metric of predicting 0, unit of the metric."""
    mlp_rise: Float[np.ndarray, " layer"] | None = None
    """Rise when the MLP of a layer is masked, unit of the metric; None if they are not measured."""
    mlp_rise_sem: Float[np.ndarray, " layer"] | None = None

    def __repr__(self) -> str:
        layer, head = np.unravel_index(int(self.rise.argmax()), self.rise.shape)
        rise = with_error(self.rise.max(), self.rise_sem[layer, head])
        rise = rise if rise.startswith("-") else f"+{rise}"
        if self.carried_by_few[layer, head]:
            rise = f"median {self.median_rise[layer, head]:+.3g}, mean {rise}, dominated by few prompts,"
        what = "" if self.metric == EXCESS.metric else f", {self.metric}"
        return f"HeadAblation({self.method}{what}: L{layer}H{head} {rise} on {self.full_risk:.3g})"

    @property
    def headline(self) -> str:
        """Metric of the full model."""
        risk = with_error(self.full_risk, self.full_risk_sem)
        return f"{self.metric} {risk} {self.unit}".strip()

    @property
    def importance(self) -> Float[np.ndarray, "layer head"]:
        """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head of
        a layer counts."""
        return layer_shares(self.rise)

    @property
    def effective_heads(self) -> Float[np.ndarray, " layer"]:
        """exp of the entropy of `importance`: 1 if one head counts, n_heads if all count equally, 0
        if none counts."""
        shares = self.importance
        logs = np.log(np.where(shares > 0, shares, 1))
        return np.where(shares.any(1), np.exp(-(shares * logs).sum(1)), 0.0)

    @property
    def breaking(self) -> list[str]:
        """Heads without which the model is worse than predicting 0, if the full model is better
        than that."""
        worse = (self.full_risk + self.rise > self.null_risk) & (self.full_risk <= self.null_risk)
        return [f"L{layer}H{head}" for layer, head in np.argwhere(worse)]

    def to_frame(self) -> pd.DataFrame:
        """One row per head; the median comes first if few prompts dominate a rise."""
        rises = with_sem("rise")
        few = self.carried_by_few.any()
        names = ("median_rise", *rises) if few else (*rises, "median_rise")
        frame = frame_of(self, *names, "carried_by_few", "importance", **head_axes(self.rise))
        if self.mlp_rise is not None:
            rows = {"rise": self.mlp_rise, "rise_sem": self.mlp_rise_sem, "head": "MLP"}
            mlps = pd.DataFrame(rows | {"layer": range(len(self.rise))})
            frame = pd.concat([frame.astype({"head": object}), mlps], ignore_index=True)
        frame.insert(0, "method", self.method)
        return frame

    def layer_frame(self) -> pd.DataFrame:
        """One row per layer: its number of effective heads."""
        return frame_of(self, "effective_heads", layer=range(len(self.rise)))

    def plot(self) -> go.Figure:
        """Rise of the metric: layers by heads (colours end where the model is no better than predicting 0), or one bar per
        head for one layer."""
        what = "head" if self.mlp_rise is None else "head or MLP"
        title = f"Rise of the {self.metric} when a {what} is masked ({self.method} ablation)"
        if len(self.rise) == 1 and self.mlp_rise is None:
            return rises_by_method([self], title)
        return rise_heatmap(
            self.rise,
            title,
            end=self.null_risk - self.full_risk,
            unit=self.unit,
            mlp_rise=self.mlp_rise,
        )

    def plot_importance(self) -> go.Figure:
        """Importance within the layer, layers by heads."""
        title = f"Importance: share of the layer's rise ({self.method} ablation)"
        return heatmaps.heatmap(self.importance, title=title, unit="share", signed=False)


def rises_by_method(methods: Sequence[HeadAblation], title: str) -> go.Figure:
    """Rise of the metric when a head is masked, one group of bars per head."""
    return figures.bars(
        head_names(methods[0].rise.shape),
        {f"{one.method} ablation": (one.rise.ravel(), one.rise_sem.ravel()) for one in methods},
        title=title,
        y_title=f"rise of {methods[0].metric_in_unit}",
    )


def single_ablation(
    predictor: Predictor, prompts: Prompts, how: Masking, *, runs: str = "one"
) -> HeadAblation:
    """Rise of a metric when each head is masked, one at a time."""
    full, rises = single_masks(predictor, prompts, how, runs=runs)
    nothing = torch.zeros_like(prompts.y_query_clean)
    return HeadAblation(
        **how.named,
        median_rise=np.median(rises, axis=0),
        carried_by_few=carried_by_few(rises),
        null_risk=how.values(nothing, prompts).mean().item(),
        **estimates(rise=mean_and_sem(rises), full_risk=mean_and_sem(full)),
    )
