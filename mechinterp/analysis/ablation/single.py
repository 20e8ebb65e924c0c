"""Rise of the excess risk when single heads are masked."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float, Int

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.masked_risk import layer_shares, single_masks
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.stats import carried_by_few, estimates, mean_and_sem, resampled
from mechinterp.display import Result, frame_of, head_axes, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source
from mechinterp.progress import ProgressCallback, no_progress


class LayerShares:
    """Distribution of the rises of heads within each layer, for one or several models."""

    rise: Float[np.ndarray, "*axes layer head"]

    @property
    def importance(self) -> Float[np.ndarray, "*axes layer head"]:
        """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head of
        a layer counts."""
        return layer_shares(self.rise)

    @property
    def top_share(self) -> Float[np.ndarray, "*axes layer"]:
        """Largest importance of a head in the layer."""
        return self.importance.max(-1)

    @property
    def top_head(self) -> Int[np.ndarray, "*axes layer"]:
        """Head of the layer with the largest rise."""
        return self.rise.argmax(-1)

    @property
    def top_rise(self) -> Float[np.ndarray, "*axes layer"]:
        """Rise when that head is masked, unit y^2."""
        return self.rise.max(-1)


@dataclass(frozen=True, eq=False, repr=False)
class HeadAblation(LayerShares, Result):
    """Rise of the excess risk when one head is masked, and its distribution over the heads of each
    layer."""

    method: str
    """"zero": the head's output is 0; "mean": its z is the mean over prompts at that position;
    "resample": its z is that of another prompt."""
    rise: Float[np.ndarray, "layer head"]
    """Excess risk of the masked model minus that of the full model, unit y^2."""
    rise_sem: Float[np.ndarray, "layer head"]
    """Standard error of `rise`, paired: the same prompts for every mask. Often underestimated when
    few prompts dominate, as for a head without which later layers break."""
    median_rise: Float[np.ndarray, "layer head"]
    """Median over prompts of the rise, unit y^2; it is insensitive to a few prompts."""
    carried_by_few: Bool[np.ndarray, "layer head"]
    """True if 1% of the prompts make up more than half of the mean size of the rise; the median is
    then more informative."""
    p_value: Float[np.ndarray, "layer head"]
    """P-value of Wilcoxon's signed-rank test that errors rise and fall alike. It is corrected for
    all heads (Benjamini and Hochberg): among the heads with p_value < q, an expected share of at
    most q has no effect."""
    effective_heads: Float[np.ndarray, " layer"]
    """exp of the entropy of `importance`: 1 if one head counts, n_heads if all count equally, 0 if
    none counts."""
    effective_heads_sem: Float[np.ndarray, " layer"]
    """Standard error of `effective_heads`, from resampled prompts (bootstrap).

    If all heads of a layer count equally, the value is the maximum, and every sample is below it.
    Then the spread over samples is 0.6 (1 / sqrt(3)) of this error. The root mean square distance
    from the maximum is 0.7, 0.9 and 1.2 of it for 2, 4 and 8 heads. If `rise_sem` is too small, so
    is this error."""
    full_risk: float
    """Excess risk of the full model: mean (y_hat - y_query_clean)^2, unit y^2."""
    full_risk_sem: float
    null_risk: float
    """Excess risk of predicting 0, unit y^2."""

    def __repr__(self) -> str:
        layer, head = np.unravel_index(int(self.rise.argmax()), self.rise.shape)
        rise = with_error(self.rise.max(), self.rise_sem[layer, head])
        rise = rise if rise.startswith("-") else f"+{rise}"
        if self.carried_by_few[layer, head]:
            rise = f"median {self.median_rise[layer, head]:+.3g}, mean {rise}, dominated by few prompts,"
        return f"HeadAblation({self.method}: L{layer}H{head} {rise} on {self.full_risk:.3g})"

    @property
    def headline(self) -> str:
        """Excess risk of the full model."""
        return f"excess risk {with_error(self.full_risk, self.full_risk_sem)} y²"

    @property
    def effective_heads_of_medians(self) -> Float[np.ndarray, " layer"]:
        """`effective_heads` of `median_rise` instead of `rise`."""
        return _effective_number(self.median_rise)

    @property
    def typical_effective_heads(self) -> Float[np.ndarray, " layer"]:
        """`effective_heads_of_medians` for layers where few prompts dominate a rise, else
        `effective_heads`."""
        few = self.carried_by_few.any(1)
        return np.where(few, self.effective_heads_of_medians, self.effective_heads)

    @property
    def carried(self) -> list[str]:
        """Heads whose mean rise is dominated by few prompts."""
        flags = self.carried_by_few.ravel()
        return [name for name, few in zip(self.head_names, flags, strict=True) if few]

    @property
    def breaking(self) -> list[str]:
        """Heads without which the model is worse than predicting 0, if the full model is better
        than that."""
        risks = self.full_risk + self.rise.ravel()
        worse = (risks > self.null_risk) & (self.full_risk <= self.null_risk)
        return [name for name, broken in zip(self.head_names, worse, strict=True) if broken]

    @property
    def head_names(self) -> list[str]:
        """Names L0H0, L0H1, ... in the order of the flattened arrays."""
        return head_names(self.rise.shape)

    def to_frame(self) -> pd.DataFrame:
        """One row per head; the median comes first if few prompts dominate a rise."""
        names = (*self._first_of("rise", "median_rise"), "carried_by_few", "p_value", "importance")
        frame = frame_of(self, *names, **head_axes(self.rise))
        frame.insert(0, "method", self.method)
        return frame

    def layer_frame(self) -> pd.DataFrame:
        """One row per layer: effective heads, share of the largest head and largest rise.

        Numbers of medians come first if few prompts dominate a rise."""
        names = self._first_of("effective_heads", "effective_heads_of_medians")
        names = (*names, "top_share", "top_head", "top_rise")
        frame = frame_of(self, *names, layer=range(len(self.rise)))
        frame.insert(0, "method", self.method)
        return frame

    def _first_of(self, mean: str, median: str) -> tuple[str, ...]:
        """Mean, its error and median; the median comes first if few prompts dominate a rise."""
        means = with_sem(mean)
        return (median, *means) if self.carried_by_few.any() else (*means, median)

    def plot(self) -> go.Figure:
        """Rise of the excess risk: layers by heads, or one bar per head for one layer."""
        title = f"Rise of the excess risk when a head is masked ({self.method} ablation)"
        if len(self.rise) > 1:
            return heatmaps.layers_by_heads(self.rise, title=title, unit="y²")
        return rises_by_method([self], title)

    def plot_factor(self) -> go.Figure:
        """Excess risk with a head masked divided by that of the full model, on a logarithmic scale.

        Colours end at the risk of predicting 0, or earlier."""
        if not 0 < self.full_risk < self.null_risk:
            return self.plot()
        factor = np.log10(np.maximum(1 + self.rise / self.full_risk, 1e-6))
        title = "Excess risk with a head masked / full model's, log₁₀"
        bound = np.log10(self.null_risk / self.full_risk)
        limit = float(min(np.abs(factor).max(), bound)) or float(bound)
        return heatmaps.layers_by_heads(factor, title=title, unit="log₁₀", limit=limit)

    def plot_importance(self) -> go.Figure:
        """Importance within the layer, layers by heads."""
        title = f"Importance: share of the layer's rise ({self.method} ablation)"
        return heatmaps.layers_by_heads(self.importance, title=title, unit="share", signed=False)


def rises_by_method(methods: Sequence[HeadAblation], title: str) -> go.Figure:
    """Rise of the excess risk when a head is masked, one group of bars per head."""
    return figures.bars(
        methods[0].head_names,
        {f"{one.method} ablation": (one.rise.ravel(), one.rise_sem.ravel()) for one in methods},
        title=title,
        y_title="rise of excess risk (y²)",
    )


def ablate_heads(
    source: Source,
    prompts: Prompts | None = None,
    *,
    method: str = "zero",
    runs: str = "one",
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> HeadAblation:
    """Rise of the excess risk when each head of a hooked model is masked, one at a time.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        method: "zero"; "mean" over the given prompts at each position; or "resample", the value of
            another prompt.
        runs: "one" masks a head in one layer. "all" masks it in all runs of its block if blocks run
            several times; rows are then blocks.
        progress: Optional progress callback.
    Raises:
        ValueError: If the method or `runs` is unknown, there are fewer than two prompts (four for
            resample), or the number of prompts is odd for resample.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time. The
        importance, normalised
        within a layer, and its estimate are choices made here.
    See also:
        `ablate_pairs`, `ablate_subsets`, `classify_layers`.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_heads(load("checkpoints/softmax-h2-s0").model, prompts).rise.shape
        (1, 2)
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    full, rises = single_masks(source, prompts, method=method, runs=runs, progress=progress)
    return HeadAblation(
        method=method,
        median_rise=np.median(rises, axis=0),
        carried_by_few=carried_by_few(rises),
        p_value=_corrected_p_values(rises),
        null_risk=prompts.y_query_clean.double().square().mean().item(),
        **estimates(
            rise=mean_and_sem(rises),
            effective_heads=_effective_heads(rises),
            full_risk=mean_and_sem(full),
        ),
    )


def _effective_number(rise: Float[np.ndarray, "layer head"]) -> Float[np.ndarray, " layer"]:
    """exp(H) with H = -sum_j w_j log w_j over the shares w_j of the rises; 0 if there are none."""
    shares = layer_shares(rise)
    logs = np.log(np.where(shares > 0, shares, 1))
    return np.where(shares.any(1), np.exp(-(shares * logs).sum(1)), 0.0)


def _effective_heads(
    rises: Float[np.ndarray, "unit layer head"],
) -> tuple[Float[np.ndarray, " layer"], Float[np.ndarray, " layer"]]:
    """Effective number of heads and its standard deviation over bootstrap samples of the units."""
    means = (np.tensordot(shares, rises, axes=1) for shares in resampled(len(rises)))
    again = np.array([_effective_number(mean) for mean in means])
    return _effective_number(rises.mean(0)), again.std(axis=0, ddof=1)


def _corrected_p_values(
    rises: Float[np.ndarray, "unit layer head"],
) -> Float[np.ndarray, "layer head"]:
    # Imported here because `classify` reads this file and scipy.stats is slow to import.
    import scipy.stats

    p_values = np.ones(rises.shape[1:])
    live = rises.any(0)  # a head that changes no prediction keeps p = 1
    if live.any():
        p_values[live] = scipy.stats.wilcoxon(rises[:, live]).pvalue
    return scipy.stats.false_discovery_control(p_values.ravel()).reshape(p_values.shape)
