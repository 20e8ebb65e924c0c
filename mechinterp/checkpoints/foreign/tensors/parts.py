"""The tensors of a file as parts of a model (attention, norms, MLPs, read-in and read-out), with
matrices [in, out].

Names decide which part a tensor is; shapes must fit together. Messages have the file's own names."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.options import Hints, stated_or_given
from mechinterp.checkpoints.foreign.tensors.layout import Layout
from mechinterp.checkpoints.foreign.tensors.matrices import (
    Matrix,
    attention_matrices,
    require_first,
    require_matrix,
)
from mechinterp.checkpoints.foreign.tensors.names import (
    ATTENTION,
    TRANSPOSED,
    Piece,
    Tensors,
    bias_of,
    name_of,
    shown,
    weight_of,
)
from mechinterp.checkpoints.foreign.tensors.refusals import TensorError, require_numbers

GROUPED = "grouped or multi-query attention is not read"


@dataclass(frozen=True)
class Parts:
    """The tensors of a file as parts of a model."""

    layers: tuple[dict[str, Tensor], ...]
    """Tensors of each layer by their names in `Weights` (attn.W_Q, mlp.b_in, ln1.w, ...), as [in, out]; those of attention
    have all heads side by side."""
    ends: dict[str, Tensor]
    """W_in, unembed.W_U, pos_embed.W_pos, ln_final.w, their biases, and W_read of a read-in of two layers."""
    n_heads: int
    merged: bool = False
    """True: each head has one merged matrix instead of queries and keys."""
    biases: bool = False
    """True: the model has biases (norms not counted). Biases of a lone attention layer that are all
    zero do not count."""
    bare_norms: bool = False
    """True: there are norms, and none has a bias, so that they are layer norms or RMS norms."""

    @property
    def width(self) -> int:
        """Width of the stream."""
        return len(self.layers[0]["attn.W_Q"])

    @property
    def d_head(self) -> int:
        """Width of the queries of a head in the first layer."""
        return self.layers[0]["attn.W_Q"].shape[1] // self.n_heads

    @property
    def written(self) -> int:
        """Number of entries that a token has after the last layer."""
        last = self.layers[-1]
        name = next(n for n in ("mlp.W_out", "attn.W_O", "attn.W_V") if n in last)
        return last[name].shape[1] // (self.n_heads if name == "attn.W_V" else 1)

    @property
    def shown_responses(self) -> int | None:
        """d_y if the shapes show it: a read-out, or heads that write less than a token."""
        if self.has("unembed.W_U"):
            return self.ends["unembed.W_U"].shape[1]
        narrow = self.written < self.width and not self.has("mlp.W_out")
        return self.written if narrow else None

    @property
    def d_token(self) -> int:
        """Number of entries of a token that are read."""
        first = self.ends.get("W_read", self.ends.get("W_in"))
        return self.width if first is None else len(first)

    def has(self, name: str) -> bool:
        """True if every layer has this part, or it is a read-in, read-out or the like."""
        return name in self.ends or all(name in layer for layer in self.layers)

    def normed(self, chosen: Mapping[str, object]) -> "Parts":
        """The parts, with norms of factor 1 added if the reading has norms without weights in the
        file."""
        if chosen.get("norm") is None or self.has("ln1.w") or self.has("ln2.w"):
            return self
        ones = self.layers[0]["attn.W_Q"].new_ones(self.width)
        unit = {"w": ones, "b": 0 * ones}
        norms = ("ln1", "ln2") if self.has("mlp.W_in") else ("ln1",)
        added = {f"{name}.{kind}": unit[kind] for name in norms for kind in unit}
        final = {f"ln_final.{kind}": unit[kind] for kind in unit if chosen["norm"] == "before"}
        layers = tuple({**layer, **added} for layer in self.layers)
        return replace(self, layers=layers, ends={**self.ends, **final})

    @property
    def alone(self) -> bool:
        """True if there is only one layer of attention."""
        around = self.has("ln1.w") or self.has("mlp.W_in") or self.ends
        return len(self.layers) == 1 and not around


def parts_of(
    tensors: Tensors,
    layout: Layout,
    axes: str,
    hints: Hints,
    settings: Mapping[str, object],
    wide_heads: bool = False,
) -> Parts:
    """The tensors of a file, sorted by parts and checked against each other.

    Args:
        axes: One of ORIENTATIONS, for matrices whose names do not show it.
        wide_heads: True: the queries of each head are as wide as a token.
    Raises:
        ValueError: If shapes do not fit together, a part is not possible here, or the number of
            heads is not known.
    """
    for piece in layout.pieces:
        require_numbers(tensors[piece.name], piece.name)
    numbers = {p.layer for pieces in layout.layers for p in pieces if p.layer is not None}
    first, count = min(numbers, default=0), len(layout.layers)
    if numbers and (missing := set(range(first, first + count)) - numbers):
        raise ValueError(f"layer {min(missing)} of {count} is missing.")
    every_layer = [attention_matrices(pieces, tensors, axes) for pieces in layout.layers]
    query = every_layer[0]["attn.W_Q"]
    width = len(query.tensor)
    apart = [m.n_heads for each in every_layer for m in each.values() if m.n_heads]
    heads = (_whole_tokens(query, width) if wide_heads else None) or next(iter(apart), None)
    n_heads = _number_of_heads(every_layer[0], hints, settings, heads)
    for pieces, matrices in zip(layout.layers, every_layer, strict=True):
        matrices |= _beside(pieces, tensors, width)
        _require_layer(matrices, n_heads, width)
        if other := matrices.keys() ^ every_layer[0].keys():
            name = shown((matrices | every_layer[0])[min(other)].name)
            raise TensorError("layers", f"must have the same parts, got {name} in some of them")
    layers, ends = _alike(every_layer, hints.output_scale or 1), _ends(tensors, layout, width)
    merged = any(p.part == "qk" and tensors[p.name].ndim == 2 for p in layout.layers[0])
    parts = Parts(layers, ends, n_heads, merged)
    if width < 2 and not parts.has("W_in"):
        raise TensorError(query.name, f"must read tokens of >= 2 entries, got {width}")
    if not parts.alone and "attn.W_O" not in every_layer[0]:
        name = shown(layout.layers[0][0].name)
        raise TensorError("an output projection", f"is needed with {name}, got none")
    named = [item for part in (ends, *layers) for item in part.items()]
    biases = [t for name, t in named if _is_bias(name) and not name.startswith("ln")]
    biased = any(bool(t.any()) or not parts.alone for t in biases)
    norms = [name for name, _ in named if name.startswith("ln")]
    bare = bool(norms) and not any(map(_is_bias, norms))
    full = tuple(map(_with_biases, layers)), _with_biases(ends)
    return Parts(*full, n_heads, merged, biased, bare)


def _with_biases(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors, with zeros for missing biases."""
    weights = {name: tensor for name, tensor in tensors.items() if not _is_bias(name)}
    zeros = {bias_of(name): tensor.new_zeros(tensor.shape[-1]) for name, tensor in weights.items()}
    return zeros | dict(tensors)


def _is_bias(name: str) -> bool:
    return weight_of(name) != name


def _alike(layers: Sequence[Mapping[str, Matrix]], factor: float) -> tuple[dict[str, Tensor], ...]:
    """Layers in one dtype, the widest, but at least float32, with a factor on the output of
    attention."""
    kinds = (matrix.tensor.dtype for layer in layers for matrix in layer.values())
    dtype = reduce(torch.promote_types, kinds, torch.float32)
    last = "attn.W_O" if "attn.W_O" in layers[0] else "attn.W_V"
    factors = {name: factor if weight_of(name) == last else 1.0 for name in layers[0]}
    return tuple(
        {n: matrix.tensor.detach().to("cpu", dtype) * factors[n] for n, matrix in layer.items()}
        for layer in layers
    )


def _beside(pieces: Sequence[Piece], tensors: Tensors, width: int) -> dict[str, Matrix]:
    """Norms and MLP of a layer, transposed so that they fit the stream."""
    matrices: dict[str, Matrix] = {}
    shapes = [tensors[p.name].shape for p in pieces if (p.part, p.kind) == ("qkv", "weight")]
    by_columns = any(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in shapes)
    for piece in pieces:
        if piece.part in ATTENTION:
            continue
        name, tensor = name_of(piece.part, piece.kind), tensors[piece.name]
        require_first(matrices.get(name), piece)
        if piece.part.startswith("mlp") and piece.kind == "weight":
            require_matrix(piece.name, tensor)
            axis = 0 if piece.part == "mlp_in" else 1
            by_torch = tensor.shape[1 - axis] == width and piece.axes != TRANSPOSED
            if (by_torch and not by_columns) or tensor.shape[axis] != width:
                tensor = tensor.mT
        matrices[name] = Matrix(piece.name, tensor)
    mlp = {"mlp.W_in", "mlp.W_out"} & matrices.keys()
    if "ln2.w" in matrices and not mlp:
        # Two norms around attention alone: a layer whose MLP writes zeros.
        zeros = torch.zeros(width, 1, dtype=matrices["ln2.w"].tensor.dtype, device="cpu")
        matrices["mlp.W_in"] = Matrix("mlp", zeros)
        matrices["mlp.W_out"] = Matrix("mlp", zeros.mT)
    elif len(mlp) == 1:
        (one,) = mlp
        name = shown(matrices[one].name)
        raise TensorError("an MLP", f"needs two matrices, got only {name}")
    return matrices


def _ends(tensors: Tensors, layout: Layout, width: int) -> dict[str, Tensor]:
    """Read-in, read-out, positions and final norm."""
    matrices: dict[str, Matrix] = {}
    for (part, kind), piece in layout.ends.items():
        tensor = tensors[piece.name]
        if part in ("words", "words_out"):
            continue
        if part == "positions" and tensor.ndim == 3 and 1 in tensor.shape[:2]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        if kind == "weight" and part != "final_norm":
            require_matrix(piece.name, tensor)
            if part != "positions" and not _reads_by_rows(piece, tensor, width):
                tensor = tensor.mT
        matrices[name_of(part, kind)] = Matrix(piece.name, tensor)
    if "W_in" in matrices and "unembed.W_U" not in matrices:
        name = f"{shown(matrices['W_in'].name)}, a read-in,"
        raise TensorError(name, "needs a read-out too, got none")
    if "W_read" in matrices and "W_in" not in matrices:
        first = shown(matrices["W_read"].name)
        raise TensorError("a read-in of two layers", f"needs both, got only {first}")
    hidden = matrices["W_read"].tensor.shape[1] if "W_read" in matrices else None
    shapes: dict[str, tuple[int | None, ...]] = {
        **{"ln_final.w": (width,), "pos_embed.W_pos": (None, width)},
        **{"W_in": (hidden, width), "unembed.W_U": (width, None)},
    }
    _require_shapes(matrices, shapes)
    return {name: matrix.tensor for name, matrix in matrices.items()}


def _reads_by_rows(piece: Piece, tensor: Tensor, width: int) -> bool:
    """True if a matrix of the ends is [in, out]; the shape decides if the name does not."""
    if piece.axes is not None:
        return piece.axes == TRANSPOSED
    rows, columns = tensor.shape if piece.part in ("read_in", "words") else tensor.shape[::-1]
    return columns == width != rows


def _number_of_heads(
    layer: Mapping[str, Matrix], hints: Hints, settings: Mapping[str, object], n_heads: int | None
) -> int:
    """Number of heads, from the tensors' shapes, the file, its config or the user."""
    stated = settings.get("n_heads")
    n_heads = stated_or_given("n_heads", n_heads, stated if isinstance(stated, int) else None)
    query, value = layer["attn.W_Q"].tensor, layer["attn.W_V"]
    width, inner = query.shape
    if n_heads is None and "attn.W_O" not in layer:  # each head writes a whole token, or y
        n_heads = _whole_tokens(value, width)
    elif n_heads is None and math.gcd(inner, value.tensor.shape[1]) == 1:
        n_heads = 1
    n_heads = stated_or_given("n_heads", n_heads, hints.n_heads)
    if n_heads is None:
        several = settings.get("several_heads")
        why = f"must be one number, got {several}" if several else "is not stated in the file"
        raise ValueError(f"n_heads {why}; give --n-heads (n_heads=).")
    return n_heads


def _whole_tokens(value: Matrix, width: int) -> int | None:
    """Number of heads whose values are as wide as a token; None if values are narrower."""
    rows = value.tensor.shape[1]
    if rows < width and not value.packed:
        return None
    if rows % width:
        raise TensorError(value.name, f"must have {width} rows for each head, got {rows}")
    return rows // width


def _require_layer(matrices: Mapping[str, Matrix], n_heads: int, width: int) -> None:
    """Check that the matrices of one layer fit together."""
    for matrix in matrices.values():
        if matrix.n_heads not in (None, n_heads):
            rule = f"must have {n_heads} heads, got {matrix.n_heads}; {GROUPED}"
            raise TensorError(matrix.name, rule)
    inner, values, written, hidden, narrowed = (
        matrices[name].tensor.shape[1] if name in matrices else 0
        for name in ("attn.W_Q", "attn.W_V", "attn.W_O", "mlp.W_in", "mlp.W_out")
    )
    # Without an output projection, each head writes at most a whole token.
    most = values if "attn.W_O" in matrices else n_heads * width
    shapes: dict[str, tuple[int | None, ...]] = {
        **{"attn.W_Q": (width, None), "attn.W_K": (width, inner)},
        **{"attn.W_V": (width, min(values, most)), "attn.W_O": (values, min(written, width))},
        **{"ln1.w": (width,), "ln2.w": (width,)},
        **{"mlp.W_in": (width, None), "mlp.W_out": (hidden, min(narrowed, width))},
    }
    _require_shapes(matrices, shapes)
    for size in (inner, values):
        if size % n_heads:
            raise ValueError(f"n_heads must divide the width {size}, got {n_heads}.")


def _require_shapes(
    matrices: Mapping[str, Matrix], shapes: Mapping[str, tuple[int | None, ...]]
) -> None:
    """Refuse weights of other shapes than these, by name (None: any size), and biases that fit no
    weight."""
    for name in sorted(matrices, key=_is_bias):  # weights first
        matrix = matrices[name]
        got = tuple(matrix.tensor.shape)
        weight = matrices.get(weight_of(name))
        if weight is None:
            raise TensorError(matrix.name, "is a bias without a weight")
        of_weight = shapes.get(name, got)
        wanted = tuple(weight.tensor.shape[-1:]) if _is_bias(name) else of_weight
        shape = tuple(n if n is not None else size for n, size in zip(wanted, got, strict=False))
        if shape != got:
            order = " as [in, out]" if len(shape) == 2 and name != "pos_embed.W_pos" else ""
            raise TensorError(matrix.name, f"must have shape {shape}{order}, got {got}")
