"""Head ablation by every method, for heads and whole layers, and for every subset of heads in one
attention layer."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp.analysis.ablation.masked_risk import Masking, masked_errors
from mechinterp.analysis.ablation.single import HeadAblation, rises_by_method, single_ablation
from mechinterp.analysis.ablation.subsets import MAX_SUBSET_HEADS, SubsetAblation, ablate_subsets
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import METHODS
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

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
        sentences = [
            f"excess risk {with_error(zero.full_risk, zero.full_risk_sem)} y².",
            f"Masking L{layer}H{head} {'raises it most' if zero.rise[at] > 0 else 'lowers it least, as every mask does'}, by "
            f"{with_error(abs(zero.rise[at]), zero.rise_sem[at])} y² in the mean over prompts; the median rise is "
            f"{digits(zero.median_rise[at])}.",
        ]
        carried = [
            f"{', '.join(one.carried)} ({one.method})" for one in self.methods if one.carried
        ]
        if carried:
            heads = "; ".join(carried)
            sentences.append(
                f"1% of the prompts make up most of the mean rise of {heads}: read the median."
            )
        if zero.breaking:
            heads, risk = ", ".join(zero.breaking), digits(zero.null_risk)
            sentences.append(
                f"Without one of {heads} the model is worse than predicting 0 ({risk} y²)."
            )
        if self.subsets is None and self.layer_rise is None:
            sentences.append(
                f"Subsets are left out: they need one layer of attention with at most {MAX_SUBSET_HEADS} heads."
            )
        return sentences

    def to_frame(self) -> pd.DataFrame:
        """One row per method and head."""
        return pd.concat([one.to_frame() for one in self.methods], ignore_index=True)

    def layer_frame(self) -> pd.DataFrame:
        """One row per method and layer."""
        zero, *others = (one.layer_frame() for one in self.methods)
        if self.layer_rise is not None:
            zero = zero.assign(layer_rise=self.layer_rise, layer_rise_sem=self.layer_rise_sem)
        return pd.concat([zero, *others], ignore_index=True)

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
            "layers": Table(
                self.layer_frame(),
                "Distribution of the rise over the heads of a layer",
                per="method",
                quiet=("top_share",),
            ),
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
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
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
        progress: Optional progress callback.
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
    methods = [
        single_ablation(predictor, some, Masking(how), progress=progress)
        for how, some in used.items()
    ]
    few = predictor.is_one_attention and predictor.n_heads <= MAX_SUBSET_HEADS
    subsets = ablate_subsets(source, prompts) if few else None
    if predictor.n_layers == 1:
        return Ablations(tuple(methods), subsets)
    layers = range(predictor.n_layers)
    masks = [[head for head in predictor.heads if head[0] == layer] for layer in layers]
    errors = masked_errors(predictor, prompts, [[], *masks])
    return Ablations(tuple(methods), subsets, *mean_and_sem(errors[:, 1:] - errors[:, :1]))
