"""Activations, layer norm and biases as plain functions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def layer_norm(
    stream: Float[Tensor, "*axes d_model"],
    w: Float[Tensor, " d_model"],
    b: Float[Tensor, " d_model"],
    *,
    eps: float,
) -> Float[Tensor, "*axes d_model"]:
    """(x - mean) / sqrt(variance + eps) * w + b, over the stream's entries.

    Example:
        >>> layer_norm(torch.tensor([1.0, 3.0]), torch.ones(2), torch.zeros(2), eps=0.0)
        tensor([-1.,  1.])
    """
    return F.layer_norm(stream, w.shape, w, b, eps)


def plus(values: Tensor, bias: Tensor | None) -> Tensor:
    """The values with a bias added, if there is one."""
    return values if bias is None else values + bias
