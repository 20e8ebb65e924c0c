"""The matrices of one layer's attention from tensors under names of the table, [in, out]."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.layout import shown
from mechinterp.checkpoints.foreign.names import ATTENTION, TORCH, TRANSPOSED, Piece
from mechinterp.checkpoints.io.errors import CheckpointError

FULL = {"q": "query", "k": "key", "v": "value", "o": "out"}
HEADS = "heads"
"""Order of a tensor [head, in, out]."""


@dataclass(frozen=True)
class Matrix:
    """A weight [in, out], heads side by side, or a bias [out]."""

    name: str
    """Of the file."""
    tensor: Tensor
    order: str = TORCH
    """The file's axes: one of ORIENTATIONS, or HEADS."""
    n_heads: int | None = None
    """Where it shows them."""
    of: int = 1
    """Of how many such matrices the file has one."""

    def require(self, file: Path, shape: tuple[int, ...]) -> None:
        """Refuse another shape, told as the file has it."""
        if tuple(self.tensor.shape) != shape:
            wanted, got = self._there(shape), self._there(tuple(self.tensor.shape))
            raise CheckpointError(f"{file}: {self.name} must have shape {wanted}, got {got}.")

    def _there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        shape = (*shape[:-1], self.of * shape[-1])
        if self.order == HEADS and self.n_heads is not None:
            axis = 0 if self.name.endswith(("W_O", "out.kernel")) else len(shape) - 1
            inner = tuple(n // self.n_heads if i == axis else n for i, n in enumerate(shape))
            return (self.n_heads, *inner)
        return shape[::-1] if self.order == TORCH else shape


def attention_matrices(
    pieces: Iterable[Piece], tensors: Mapping[str, Tensor], file: Path, axes: str
) -> dict[str, Matrix]:
    """query, key, value and out .weight and .bias of one layer."""
    found: dict[tuple[str, str], dict[int | None, Piece]] = {}
    for piece in pieces:
        if piece.part in ATTENTION:
            heads = found.setdefault((piece.part, piece.kind), {})
            if piece.head in heads:
                names = f"{shown(heads[piece.head].name)} and {shown(piece.name)}"
                raise CheckpointError(f"{file}: {names} stand for the same part.")
            heads[piece.head] = piece
    order = _packed_axes(found, tensors)
    matrices: dict[str, Matrix] = {}
    for (part, kind), heads in found.items():
        whole = _matrix(heads, tensors, file, order=order, axes=axes)
        names = "qk" if part == "qk" else part
        for x, matrix in zip(names, _unpacked(whole, part, kind, file), strict=True):
            name = f"{FULL[x]}.{kind}"
            if name in matrices:
                raise CheckpointError(
                    f"{file}: {matrices[name].name} and {matrix.name} stand for the same part."
                )
            matrices[name] = matrix
    return matrices


def _unpacked(whole: Matrix, part: str, kind: str, file: Path) -> list[Matrix]:
    """The matrices that one tensor holds; of queries and keys in one the keys are the identity."""
    tensor = whole.tensor
    if part == "qk":
        n = len(tensor)
        eye = torch.eye(n, dtype=tensor.dtype).repeat(1, tensor.shape[1] // n)
        return [whole, Matrix(whole.name, eye, whole.order, whole.n_heads)]
    count = len(part)
    if tensor.shape[-1] % count:
        raise CheckpointError(
            f"{file}: {whole.name} must have {count} times as many rows as a head is wide, got {tensor.shape[-1]}."
        )
    return [
        Matrix(whole.name, t, whole.order, whole.n_heads, count) for t in tensor.chunk(count, -1)
    ]


def _matrix(
    heads: Mapping[int | None, Piece],
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    order: str | None,
    axes: str,
) -> Matrix:
    """One part of all heads, [in, heads side by side], or [heads side by side, out] of outputs."""
    first = next(iter(heads.values()))
    turned = {
        h: _turned(p, tensors[p.name], file, order or p.axes or axes) for h, p in heads.items()
    }
    if set(turned) == {None}:
        tensor = turned[None]
        if tensor.ndim == (1 if first.kind == "bias" else 2):
            return Matrix(first.name, tensor, order or first.axes or axes)
    else:
        tensor = _stacked(turned, heads, file)
    n_heads = len(tensor)
    if first.kind == "bias":
        joined = tensor.sum(0) if first.part == "o" else tensor.flatten()
    elif first.part == "o":
        joined = tensor.flatten(0, 1)
    else:
        joined = tensor.transpose(0, 1).flatten(1)
    return Matrix(first.name, joined, HEADS, n_heads)


def _turned(piece: Piece, tensor: Tensor, file: Path, order: str) -> Tensor:
    """A weight as [in, out], a bias as [out], with an axis of heads in front where it has one."""
    if piece.kind == "bias":
        if tensor.ndim not in (1, 2):
            got = tuple(tensor.shape)
            raise CheckpointError(f"{file}: {piece.name} must have one axis, got shape {got}.")
        return tensor
    if tensor.ndim == 3 and piece.head is None and 0 not in tensor.shape:
        if piece.axes == TRANSPOSED:  # flax: [in, head, d_head], and of outputs [head, d_head, out]
            return tensor if piece.part == "o" else tensor.transpose(0, 1)
        return tensor if order == TRANSPOSED else tensor.mT
    if tensor.ndim != 2 or 0 in tensor.shape:
        got = tuple(tensor.shape)
        raise CheckpointError(f"{file}: {piece.name} must be a matrix, got shape {got}.")
    if piece.part == "qk":  # rows of each head are the query's coordinates
        width = tensor.shape[1]
        if len(tensor) % width:
            raise CheckpointError(
                f"{file}: {piece.name} must have {width} rows for each head, got {len(tensor)}."
            )
        return tensor.unflatten(0, (-1, width))
    return tensor.mT if order == TORCH else tensor


def _stacked(
    turned: Mapping[int | None, Tensor], heads: Mapping[int | None, Piece], file: Path
) -> Tensor:
    """One tensor of numbered heads, which must be of one shape."""
    numbers = sorted(h for h in turned if h is not None)
    if numbers != list(range(len(turned))):
        names = ", ".join(piece.name for piece in list(heads.values())[:3])
        raise CheckpointError(f"{file}: heads must be numbered from 0 on, got {names}.")
    for head in numbers:
        if turned[head].shape != turned[0].shape:
            raise CheckpointError(
                f"{file}: {heads[head].name} must have the shape {tuple(turned[0].shape)} of the other heads, got "
                f"{tuple(turned[head].shape)}."
            )
    return torch.stack([turned[head] for head in numbers])


def _packed_axes(
    found: Mapping[tuple[str, str], Mapping[int | None, Piece]], tensors: Mapping[str, Tensor]
) -> str | None:
    """The axes that shapes tell where queries, keys and values are one matrix: a Conv1D of GPT-2 is [in, out]."""
    qkv, out = (found.get((part, "weight"), {}).get(None) for part in ("qkv", "o"))
    if qkv is None or tensors[qkv.name].ndim != 2:
        return None
    rows, columns = tensors[qkv.name].shape
    if out is None or tensors[out.name].ndim != 2:
        return TRANSPOSED if columns == 3 * rows else TORCH if rows == 3 * columns else None
    if rows == 3 * tensors[out.name].shape[1]:
        return TORCH
    return TRANSPOSED if columns == 3 * len(tensors[out.name]) else None
