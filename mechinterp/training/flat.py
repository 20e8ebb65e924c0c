"""Weights as one flat tensor, which the optimizer updates, and as named views of that tensor."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class NamedTensors(Protocol):
    """Weights by name."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copy with these tensors."""


Form = TypeVar("Form", bound=NamedTensors)
"""Type of the trained weights."""


def flattened(weights: NamedTensors) -> Tensor:
    """All weights, concatenated."""
    return torch.cat([tensor.flatten() for tensor in weights.tensors.values()])


def views(flat: Tensor, like: Form) -> Form:
    """Weights that are views of a flat tensor, with the shapes of `like`."""
    return like.with_tensors(views_of(flat, like))


def views_of(flat: Tensor, like: NamedTensors) -> dict[str, Tensor]:
    """Views of a flat tensor, with the names and shapes of `like`."""
    shapes = {name: tensor.shape for name, tensor in like.tensors.items()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def own(weights: Form) -> Form:
    """Copy of weights on the CPU, not changed by later steps."""
    return weights.with_tensors({name: t.cpu().clone() for name, t in weights.tensors.items()})


def require_like(what: str, tensor: Tensor, expected: Tensor) -> None:
    """Refuse a tensor of another dtype or shape."""
    for name in ("dtype", "shape"):
        given, wanted = getattr(tensor, name), getattr(expected, name)
        if given != wanted:
            raise ValueError(f"{what} must have {name} {wanted}, got {given}")
