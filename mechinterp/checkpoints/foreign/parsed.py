"""The tensors of a file by what they are: attention, norms, MLPs and the ways in and out, matrices [in, out].

Shapes are held against each other here, in the file's own names and order of axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.heads import (
    number_of_heads,
    require_attention,
    require_full_keys,
    whole_tokens,
)
from mechinterp.checkpoints.foreign.layout import Layout, shown
from mechinterp.checkpoints.foreign.matrices import Matrix, attention_matrices
from mechinterp.checkpoints.foreign.names import ATTENTION, TORCH, TRANSPOSED, Piece
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.headers import require_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Parts:
    """The tensors of a file by what they are."""

    layers: tuple[dict[str, Tensor], ...]
    """Per layer query, key, value, out, mlp_in, mlp_out, norm1, norm2 .weight and .bias, those that are there."""
    ends: dict[str, Tensor]
    n_heads: int
    merged: bool = False
    """Whether a head has one matrix in place of queries and keys."""
    biases: bool = False
    """Whether there are biases besides those of norms, in attention alone such that are not zero."""

    @property
    def width(self) -> int:
        """Width of the stream."""
        return len(self.layers[0]["query.weight"])

    @property
    def d_head(self) -> int:
        """Width of the queries of a head of the first layer."""
        return self.layers[0]["query.weight"].shape[1] // self.n_heads

    @property
    def written(self) -> int:
        """Entries that a token has behind the last layer."""
        last = self.layers[-1]
        name = next(n for n in ("mlp_out", "out", "value") if f"{n}.weight" in last)
        return last[f"{name}.weight"].shape[1] // (self.n_heads if name == "value" else 1)

    @property
    def d_token(self) -> int:
        """Entries of a token that are read."""
        first = self.ends.get("read_mlp.weight", self.ends.get("read_in.weight"))
        return self.width if first is None else len(first)

    def has(self, name: str) -> bool:
        """Whether every layer has a part, or the ends have it."""
        return name in self.ends or all(name in layer for layer in self.layers)

    @property
    def alone(self) -> bool:
        """Whether there is nothing but one layer of attention."""
        around = self.has("norm1.weight") or self.has("mlp_in.weight") or self.ends
        return len(self.layers) == 1 and not around


def parts_of(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    file: Path,
    *,
    axes: str,
    hints: Hints,
    settings: Mapping[str, object],
    wide_heads: bool = False,
) -> Parts:
    """The tensors of a file, sorted and held against each other.

    Args:
        axes: One of ORIENTATIONS, for matrices whose names do not say it.
        wide_heads: Whether the queries of a head are as wide as a token.
    Raises:
        CheckpointError: If shapes do not fit together, a part has no place here, or the number of heads is not known.
    """
    for piece in layout.pieces:
        require_numbers(tensors[piece.name], f"{file}: {shown(piece.name)}")
    _require_all_layers(layout, file)
    found = [attention_matrices(pieces, tensors, file, axes) for pieces in layout.layers]
    stated = [n for matrices in found for each in matrices.values() if (n := each.n_heads)]
    shown_heads = stated[0] if stated else None
    if wide_heads:
        query = found[0]["query.weight"]
        shown_heads = whole_tokens(query, len(query.tensor), file)
    require_full_keys(found[0], file)
    n_heads = number_of_heads(found[0], file, hints, settings, shown_heads)
    layers: list[dict[str, Tensor]] = []
    width = len(found[0]["query.weight"].tensor)
    for pieces, matrices in zip(layout.layers, found, strict=True):
        require_attention(matrices, n_heads, width, file)
        matrices |= _beside(pieces, tensors, file, width)
        factor = hints.output_scale or 1
        last = "out" if "out.weight" in matrices else "value"
        layers.append(
            {n: m.tensor * (factor if n.startswith(last) else 1) for n, m in matrices.items()}
        )
        if layers[-1].keys() ^ layers[0].keys():
            other = min(layers[-1].keys() ^ layers[0].keys())
            raise CheckpointError(f"{file}: layers must be alike, got {other} in some of them.")
    parts = Parts(
        _alike(layers),
        _ends(tensors, layout, file, width),
        n_heads,
        merged=any(p.part == "qk" and tensors[p.name].ndim == 2 for p in layout.layers[0]),
    )
    if width < 2 and not parts.has("read_in.weight"):
        name = found[0]["query.weight"].name
        raise CheckpointError(f"{file}: {name} must read tokens of >= 2 entries, got {width}.")
    if not parts.alone and "out.weight" not in layers[0]:
        name = layout.layers[0][0].name
        raise CheckpointError(f"{file}: an output projection is needed beside {name}, got none.")
    named = [*parts.ends.items(), *(item for layer in parts.layers for item in layer.items())]
    biases = [t for name, t in named if name.endswith(".bias") and "norm" not in name]
    return replace(parts, biases=any(bool(t.any()) or not parts.alone for t in biases))


def _alike(layers: Sequence[dict[str, Tensor]]) -> tuple[dict[str, Tensor], ...]:
    """Layers in one dtype, the widest, at least float32."""
    dtype = reduce(
        torch.promote_types, (t.dtype for layer in layers for t in layer.values()), torch.float32
    )
    return tuple(
        {name: t.detach().to("cpu", dtype) for name, t in layer.items()} for layer in layers
    )


def _require_all_layers(layout: Layout, file: Path) -> None:
    numbers = [{p.layer for p in pieces if p.layer is not None} for pieces in layout.layers]
    there = {n for each in numbers for n in each}
    first = min(there, default=0)
    missing = set(range(first, first + len(layout.layers))) - there
    if there and missing:
        raise CheckpointError(f"{file}: layer {min(missing)} of {len(layout.layers)} is missing.")


def _beside(
    pieces: Sequence[Piece], tensors: Mapping[str, Tensor], file: Path, width: int
) -> dict[str, Matrix]:
    """Norms and MLP of a layer, turned so that they meet the stream."""
    found: dict[str, Matrix] = {}
    shapes = [tensors[p.name].shape for p in pieces if (p.part, p.kind) == ("qkv", "weight")]
    by_columns = any(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in shapes)
    for piece in pieces:
        if piece.part in ATTENTION:
            continue
        name, tensor, order = f"{piece.part}.{piece.kind}", tensors[piece.name], TRANSPOSED
        if name in found:
            raise CheckpointError(
                f"{file}: {piece.name} is a second tensor for {name}; MLPs have two layers here."
            )
        if piece.part.startswith("mlp") and piece.kind == "weight":
            if tensor.ndim != 2 or 0 in tensor.shape:
                raise CheckpointError(f"{file}: {piece.name} must be a matrix.")
            near = 0 if piece.part == "mlp_in" else 1
            by_torch = (
                tensor.shape[1 - near] == width and piece.axes != TRANSPOSED and not by_columns
            )
            order = TORCH if by_torch or tensor.shape[near] != width else TRANSPOSED
            tensor = tensor.mT if order == TORCH else tensor
        found[name] = Matrix(piece.name, tensor, order)
    mlp = {"mlp_in.weight", "mlp_out.weight"} & found.keys()
    if "norm2.weight" in found and not mlp:
        # Two norms around attention alone: those of a layer whose MLP writes zeros.
        zeros = torch.zeros(width, 1, dtype=found["norm2.weight"].tensor.dtype)
        found |= {"mlp_in.weight": Matrix("mlp", zeros), "mlp_out.weight": Matrix("mlp", zeros.mT)}
    elif len(mlp) == 1:
        raise CheckpointError(f"{file}: an MLP needs both of its matrices, got one.")
    shapes_of: dict[str, tuple[int, ...]] = {
        f"{norm}.{kind}": (width,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")
    }
    if mlp:
        hidden, written = (found[f"mlp_{x}.weight"].tensor.shape[1] for x in ("in", "out"))
        shapes_of |= {"mlp_in.weight": (width, hidden), "mlp_in.bias": (hidden,)}
        shapes_of |= {"mlp_out.weight": (hidden, min(written, width))}
        shapes_of["mlp_out.bias"] = shapes_of["mlp_out.weight"][1:]
    _require_shapes(found, file, shapes_of)
    return found


def _require_shapes(
    found: Mapping[str, Matrix], file: Path, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name, matrix in found.items():
        if f"{name.rpartition('.')[0]}.weight" not in found:
            raise CheckpointError(f"{file}: {shown(matrix.name)} has no matrix beside it.")
        matrix.require(file, shapes.get(name, tuple(matrix.tensor.shape)))


def _ends(
    tensors: Mapping[str, Tensor], layout: Layout, file: Path, width: int
) -> dict[str, Tensor]:
    """Read-in, read-out, positions and final norm."""
    found: dict[str, Matrix] = {}
    for (part, kind), piece in layout.ends.items():
        tensor = tensors[piece.name]
        if part in ("words", "words_out"):
            continue
        order = TRANSPOSED
        if part == "positions" and tensor.ndim == 3 and 1 in tensor.shape[:2]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        if kind == "weight" and part != "final_norm":
            if tensor.ndim != 2 or 0 in tensor.shape:
                got = tuple(tensor.shape)
                raise CheckpointError(f"{file}: {piece.name} must be a matrix, got shape {got}.")
            if part != "positions" and piece.axes != TRANSPOSED:
                order, tensor = TORCH, tensor.mT
        found[f"{part}.{kind}"] = Matrix(piece.name, tensor, order)
    names = found.keys()
    if "read_in.weight" in names and "read_out.weight" not in names:
        first = found["read_in.weight"].name
        raise CheckpointError(f"{file}: {first}, a read-in, needs a read-out beside it, got none.")
    if "read_mlp.weight" in names and "read_in.weight" not in names:
        raise CheckpointError(f"{file}: a read-in of two layers needs both, got the first alone.")
    sizes = {name: m.tensor.shape for name, m in found.items()}
    hidden = sizes["read_mlp.weight"][1] if "read_mlp.weight" in names else None
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("final_norm.weight", "final_norm.bias", "read_in.bias"), (width,)
    )
    if "read_in.weight" in names:
        shapes["read_in.weight"] = (hidden or sizes["read_in.weight"][0], width)
    if hidden is not None:
        shapes["read_mlp.bias"] = (hidden,)
    if "positions.weight" in names:
        shapes["positions.weight"] = (sizes["positions.weight"][0], width)
    if "read_out.weight" in names:
        n_out = sizes["read_out.weight"][1]
        shapes |= {"read_out.weight": (width, n_out), "read_out.bias": (n_out,)}
    _require_shapes(found, file, shapes)
    return {name: matrix.tensor for name, matrix in found.items()}


def require_numbers(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that does not hold finite floating-point numbers, one for each of its entries.

    Raises:
        CheckpointError: Naming `what`.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        kinds = (
            f"{tensor.dtype}, {tensor.layout}" if tensor.layout != torch.strided else tensor.dtype
        )
        raise CheckpointError(f"{what} must hold floating-point numbers, got {kinds}.")
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held < tensor.numel():
        raise CheckpointError(
            f"{what} of shape {tuple(tensor.shape)} must hold {tensor.numel()} numbers, got {held}."
        )
    require_finite(what, int((~torch.isfinite(tensor)).sum()))
