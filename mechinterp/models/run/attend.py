"""Weighted averages of values by attention, from queries and keys, for every score function."""

from collections.abc import Callable

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mechinterp.config import ModelConfig
from mechinterp.config.model import LINEAR, OVER_PAIRS
from mechinterp.models.layers import AVERAGE, SCORE_PRODUCTS, attention_pattern, readable_keys

MOMENT = "batch key head i, batch key head j -> batch head i j"
FROM_MOMENT = "batch row head i, batch head i j -> batch row head j"
Queries = Float[Tensor, "batch row head d"]
Keys = Float[Tensor, "batch key head d"]
Attend = Callable[[Queries, Keys, Keys, ModelConfig, slice], Queries]
"""Attention function: maps scaled queries, keys and values to the weighted averages. The slice has the positions of the
queries."""


def attend(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
    """Weighted average of the values for each head and row, by torch's own kernel where that is possible."""
    n_keys = k.shape[1] - (model.context_only and not model.attend_to_self)
    if can_fuse(model, n_keys):
        reads = None if model.context_only else readable_keys(n_keys, model, device=k.device)[rows]
        return fused_softmax(q, k[:, :n_keys], v[:, :n_keys], reads)
    return attend_by_patterns(q, k, v, model, rows)


def attend_by_patterns(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
    """Weighted average of the values for each head and row, by operations that torch.func maps and differentiates."""
    if model.score in LINEAR and model.context_only:
        # q (k^T v): no attention weights are needed.
        keys, n_pairs = slice(0, None if model.attend_to_self else -1), k.shape[1] - 1
        k, v = k[:, keys], v[:, keys]
        number = {"linear": 1, "linear/L": k.shape[1], OVER_PAIRS: n_pairs}[model.score]
        factor = model.score_slope / max(number, 1)
        return einsum(q, factor * einsum(k, v, MOMENT), FROM_MOMENT)
    pattern = pattern_of(q, k, model, rows)
    return einsum(pattern, v, AVERAGE)


def can_fuse(model: ModelConfig, n_keys: int) -> bool:
    """True for softmax attention without gradients in which every row reads a key (torch's attention gives NaN without
    one, and has no second derivative)."""
    every_row = n_keys > 0 and (model.context_only or model.attend_to_self)
    return model.score == "softmax" and every_row and not torch.is_grad_enabled()


def fused_softmax(q: Queries, k: Keys, v: Keys, reads: Tensor | None = None) -> Queries:
    """Softmax attention of scaled queries by torch's own kernel; `reads` [row, key] is True for readable keys, None: all."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=reads, scale=1.0).transpose(1, 2)


def scores_of(
    q: Queries, k: Keys, model: ModelConfig, rows: slice
) -> Float[Tensor, "batch head row key"]:
    """Scores of scaled queries on keys, -inf where masked."""
    scores = einsum(q, k, SCORE_PRODUCTS)
    reads = readable_keys(k.shape[1], model, device=scores.device)
    return scores.masked_fill(~reads[rows], -torch.inf)


def pattern_of(
    q: Queries, k: Keys, model: ModelConfig, rows: slice
) -> Float[Tensor, "batch head row key"]:
    """Attention weights of scaled queries on keys."""
    scores = scores_of(q, k, model, rows)
    return attention_pattern(scores, score=model.score, slope=model.score_slope)
