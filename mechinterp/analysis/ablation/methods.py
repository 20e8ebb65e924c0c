"""Head ablation by every method, and every subset of heads where the model is one layer of attention."""

from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.ablation.single import HeadAblation, ablate_heads
from mechinterp.analysis.ablation.subsets import MAX_SUBSET_HEADS, SubsetAblation, ablate_subsets
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import METHODS
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress


@dataclass(frozen=True, eq=False, repr=False)
class Ablations(Result):
    """Single heads masked by each method, and subsets of heads."""

    methods: tuple[HeadAblation, ...]
    """One for each way to mask a head, zero ablation first."""
    subsets: SubsetAblation | None
    """None of a model of several layers, or of too many heads."""

    def __repr__(self) -> str:
        return f"Ablations({', '.join(map(repr, self.methods))})"

    def to_frame(self) -> pd.DataFrame:
        """One row per method and head."""
        return pd.concat([one.to_frame() for one in self.methods], ignore_index=True)

    def layer_frame(self) -> pd.DataFrame:
        """One row per method and layer."""
        return pd.concat([one.layer_frame() for one in self.methods], ignore_index=True)

    def plot(self) -> go.Figure:
        """Rise of the excess risk under zero ablation."""
        return self.methods[0].plot()


def ablate(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Ablations:
    """Rise of the excess risk when heads are masked: each alone by every method, and every subset in one layer.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are fewer than four prompts.
    Example:
        >>> from mechinterp import load
        >>> [one.method for one in ablate(load("checkpoints/softmax-h2-s0"), n_prompts=64).methods]
        ['zero', 'mean', 'resample']
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    even = prompts[: len(prompts) - len(prompts) % 2]  # they swap in pairs
    methods = [
        ablate_heads(source, even if how == "resample" else prompts, method=how, progress=progress)
        for how in METHODS
    ]
    return Ablations(tuple(methods), subsets_where_possible(source, prompts))


def subsets_where_possible(source: Source, prompts: Prompts) -> SubsetAblation | None:
    """Every subset of the heads of one layer of attention; None of more layers, or of too many heads."""
    predictor = predictor_of(source)
    if not predictor.is_one_attention or predictor.n_heads > MAX_SUBSET_HEADS:
        return None
    return ablate_subsets(source, prompts)
