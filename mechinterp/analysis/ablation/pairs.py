"""Ablation of two heads at once: pairs that need or replace each other."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.display import Result, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of


@dataclass(frozen=True, eq=False, repr=False)
class PairAblation(Result):
    """How much more, or less, it costs to mask two heads together than one after the other."""

    names: tuple[str, ...]
    """L0H0, L0H1, ...: the heads along both axes."""
    rise: Float[np.ndarray, "head head"]
    """Excess risk with both masked minus that of the full model, unit y^2; a head alone on the diagonal."""
    rise_sem: Float[np.ndarray, "head head"]
    interaction: Float[np.ndarray, "head head"]
    """rise(a, b) - rise(a) - rise(b): above 0 for heads that replace each other, below 0 for heads that
    only work together; 0 on the diagonal."""
    interaction_sem: Float[np.ndarray, "head head"]
    """Standard errors, paired over prompts."""

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
            unit="y²",
        )


def ablate_pairs(
    source: Source,
    prompts: Prompts | None = None,
    *,
    method: str = "zero",
    n_prompts: int | None = None,
    seed: int = 0,
) -> PairAblation:
    """Rise of the excess risk when every two heads of a model are masked together, and their interaction.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        method: As in `ablate_heads`.
    Raises:
        ValueError: If the method is unknown, or prompts are to be swapped and odd in number.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 512, generator=generator_for(0, "eval", 0))
        >>> ablate_pairs(load("checkpoints/softmax-h2-s0").model, prompts).names
        ('L0H0', 'L0H1')
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    heads = predictor_of(source).heads
    masks = [[], *map(list, combinations_with_replacement(heads, 2))]
    errors = masked_errors(source, prompts, masks, method=method)
    one, other = np.triu_indices(len(heads))
    rises = np.zeros((len(errors), len(heads), len(heads)))
    rises[:, one, other] = rises[:, other, one] = errors[:, 1:] - errors[:, :1]
    alone = rises.diagonal(axis1=1, axis2=2)
    # A head masked twice is masked once.
    apart = (alone[:, :, None] + alone[:, None]) * (1 - np.eye(len(heads)))
    apart += alone[:, :, None] * np.eye(len(heads))
    names = tuple(f"L{layer}H{head}" for layer, head in heads)
    return PairAblation(names, *mean_and_sem(rises), *mean_and_sem(rises - apart))
