"""The matrices of one layer's attention from tensors under names of the table, brought to torch.nn.Linear's [out, in]."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.names import ATTENTION, TORCH, TRANSPOSED, Piece

Part = Mapping[int | None, tuple[Piece, Tensor]]
"""What stands for one part of the attention by head; None where it is of all heads."""
FULL = {"q": "query", "k": "key", "v": "value", "o": "out"}


def attention_matrices(
    pieces: Iterable[Piece], tensors: Mapping[str, Tensor], file: Path, *, axes: str = TORCH
) -> tuple[dict[str, Tensor], int | None]:
    """query, key, value and out .weight [out, in] and .bias of one layer, and its number of heads if it shows.

    Args:
        axes: One of ORIENTATIONS, where the names do not say it.
    Raises:
        CheckpointError: If the matrices do not fit together.
    """
    found = _by_part(pieces, tensors, file)
    packed = _packed_axes(found)
    n_heads: int | None = None
    matrices: dict[tuple[str, str], Tensor] = {}
    for (part, kind), heads in found.items():
        turned = {h: _turned(p, t, axes, packed, file) for h, (p, t) in heads.items()}
        first = next(iter(turned.values()))
        whole = set(turned) == {None}
        if whole and first.ndim < 3:
            matrices[part, kind] = first
            continue
        stacked = first if whole else _stacked(turned, heads, file)
        if n_heads not in (None, len(stacked)):
            raise CheckpointError(
                f"{file}: {next(iter(heads.values()))[0].name} must have {n_heads} heads, got "
                f"{len(stacked)}; grouped or multi-query attention is not read."
            )
        n_heads = len(stacked)
        matrices[part, kind] = stacked.flatten(0, 1)
        if part == "o":  # heads write side by side, and their biases add up
            matrices[part, kind] = (
                stacked.transpose(0, 1).flatten(1) if kind == "weight" else stacked.sum(0)
            )
    return _unpacked(matrices, found, file), n_heads


def _by_part(
    pieces: Iterable[Piece], tensors: Mapping[str, Tensor], file: Path
) -> dict[tuple[str, str], Part]:
    found: dict[tuple[str, str], dict[int | None, tuple[Piece, Tensor]]] = {}
    for piece in pieces:
        if piece.part in ATTENTION:
            heads = found.setdefault((piece.part, piece.kind), {})
            if piece.head in heads:
                other = heads[piece.head][0].name
                raise CheckpointError(f"{file}: {other} and {piece.name} stand for the same part.")
            heads[piece.head] = (piece, tensors[piece.name])
    return {key: dict(heads) for key, heads in found.items()}


def _stacked(turned: Mapping[int | None, Tensor], heads: Part, file: Path) -> Tensor:
    """One tensor of numbered heads, which must be of one shape."""
    numbers = sorted(h for h in turned if h is not None)
    if numbers != list(range(len(turned))):
        names = ", ".join(piece.name for piece, _ in list(heads.values())[:3])
        raise CheckpointError(f"{file}: heads must be numbered from 0 on, got {names}.")
    for head in numbers:
        if turned[head].shape != turned[0].shape:
            raise CheckpointError(
                f"{file}: {heads[head][0].name} must have the shape {tuple(turned[0].shape)} of the other heads, got "
                f"{tuple(turned[head].shape)}."
            )
    return torch.stack([turned[head] for head in numbers])


def _packed_axes(found: Mapping[tuple[str, str], Part]) -> str | None:
    """The axes that shapes tell where queries, keys and values are one matrix: a Conv1D of GPT-2 is [in, out]."""
    qkv, out = (found.get((part, "weight"), {}).get(None) for part in ("qkv", "o"))
    if qkv is None or qkv[1].ndim != 2:
        return None
    rows, columns = qkv[1].shape
    if out is None or out[1].ndim != 2:
        return TRANSPOSED if columns == 3 * rows else TORCH if rows == 3 * columns else None
    if rows == 3 * out[1].shape[1]:
        return TORCH
    return TRANSPOSED if columns == 3 * out[1].shape[0] else None


def _turned(piece: Piece, tensor: Tensor, axes: str, packed: str | None, file: Path) -> Tensor:
    """A tensor as [out, in], with an axis of heads in front where it has one."""
    if piece.kind == "bias":
        if tensor.ndim not in (1, 2):
            raise CheckpointError(
                f"{file}: {piece.name} must have one axis, got shape {tuple(tensor.shape)}."
            )
        return tensor.flatten()
    order = packed or piece.axes or axes
    if tensor.ndim == 3 and piece.head is None and 0 not in tensor.shape:
        if piece.axes == TRANSPOSED and piece.part != "o":  # flax: [in, head, d_head]
            return tensor.permute(1, 2, 0)
        if piece.axes == TRANSPOSED:  # and [head, d_head, out]
            return tensor.mT
        return tensor.mT if order == TRANSPOSED else tensor
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise CheckpointError(
            f"{file}: {piece.name} must be a matrix, got shape {tuple(tensor.shape)}."
        )
    return tensor.mT if order == TRANSPOSED else tensor


def _unpacked(
    matrices: Mapping[tuple[str, str], Tensor],
    found: Mapping[tuple[str, str], Part],
    file: Path,
) -> dict[str, Tensor]:
    """The matrices by query, key, value and out."""
    parts: dict[tuple[str, str], Tensor] = {}
    for (part, kind), matrix in matrices.items():
        if part not in ("qkv", "kv"):
            parts[part, kind] = matrix
            continue
        if len(matrix) % len(part):
            name = next(iter(found[part, kind].values()))[0].name
            raise CheckpointError(
                f"{file}: {name} must have {len(part)} times as many rows as a head is wide, got {len(matrix)}."
            )
        for x, rows in zip(part, matrix.chunk(len(part)), strict=True):
            parts[x, kind] = rows
    if ("o", "weight") in parts:
        queries, keys, values = (len(parts[x, "weight"]) for x in "qkv")
        require_full_keys(queries, keys, values, file)
    return {f"{FULL[part]}.{kind}": matrix.contiguous() for (part, kind), matrix in parts.items()}


def require_full_keys(queries: int, keys: int, values: int, file: Path) -> None:
    """Refuse keys or values of fewer rows than the queries, which several heads share.

    Raises:
        CheckpointError: If there are fewer.
    """
    if 0 < min(keys, values) < queries and queries % min(keys, values) == 0:
        raise CheckpointError(
            f"{file}: keys and values must be as wide as queries; grouped or multi-query attention is not read: got "
            f"{queries} rows of queries, {keys} of keys, {values} of values."
        )
