"""Activations and biases as plain functions."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


def plus(values: Tensor, bias: Tensor | None) -> Tensor:
    """The values plus the bias, if there is one."""
    return values if bias is None else values + bias
