"""Rise of the excess risk, or of another metric, when heads or MLPs are masked: by one method with
all options, or by every method side by side."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.ablation.masked_risk import (
    GreedyAblation,
    HeadAblation,
    Masking,
    Metric,
    PairAblation,
    PositionAblation,
    masked_by_position,
    masked_errors,
    masked_in_greedy_order,
    masked_values,
    pairs_of,
    rises_by_method,
    single_ablation,
)
from mechinterp.analysis.ablation.subsets import MAX_SUBSET_HEADS, SubsetAblation, ablate_subsets
from mechinterp.analysis.learners.simple import LEARNERS
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import METHODS
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.predictor import Source, predictor_of

SETS = ("single", "pairs", "greedy")
AT_POSITIONS = 256
"""Default number of prompts with positions; every head and position needs a run on them."""


Ablation = HeadAblation | PositionAblation | PairAblation | GreedyAblation


def ablate_heads(
    source: Source,
    prompts: Prompts | None = None,
    *,
    metric: Metric | str | None = None,
    sets: str = "single",
    positions: str | None = None,
    mlps: bool = False,
    method: str = "zero",
    runs: str = "one",
    n_prompts: int | None = None,
    seed: int = 0,
) -> Ablation:
    """Rise of the excess risk when heads are masked: one at a time, position by position, in pairs, or one after another.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more. With positions: 256.
        metric: Function from predictions [batch, d_y] and prompts to one number per prompt; or "ridge"
            or "dmmse", the squared distance to this predictor of the model's task, y². None: the
            squared error against the target without noise, whose mean is the excess risk.
        sets: "single": each head alone; "pairs": every two heads together, with their interaction;
            "greedy": one head after another, next the one whose masking leaves the smallest metric
            (the order is chosen on half of the prompts, the metric measured on the other half).
        positions: "all" masks each head at one position at a time; None at all positions.
        mlps: True: the MLP of each layer is masked, too.
        method: "zero"; "mean" over the given prompts at each position; or "resample", the value of
            another prompt.
        runs: "one" masks a head in one layer. "all" masks it in all runs of its block if blocks run
            several times; rows are then blocks.
    Returns:
        A `HeadAblation`; with positions a `PositionAblation`, for pairs a `PairAblation`, for the greedy
        order `GreedyAblation`.
    Raises:
        ValueError: If an option is unknown or two do not go together, there are fewer than two prompts
            (four for resample, eight for the greedy order), the number of prompts is odd for resample,
            the metric does not give one finite number per prompt, or an MLP is missing or has no hook.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who mask heads one at a time. The importance,
        normalised within a layer, and its estimate are choices made here, and so is the interaction:
        the rise of both heads minus the sum of their single rises. The greedy order is backward
        elimination.
    See also:
        `ablate_subsets`, `prune`, `classify`.
    Example:
        >>> from mechinterp import load, sample_prompts
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint, 512)
        >>> ablate_heads(checkpoint, prompts).rise.shape
        (1, 2)
        >>> ablate_heads(checkpoint, prompts, sets="pairs").names
        ('L0H0', 'L0H1')
    """
    _require_options(sets, positions, mlps=mlps, runs=runs)
    n_prompts = AT_POSITIONS if positions and n_prompts is None else n_prompts
    fitted = 1 if sets == "greedy" else 0
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed, fitted=fitted)
    how = _masking(method, metric, source)
    predictor = predictor_of(source)
    if mlps and predictor.attention_only:
        raise ValueError("mlps=True needs a model with MLPs, got one of attention alone.")
    if positions:
        return masked_by_position(predictor, prompts, how)
    if sets == "pairs":
        return pairs_of(predictor, prompts, how)
    if sets == "greedy":
        return masked_in_greedy_order(predictor, prompts, how)
    found = single_ablation(predictor, prompts, how, runs=runs)
    if not mlps:
        return found
    gone = [(), *((layer,) for layer in range(predictor.n_layers))]
    values = masked_values(predictor, prompts, [()] * len(gone), how, mlps=gone)
    rise, sem = mean_and_sem(values[:, 1:] - values[:, :1])
    return replace(found, mlp_rise=rise, mlp_rise_sem=sem)


def _masking(method: str, metric: Metric | str | None, source: Source) -> Masking:
    """The method, and the metric with its name and unit."""
    if metric is None:
        return Masking(method=method)
    if callable(metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        # A function without a name is called <lambda>.
        name = "metric" if "<" in name else name.replace("_", " ")
        return Masking(method=method, function=metric, metric=name, unit="")
    if metric not in ("ridge", "dmmse"):
        raise ValueError(
            f"metric must be a function of predictions and prompts, 'ridge' or 'dmmse', got {metric!r}."
        )
    task = task_for(source, None, f"metric={metric!r}")
    if metric == "dmmse" and task.n_tasks is None:
        raise ValueError("metric='dmmse' needs a task with a pool (n_tasks), got one without.")

    def distance(predictions: Tensor, prompts: Prompts) -> Float[Tensor, " batch"]:
        learned = LEARNERS[metric].predict(prompts, task)
        return (predictions - learned.to(predictions)).square().mean(1)

    return Masking(method=method, function=distance, metric=f"distance to {metric}")


def _require_options(sets: str, positions: str | None, *, mlps: bool, runs: str) -> None:
    """Refuse unknown values, and options that do not go together."""
    if sets not in SETS:
        raise ValueError(f"sets must be one of {', '.join(SETS)}, got {sets!r}.")
    if positions not in (None, "all"):
        raise ValueError(f"positions must be 'all' or None, got {positions!r}.")
    usual = {"sets": sets == "single", "positions": positions is None, "mlps": not mlps}
    usual["runs"] = runs == "one"
    changed = [name for name, is_usual in usual.items() if not is_usual]
    if len(changed) > 1:
        raise ValueError(
            f"{changed[0]} and {changed[1]} do not go together; leave one of them out."
        )


MOST_SWITCHES = 8
"""Largest number of heads with switches on the page."""


@dataclass(frozen=True, eq=False, repr=False)
class Ablations(Result):
    """Results of masking single heads by each method, whole layers, and subsets of heads."""

    methods: tuple[HeadAblation, ...]
    """One result per method of masking, zero ablation first."""
    subsets: SubsetAblation | None
    """None for several layers or many heads."""
    # The next two are None for one layer.
    layer_rise: Float[np.ndarray, " layer"] | None = None
    """Excess risk with all heads of the layer masked minus that of the full model, unit y^2."""
    layer_rise_sem: Float[np.ndarray, " layer"] | None = None
    """Standard error of layer_rise, paired over prompts."""

    def __repr__(self) -> str:
        return f"Ablations({', '.join(map(repr, self.methods))})"

    def sentences(self) -> list[str]:
        """Excess risk, the head with the largest rise, and rises that need care."""
        zero = self.methods[0]
        layer, head = at = np.unravel_index(int(zero.rise.argmax()), zero.rise.shape)
        raises = "raises it most" if zero.rise[at] > 0 else "lowers it least, as every mask does"
        sentences = [
            f"excess risk {with_error(zero.full_risk, zero.full_risk_sem)} y².",
            f"Masking L{layer}H{head} {raises}, by {with_error(abs(zero.rise[at]), zero.rise_sem[at])} y² in the mean over "
            f"prompts; the median rise is {digits(zero.median_rise[at])}.",
        ]
        carried = [
            f"L{n}H{h} ({m.method})" for m in self.methods for n, h in np.argwhere(m.carried_by_few)
        ]
        if carried:
            heads = ", ".join(carried)
            sentences.append(
                f"1% of the prompts make up most of the mean rise of {heads}: read the median."
            )
        if zero.breaking:
            heads, risk = ", ".join(zero.breaking), digits(zero.null_risk)
            sentences.append(
                f"Without one of {heads} the model is worse than predicting 0 ({risk} y²)."
            )
        return sentences

    def to_frame(self) -> pd.DataFrame:
        """One row per method and head."""
        return pd.concat([one.to_frame() for one in self.methods], ignore_index=True)

    def layer_frame(self) -> pd.DataFrame:
        """One row per layer, under zero ablation."""
        frame = self.methods[0].layer_frame()
        if self.layer_rise is None:
            return frame
        return frame.assign(layer_rise=self.layer_rise, layer_rise_sem=self.layer_rise_sem)

    def tables(self) -> dict[str, Table]:
        """Tables of heads and layers; for one layer also Shapley values and subsets."""
        tables = {
            "ablation": Table(
                self.to_frame(),
                "Rise when one head is masked",
                by="median_rise",
                per="method",
                quiet=("carried_by_few",),
            ),
            "layers": Table(self.layer_frame(), "Layers (zero ablation)"),
        }
        if self.subsets is not None:
            title = "Shapley values: fall of the excess risk due to a head"
            tables["shapley"] = Table(self.subsets.shapley_frame(), title)
            tables["subsets"] = Table(
                self.subsets.to_frame(), "Excess risk for every subset of heads"
            )
        return tables

    def to_document(self) -> dict:
        """Excess risk, heads, layers and, if available, subsets of heads."""
        zero = self.methods[0]
        names = {"ablation": "heads"}
        tables = {names.get(key, key): records(t.frame) for key, t in self.tables().items()}
        return {
            "excess_risk": zero.full_risk,
            "excess_risk_sem": zero.full_risk_sem,
            "null_risk": zero.null_risk,
            "breaking": zero.breaking,
            **tables,
        }

    def head_facts(self) -> list[dict[str, str]]:
        """Rise of each head under each method, and its Shapley value."""
        columns = {
            f"{one.method} ablation (y²)": zip(one.rise.flat, one.rise_sem.flat, strict=True)
            for one in self.methods
        }
        if self.subsets is not None:
            values = zip(self.subsets.shapley, self.subsets.shapley_sem, strict=True)
            columns["Shapley value (y²)"] = values
        rows = zip(*columns.values(), strict=True)
        return [{n: with_error(*v) for n, v in zip(columns, row, strict=True)} for row in rows]

    def switches(self) -> dict[str, object] | None:
        """Switches of the heads of one layer; None for several layers or many heads."""
        few = self.subsets is not None and self.subsets.kept.shape[1] <= MOST_SWITCHES
        return self.subsets.switches() if self.subsets is not None and few else None

    def plot(self) -> go.Figure:
        """Rise of the excess risk: by every method for one layer, under zero ablation for several
        layers."""
        zero = self.methods[0]
        if len(zero.rise) > 1:
            return zero.plot()
        return rises_by_method(self.methods, "Rise of the excess risk when a head is masked")

    def figures(self) -> dict[str, go.Figure]:
        """Rises, with Shapley values for one layer and importance for several."""
        if self.subsets is not None:
            return {"ablation": self.plot(), "shapley": self.subsets.plot()}
        return {"ablation": self.plot(), "head_importance": self.methods[0].plot_importance()}


def ablate(
    source: Source, prompts: Prompts | None = None, *, n_prompts: int | None = None, seed: int = 0
) -> Ablations:
    """Rise of the excess risk when heads are masked: each alone by every method, and in one layer
    every subset.

    Excess risk is the mean of (ŷ − x·β)² on the same prompts for every mask; ± is one standard
    error, paired over prompts. Zero ablation sets a head's z to 0, mean ablation to its mean over
    prompts, and resample ablation to that of another prompt. Nothing is retrained. Importance is a
    head's share of its layer's rises, with negative rises counted as 0. The effective number of
    heads is exp of the entropy of the importance. In one layer the outputs of heads add up, so that
    one pass gives all subsets; a Shapley value is the mean over all orders of adding heads. In
    several layers, whole layers are masked too.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
    Raises:
        ValueError: If there are fewer than four prompts.
    See also:
        `ablate_heads`, `ablate_subsets`, `prune`.
    Example:
        >>> from mechinterp import load
        >>> [one.method for one in ablate(load("checkpoints/softmax-h2-s0"), n_prompts=64).methods]
        ['zero', 'mean', 'resample']
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    even = prompts[: len(prompts) - len(prompts) % 2]  # prompts swap in pairs
    predictor = predictor_of(source)
    used = {how: even if how == "resample" else prompts for how in METHODS}
    methods = [single_ablation(predictor, some, Masking(method=how)) for how, some in used.items()]
    few = predictor.is_one_attention and predictor.n_heads <= MAX_SUBSET_HEADS
    subsets = ablate_subsets(source, prompts) if few else None
    if predictor.n_layers == 1:
        return Ablations(tuple(methods), subsets)
    layers = range(predictor.n_layers)
    masks = [[head for head in predictor.heads if head[0] == layer] for layer in layers]
    errors = masked_errors(predictor, prompts, [[], *masks])
    return Ablations(tuple(methods), subsets, *mean_and_sem(errors[:, 1:] - errors[:, :1]))
