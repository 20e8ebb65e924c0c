"""Activations, biases, norms and rotary positions as plain functions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ModelConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def affine(
    values: Float[Tensor, "*axes d_in"], W: Float[Tensor, "d_in d_out"], b: Tensor | None
) -> Float[Tensor, "*axes d_out"]:
    """values W + b."""
    return F.linear(values, W.mT, b)


def normed(
    stream: Float[Tensor, "*axes d_model"],
    w: Float[Tensor, " d_model"],
    b: Float[Tensor, " d_model"],
    model: ModelConfig,
) -> Float[Tensor, "*axes d_model"]:
    """The stream after a layer norm or a root-mean-square norm, with weights and biases."""
    if model.rms_norm:
        return F.rms_norm(stream, w.shape, w, model.norm_eps) + b
    return F.layer_norm(stream, w.shape, w, b, model.norm_eps)


def rotated(
    heads: Float[Tensor, "*batch pos head d_head"],
    model: ModelConfig,
    *,
    first: int = 0,
    step: int = 1,
) -> Float[Tensor, "*batch pos head d_head"]:
    """Queries or keys rotated by their positions; unchanged without rotary positions.

    Entry pair i, with i < rotary_dim/2, is rotated by the angle position / rotary_base^(2i / rotary_dim), as in
    HookedTransformer. Entries beyond rotary_dim are unchanged.

    Args:
        first: Position of the first row.
        step: Number of positions from row to row.
    Source:
        Su et al. 2021, arXiv 2104.09864, section 3.2.
    """
    n = model.rotary_dim
    if n is None:
        return heads
    end = first + step * heads.shape[-3]
    at = torch.arange(first, end, step, dtype=torch.float64, device=heads.device)
    turns = model.rotary_base ** (-torch.arange(0, n, 2, dtype=at.dtype, device=at.device) / n)
    angle = at[:, None, None] * turns  # [pos, 1, pair]
    cos, sin = angle.cos().to(heads), angle.sin().to(heads)
    axes, pair = ((-1, 2), -1) if model.rotary_adjacent_pairs else ((2, -1), -2)
    one, other = heads[..., :n].unflatten(-1, axes).unbind(pair)
    turned = torch.stack([one * cos - other * sin, other * cos + one * sin], pair).flatten(-2)
    return torch.cat([turned, heads[..., n:]], -1)
