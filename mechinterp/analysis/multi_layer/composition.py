"""Composition scores: how much of the output of a head later heads read, by their weights and next
to random weights."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import heatmaps
from mechinterp.analysis.random_models import random_models
from mechinterp.display import Result, counted, head_names
from mechinterp.memory import require_memory
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights

INPUTS = ("q", "k", "v")
RANDOM_MODELS = 8


@dataclass(frozen=True, eq=False, repr=False)
class CompositionScores(Result):
    """Fraction of a head's output that the query, key or value of a later head reads, by their
    weights."""

    score: Float[np.ndarray, "input layer head later_layer later_head"]
    """|OV M| / (|OV| |M|), Frobenius norms, between 0 and 1; inputs are q, k, v. NaN if the second
    head is not in a later layer, or if OV or M is zero."""
    random: Float[np.ndarray, " input"]
    """Mean over pairs of heads of `RANDOM_MODELS` models with random initial weights."""
    random_sd: Float[np.ndarray, " input"]
    """Standard deviation of the random scores over pairs of heads."""
    passed_over: str
    """Parts between the heads that the scores ignore, such as norms; empty if there are none."""
    COLUMNS: ClassVar = {
        "random_score": "Score with random initial weights, mean over pairs of heads.",
        "random_score_sd": "Standard deviation of random_score over pairs of heads.",
    }

    def __repr__(self) -> str:
        top: Any = next(self.to_frame().itertuples())
        pairs = counted(int(np.isfinite(self.score).sum()), "pair")
        over = f"; weights alone, {self.passed_over} ignored" if self.passed_over else ""
        return (
            f"CompositionScores({pairs}; largest above random weights: L{top.layer}H{top.head} to {top.input} of "
            f"L{top.later_layer}H{top.later_head} {top.score:.3f} against {top.random_score:.3f} ± {top.random_score_sd:.3f}{over})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per pair of heads and input, the largest excess over random weights first."""
        at = np.nonzero(np.isfinite(self.score))
        names = ("input", "layer", "head", "later_layer", "later_head")
        frame = pd.DataFrame(dict(zip(names, at, strict=True))).assign(
            input=np.array(INPUTS)[at[0]],
            score=self.score[at],
            random_score=self.random[at[0]],
            random_score_sd=self.random_sd[at[0]],
        )
        above = (frame["score"] - frame["random_score"]) / frame["random_score_sd"]
        order = above.sort_values(ascending=False, kind="stable").index
        return frame.loc[order].reset_index(drop=True)

    def plot(self) -> go.Figure:
        """One heatmap per input: rows are writing heads, columns later reading heads; 0 means
        random weights."""
        names, n_heads = head_names(self.score.shape[1:3]), self.score.shape[2]
        above = self.score - self.random[:, None, None, None, None]
        matrices = heatmaps.Matrices(
            above.reshape(3, len(names), len(names))[:, :-n_heads, n_heads:],
            names[:-n_heads],
            names[n_heads:],
            "writes",
            "reads",
            names=[f"into {each}" for each in INPUTS],
        )
        title = "Composition scores above those of random weights"
        return heatmaps.head_heatmaps(matrices, title=title)


def composition_scores(source: Source) -> CompositionScores:
    """How strongly each head writes into the queries, keys and values of later heads, by their
    weights.

    |OV M| / (|OV| |M|) with Frobenius norms; M is the later head's QK (q), QK^T (k) or OV (v). The
    linear part of a norm before the layers, its gain and the removal of the mean, is included.

    Raises:
        ValueError: If the model has one layer, or has no weights of this package.
    Source:
        Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; TransformerLens' all_composition_scores.
    See also:
        `circuits`, `attribute_edges`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> composition_scores(gradient_descent_model([0.5, 0.5], d_x=4)).score.shape
        (3, 2, 1, 2, 1)
    """
    weights = predictor_of(source).weights
    if weights is None:
        raise ValueError(
            "composition_scores needs named weights of this package, got a model without them."
        )
    if weights.n_layers < 2:
        raise ValueError(f"composition_scores needs at least 2 layers, got {weights.n_layers}.")
    random = np.stack([_scores(each) for each in random_models(weights, RANDOM_MODELS)], axis=1)
    axes = tuple(range(1, random.ndim))
    return CompositionScores(
        score=_scores(weights),
        random=np.nanmean(random, axis=axes),
        random_sd=np.nanstd(random, axis=axes, ddof=1),
        passed_over=_passed_over(weights),
    )


def _scores(weights: Weights) -> Float[np.ndarray, "input layer head later_layer later_head"]:
    weights = weights.to("cpu").to(torch.float64)
    n_heads, width = weights.n_layers * weights.n_heads, weights.W_V.shape[2]
    require_memory(8 * 5 * n_heads * width**2, f"circuits of {n_heads} heads of width {width}")
    W_Q, W_K, W_V = (_read_through_norm(weights, name) for name in ("W_Q", "W_K", "W_V"))
    QK, OV = W_Q @ W_K.mT, W_V @ weights.W_O
    scores = torch.stack([_overlap(OV, M) for M in (QK, QK.mT, OV)])
    layer = torch.arange(weights.n_layers, device="cpu")
    later = layer[:, None, None, None] < layer[:, None]
    return scores.where(later, torch.nan).numpy()


def _read_through_norm(weights: Weights, name: str) -> Float[Tensor, "layer head d_model d_head"]:
    """A weight that reads the stream, with the linear part of a norm before it multiplied in."""
    read = getattr(weights, name)
    if weights.model.norm != "before":
        return read
    scaled = weights.tensors["ln1.w"][:, None, :, None] * read
    return scaled if weights.model.rms_norm else scaled - scaled.mean(2, keepdim=True)


def _overlap(
    OV: Float[Tensor, "layer head d_model d_model"], M: Float[Tensor, "later head d_model d_model"]
) -> Float[Tensor, "layer head later head"]:
    norm = torch.linalg.matrix_norm
    # One head at a time, since all products at once may not fit into memory.
    layers = [torch.stack([norm(head @ M) for head in layer]) for layer in OV]
    return torch.stack(layers) / (norm(OV)[:, :, None, None] * norm(M))


def _passed_over(weights: Weights) -> str:
    model = weights.model
    parts = {"layer norms": model.norm is not None, "MLPs": model.d_mlp is not None}
    return " and ".join(name for name, there in parts.items() if there)
