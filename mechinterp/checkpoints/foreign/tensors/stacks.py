"""Layers that JAX files stack on the first axis of each tensor."""

import re
from collections.abc import Mapping

from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.names import (
    ATTENTION,
    COMPLETE,
    ENDS,
    Piece,
    Tensors,
    piece_of,
)

KERNELS = ("kernel", "w")


def unstacked(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors, with `layers.0.`, `layers.1.` and so on in place of the container whose tensors are stacked.

    JAX files stack layers on a first axis (flax's nn.scan, haiku's layer_stack). Names and axes show it: a norm has two axes, or a matrix has one more than a layer's.

    Raises:
        ValueError: If the stacked tensors include a read-in or read-out, so that they are several models.
    Example:
        >>> import torch
        >>> stacked = {f"net.attn.{x}.kernel": torch.zeros(2, 4, 2, 2) for x in ("query", "key", "value")}
        >>> list(unstacked(stacked))[:2]
        ['layers.0.net.attn.query.kernel', 'layers.1.net.attn.query.kernel']
    """
    words = {name: re.split("[./]", name) for name in tensors}
    pieces = {name: piece for name in tensors if (piece := piece_of(name)) is not None}
    depth = max(map(len, words.values()), default=0)
    containers = dict.fromkeys(
        tuple(w[:n]) for n in range(depth) for w in words.values() if len(w) > n
    )
    for path in containers:
        inside = {n: t for n, t in tensors.items() if tuple(words[n][: len(path)]) == path}
        own = {name: piece for name, piece in pieces.items() if name in inside}
        if not _is_stack(inside, own):
            continue
        if ends := [name for name, piece in own.items() if piece.part in ENDS]:
            count = len(inside[ends[0]])
            raise ValueError(
                f"must hold one model, got {count} on the first axis of all tensors; write one of them."
            )
        named = {
            ".".join((*path[:-1], "layers", str(number), *words[name][len(path) :])): each
            for name, tensor in inside.items()
            for number, each in enumerate(tensor)
        }
        return {n: tensor for n, tensor in tensors.items() if n not in inside} | named
    return dict(tensors)


def _is_stack(tensors: Tensors, pieces: Mapping[str, Piece]) -> bool:
    """True if all have one first axis, and axes show that it counts layers of attention."""
    parts = {piece.part for piece in pieces.values()}
    if not any(each <= parts for each in COMPLETE) or any(
        p.layer is not None for p in pieces.values()
    ):
        return False
    if len({tensor.shape[:1] for tensor in tensors.values()}) > 1:
        return False
    return any(
        tensors[name].ndim > (3 if piece.part in ATTENTION else 2 if name.endswith(KERNELS) else 1)
        for name, piece in pieces.items()
        if name.endswith((*KERNELS, "scale"))
    )
