"""Attention for autograd: compiled where the kernel knows the score, else tensor operations."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mechinterp.config import ModelConfig
from mechinterp.models.run import general as weights_alone
from mechinterp.models.run.general import Keys, Queries
from mechinterp.training.general.forward import Attention, block_of, is_compiled


def attend(q: Queries, k: Keys, v: Keys, model: ModelConfig, rows: slice) -> Queries:
    """Weighted average of the values for each head and row, from scaled queries, keys and values; rows has the queries' positions.

    Example:
        >>> q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> attend(q, k, k + 1, ModelConfig(context_only=True), slice(-1, None)).flatten()
        tensor([1., 1.])
    """
    if not (model.context_only and is_compiled(model.score, q)):
        return weights_alone.attend_by_patterns(q, k, v, model, rows)
    n_keys = k.shape[1] - (not model.attend_to_self)
    attention = Attention(model.score, model.score_slope, n_keys)
    return _Attended.apply(q, k, v, attention)


class _Attended(torch.autograd.Function):
    """Compiled attention with compiled gradients in queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, attention: Attention) -> Tensor:
        ctx.attention, ctx.n_prompts = attention, len(q)
        ctx.read = attention.forward(*(_prompts_last(each, attention) for each in (q, k, v)))
        return _prompts_first(ctx.read.z, ctx.n_prompts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_z: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty_like(each) for each in (ctx.read.q, ctx.read.k, ctx.read.v)]
        ctx.attention.backward(ctx.read, _prompts_last(d_z, ctx.attention), *gradients)
        return *(_prompts_first(each, ctx.n_prompts) for each in gradients), None


def _prompts_last(heads: Tensor, attention: Attention) -> Tensor:
    """[head, feature, row, prompt], padded with zero prompts to whole blocks of the kernel."""
    fill = -len(heads) % block_of(attention.score, heads)
    return pad(heads.permute(2, 3, 1, 0), (0, fill)).contiguous()


def _prompts_first(heads: Tensor, n_prompts: int) -> Tensor:
    return heads[..., :n_prompts].permute(3, 2, 0, 1)
