"""Weights as one flat tensor, which the optimizer updates, and as named views of that tensor."""

from typing import TypeVar

import torch
from torch import Tensor

from mechinterp.models.heads import AttentionWeights
from mechinterp.models.weights import Weights

Form = TypeVar("Form", Weights, AttentionWeights)
"""Type of the trained weights."""


def flattened(weights: Weights | AttentionWeights) -> Tensor:
    """All weights, concatenated."""
    return torch.cat([tensor.flatten() for tensor in weights.tensors.values()])


def views(flat: Tensor, like: Form) -> Form:
    """Weights that are views of a flat tensor, with the shapes of `like`."""
    shapes = {name: tensor.shape for name, tensor in like.tensors.items()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return like.with_tensors(
        {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    )


def own(weights: Form) -> Form:
    """Copy of weights on the CPU, not changed by later steps."""
    return weights.with_tensors({name: t.cpu().clone() for name, t in weights.tensors.items()})


def require_like(what: str, tensor: Tensor, expected: Tensor) -> None:
    """Refuse a tensor of another dtype or shape."""
    for name in ("dtype", "shape"):
        given, wanted = getattr(tensor, name), getattr(expected, name)
        if given != wanted:
            raise ValueError(f"{what} must have {name} {wanted}, got {given}")
