"""Weights and biases of attention in one layer, as matrices [in, out] with heads side by side."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.names import (
    ATTENTION,
    TORCH,
    TRANSPOSED,
    Piece,
    Tensors,
    name_of,
    shown,
)
from mechinterp.checkpoints.foreign.tensors.refusals import TensorError


@dataclass(frozen=True)
class Matrix:
    """A weight [in, out] with heads side by side, or a bias [out]."""

    name: str
    """Name in the file."""
    tensor: Tensor
    n_heads: int | None = None
    """Number of heads, if the shape shows it."""
    packed: bool = False
    """True: the file has it in one tensor with others, such as a qkv matrix."""


def attention_matrices(pieces: Iterable[Piece], tensors: Tensors, axes: str) -> dict[str, Matrix]:
    """Weights and biases of attention in one layer, by their names in `Weights`; all heads side by side."""
    grouped: dict[tuple[str, str], dict[int | None, Piece]] = {}
    for piece in pieces:
        if piece.part in ATTENTION:
            heads = grouped.setdefault((piece.part, piece.kind), {})
            require_first(heads.get(piece.head), piece)
            heads[piece.head] = piece
    order = _packed_axes(grouped, tensors)
    matrices: dict[str, Matrix] = {}
    for (part, kind), heads in grouped.items():
        whole = _matrix(heads, tensors, order, axes)
        for x, matrix in zip(part, _unpacked(whole, part), strict=True):
            name = name_of(x, kind)
            require_first(matrices.get(name), matrix)
            matrices[name] = matrix
    return matrices


def require_first(one: Piece | Matrix | None, other: Piece | Matrix) -> None:
    """Refuse a second tensor for a part."""
    if one is not None:
        raise TensorError(one.name, f"and {shown(other.name)} stand for the same part")


def _unpacked(whole: Matrix, part: str) -> list[Matrix]:
    """Matrices that are packed in one tensor; for a merged QK the keys are the identity."""
    tensor, count = whole.tensor, len(part)
    if part == "qk":
        n = len(tensor)
        eye = torch.eye(n, dtype=tensor.dtype, device=tensor.device).repeat(1, tensor.shape[1] // n)
        return [whole, replace(whole, tensor=eye)]
    if tensor.shape[-1] % count:
        rule = f"must have {count} times as many rows as a head is wide, got {tensor.shape[-1]}"
        raise TensorError(whole.name, rule, offer=False)
    return [replace(whole, tensor=each, packed=count > 1) for each in tensor.chunk(count, -1)]


def _matrix(
    heads: Mapping[int | None, Piece], tensors: Tensors, order: str | None, axes: str
) -> Matrix:
    """One part of all heads, [in, heads side by side], or [heads side by side, out] for outputs."""
    first = next(iter(heads.values()))
    turned = {h: _turned(p, tensors[p.name], order or p.axes or axes) for h, p in heads.items()}
    if set(turned) == {None}:
        tensor = turned[None]
        if tensor.ndim == (1 if first.kind == "bias" else 2):
            return Matrix(first.name, tensor)
    else:
        tensor = _stacked(turned, heads)
    if first.part == "o":
        joined = tensor.sum(0) if first.kind == "bias" else tensor.flatten(0, 1)
    else:
        joined = tensor.movedim(0, -2).flatten(-2)
    return Matrix(first.name, joined, len(tensor))


def _turned(piece: Piece, tensor: Tensor, order: str) -> Tensor:
    """A weight as [in, out], a bias as [out], with a first axis of heads if there is one."""
    got = tuple(tensor.shape)
    if piece.kind == "bias":
        if tensor.ndim not in (1, 2):
            raise TensorError(piece.name, f"must have one axis, got shape {got}")
        return tensor
    if tensor.ndim == 3 and piece.head is None and 0 not in tensor.shape:
        # flax: [in, head, d_head], and [head, d_head, out] for outputs
        if piece.axes == TRANSPOSED:
            return tensor if piece.part == "o" else tensor.transpose(0, 1)
        return tensor if order == TRANSPOSED else tensor.mT
    require_matrix(piece.name, tensor)
    if piece.part == "qk":  # rows of each head are the query's coordinates
        rows, width = got
        if rows % width:
            raise TensorError(piece.name, f"must have {width} rows for each head, got {rows}")
        return tensor.unflatten(0, (-1, width))
    return tensor.mT if order == TORCH else tensor


def require_matrix(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not a matrix, or is empty."""
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise TensorError(name, f"must be a matrix, got shape {tuple(tensor.shape)}")


def _stacked(turned: Mapping[int | None, Tensor], heads: Mapping[int | None, Piece]) -> Tensor:
    """Numbered heads as one tensor; all must have one shape."""
    numbers = sorted(h for h in turned if h is not None)
    if numbers != list(range(len(turned))):
        names = ", ".join(shown(piece.name) for piece in list(heads.values())[:3])
        raise TensorError("heads", f"must be numbered from 0 on, got {names}")
    for head in numbers:
        wanted, got = tuple(turned[0].shape), tuple(turned[head].shape)
        if got != wanted:
            rule = f"must have the shape {wanted} of the other heads, got {got}"
            raise TensorError(heads[head].name, rule)
    return torch.stack([turned[head] for head in numbers])


def _packed_axes(
    grouped: Mapping[tuple[str, str], Mapping[int | None, Piece]], tensors: Tensors
) -> str | None:
    """Order of axes if queries, keys and values are one matrix, by its shape; a Conv1D of GPT-2 is
    [in, out]."""
    qkv, out = (grouped.get((part, "weight"), {}).get(None) for part in ("qkv", "o"))
    if qkv is None or tensors[qkv.name].ndim != 2:
        return None
    rows, columns = tensors[qkv.name].shape
    if out is None or tensors[out.name].ndim != 2:
        return TRANSPOSED if columns == 3 * rows else TORCH if rows == 3 * columns else None
    if rows == 3 * tensors[out.name].shape[1]:
        return TORCH
    return TRANSPOSED if columns == 3 * len(tensors[out.name]) else None
