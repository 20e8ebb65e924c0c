"""Entropy of each head's attention weights over the tokens that the query reads."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures
from mechinterp.analysis.number_format import cell, digits, with_error
from mechinterp.analysis.random_models import random_models
from mechinterp.analysis.stats import estimates, mean_and_sem
from mechinterp.display import Result, frame_of, head_axes, head_names, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Predictor, Source, predictor_of

RANDOM_MODELS, RANDOM_PROMPTS = 8, 64
ROUNDING = 1e-3
"""Largest deviation of the sum of the weights from 1 that counts as rounding (half precision)."""


@dataclass(frozen=True, eq=False, repr=False)
class AttentionEntropy(Result):
    """Entropy of the query's attention, by head."""

    entropy: Float[np.ndarray, "layer head"]
    """Mean over prompts of -sum_l p_l log p_l, in nats."""
    entropy_sem: Float[np.ndarray, "layer head"]
    """Standard error of `entropy` over prompts."""
    uniform_entropy: Float[np.ndarray, " layer"]
    """log of the number of keys, the entropy of uniform attention, in nats."""
    random_entropy: Float[np.ndarray, " layer"]
    """Entropy of the same layer with random weights: mean over heads and `RANDOM_MODELS` models, in
    nats. NaN if the architecture is unknown."""
    random_entropy_sd: Float[np.ndarray, " layer"]
    """Standard deviation of `random_entropy` over heads and models."""

    def __repr__(self) -> str:
        layer, head = np.unravel_index(self.entropy.argmin(), self.entropy.shape)
        least = f"{self.entropy[layer, head]:.3g} ± {self.entropy_sem[layer, head]:.2g} nats"
        return (
            f"AttentionEntropy({self.entropy.size} heads; least L{layer}H{head} {least}, "
            f"uniform attention {self.uniform_entropy[layer]:.3g})"
        )

    def sentences(self) -> list[str]:
        """Heads with the smallest and the largest entropy, next to uniform attention."""
        heads = []
        for which in (self.entropy.argmin(), self.entropy.argmax()):
            at = np.unravel_index(int(which), self.entropy.shape)
            heads.append(
                f"L{at[0]}H{at[1]}, {with_error(self.entropy[at], self.entropy_sem[at])} nats (uniform attention: "
                f"{digits(self.uniform_entropy[at[0]])}; random weights: {cell(self.random_entropy[at[0]])})"
            )
        return [f"Smallest entropy of attention: {heads[0]}. Largest: {heads[1]}."]

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        beside = ("uniform_entropy", "random_entropy", "random_entropy_sd")
        return frame_of(self, *with_sem("entropy"), *beside, **head_axes(self.entropy))

    def plot(self) -> go.Figure:
        """Entropy of every head next to that of random weights; the dotted line is uniform
        attention."""
        frame = self.to_frame()
        columns = {"model": ["entropy", "entropy_sem"]}
        if np.isfinite(self.random_entropy).all():
            columns["random weights"] = ["random_entropy", "random_entropy_sd"]
        figure = figures.bars(
            head_names(self.entropy.shape),
            {name: tuple(frame[both].to_numpy().T) for name, both in columns.items()},
            title="Entropy of the query's attention; dotted: uniform attention",
            y_title="entropy (nats)",
        )
        for level in np.unique(self.uniform_entropy):
            figure.add_hline(float(level), line_dash="dot", line_width=1)
        return figure


def attention_entropy(
    source: Source, prompts: Prompts | None = None, *, n_prompts: int | None = None, seed: int = 0
) -> AttentionEntropy:
    """Entropy of each head's attention from the query, next to uniform attention and random initial
    weights.

    H = -sum_l p_l log p_l. It is log L for uniform attention over L keys, and 0 if one key has all
    the weight.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs.
    Raises:
        ValueError: If the weights are negative or do not sum to 1 (linear attention), or the model
            has no hooks on its patterns.
    Source:
        Shannon's entropy; the comparison with random weights is a choice made here.
    See also:
        `attention_patterns`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import kernel_head
        >>> attention_entropy(kernel_head(omega=0.0, mu=1.0, d_x=5), n_prompts=8)
        AttentionEntropy(1 heads; least L0H0 3.69 ± 0 nats, uniform attention 3.69)
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    predictor = predictor_of(source)
    patterns = predictor.query_patterns(prompts).double()
    _require_distribution(patterns)
    entropy = mean_and_sem(_entropy(patterns).transpose(0, 1).numpy(force=True))
    n_keys = patterns.any(2).any(1).sum(1)
    random = _at_random(predictor, prompts[:RANDOM_PROMPTS])
    return AttentionEntropy(
        **estimates(entropy=entropy),
        uniform_entropy=n_keys.double().log().numpy(force=True),
        random_entropy=random.mean((0, 2)),
        random_entropy_sd=random.std((0, 2), ddof=1),
    )


def _entropy(
    patterns: Float[Tensor, "layer prompt head key"],
) -> Float[Tensor, "layer prompt head"]:
    return -torch.xlogy(patterns, patterns).sum(-1)


def _require_distribution(patterns: Float[Tensor, "layer prompt head key"]) -> None:
    least, totals = patterns.min().item(), patterns.sum(-1)
    furthest = (totals - 1).abs().max().item()
    if not (least >= 0 and furthest <= ROUNDING):
        got = f"a weight of {least:.3g}" if least < 0 else f"a sum 1 ± {furthest:.3g}"
        raise ValueError(
            f"attention_entropy needs attention weights >= 0 that add up to 1, got {got}."
        )


def _at_random(predictor: Predictor, prompts: Prompts) -> Float[np.ndarray, "model layer head"]:
    """Mean entropies of models of the same shape with random initial weights; NaN if the shape is
    unknown."""
    if predictor.weights is None:
        return np.full((2, predictor.n_layers, predictor.n_heads), np.nan)
    drawn = prompts.to("cpu").to(torch.float32)
    models = random_models(predictor.weights, RANDOM_MODELS)
    patterns = [predictor_of(model).query_patterns(drawn) for model in models]
    return torch.stack([_entropy(each).mean(1) for each in patterns]).double().numpy(force=True)
