"""The tensors of a file as parts of a model (attention, norms, MLPs, read-in and read-out), with
matrices [in, out].

Names decide which part a tensor is; shapes must fit together. Messages have the file's own names."""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.names import (
    ATTENTION,
    COMPLETE,
    ENDS,
    INNER,
    KINDS,
    KNOWN,
    TABLE,
    TORCH,
    TRANSPOSED,
    Piece,
    Tensors,
    is_harmless,
    piece_of,
)
from mechinterp.checkpoints.foreign.options import Hints, settle
from mechinterp.checkpoints.io.files import naming
from mechinterp.checkpoints.io.headers import require_finite


@dataclass(frozen=True)
class Layout:
    """Parts that the names of a file stand for."""

    layers: tuple[tuple[Piece, ...], ...]
    """Attention, norms and MLP of each layer."""
    ends: dict[tuple[str, str], Piece]
    """Read-in, read-out, positions, words and final norm, by part and kind."""
    unknown: tuple[str, ...]

    @property
    def pieces(self) -> list[Piece]:
        return [*(piece for layer in self.layers for piece in layer), *self.ends.values()]

    @property
    def lacking(self) -> list[str]:
        """Names in layers that lack queries, keys or values."""
        names = []
        for layer in self.layers:
            parts = {piece.part for piece in layer if piece.kind == "weight"}
            if not any(each <= parts for each in COMPLETE):
                names += [piece.name for piece in layer]
        return names

    @property
    def open_axes(self) -> bool:
        """True if names do not decide which axis of a matrix is the input."""
        pieces = [piece for layer in self.layers for piece in layer if piece.kind == "weight"]
        return any(piece.axes is None and piece.part in ATTENTION for piece in pieces)


def layout_of(tensors: Tensors) -> Layout:
    """Parts that the names of the tensors stand for."""
    read = {name: piece_of(name) for name in tensors}
    pieces = [piece for piece in read.values() if piece is not None]
    unknown = [name for name, piece in read.items() if piece is None]
    paths = {piece.path for piece in pieces if piece.part in INNER}
    widths = {n for p in pieces if p.part in INNER and p.kind == "weight" for n in tensors[p.name].shape}  # fmt: skip
    outputs = [p for p in pieces if p.part == "o" and p.kind == "weight" and p.path in paths]
    n_written = [min(tensors[p.name].shape, default=0) for p in pieces if p.part == "read_out" and p.kind == "weight"]  # fmt: skip
    layers: dict[int, list[Piece]] = {}
    ends: dict[tuple[str, str], Piece] = {}
    for piece in pieces:
        part = _part_of(piece, tensors, widths, n_written)
        if part == "o" and (piece.path not in paths or _is_second(piece, outputs, tensors)):
            part = "read_out"
        if part not in ENDS:
            layers.setdefault(-1 if piece.layer is None else piece.layer, []).append(piece)
            continue
        key = (part, piece.kind)
        names = [each.name.split(".")[-2:-1] for each in (piece, ends.get(key, piece))]
        if key in ends and ["lm_head"] in names:  # a model of words with a separate read-out
            own = piece if names[1] == ["lm_head"] else ends[key]
            ends["words_out", piece.kind] = piece if own is not piece else ends[key]
            ends[key] = own
        elif key in ends or piece.layer is not None:
            unknown.append(piece.name)
        else:
            ends[key] = piece
    return Layout(tuple(tuple(layers[n]) for n in sorted(layers)), ends, tuple(unknown))


def _part_of(
    piece: Piece, tensors: Tensors, widths: Collection[int], n_written: Sequence[int]
) -> str:
    """Part that a name stands for; shapes decide if the name alone does not.

    Args:
        widths: Sizes of the matrices of queries, keys and values, including the width of the
            stream.
        n_written: Number of outputs of each read-out.
    """
    stem, _, _ = piece.name.rpartition(".")
    weight = tensors.get(f"{stem}.weight", tensors.get(f"{stem}.kernel", tensors[piece.name]))
    rows, columns = tuple(weight.shape) if weight.ndim == 2 else (0, 0)
    into, out = (rows, columns) if piece.axes == TRANSPOSED else (columns, rows)
    if piece.part == "words":
        # A table of words is [words, width] without a bias; a layer that reads numbers is [width, entries].
        linear = piece.kind == "bias" or f"{stem}.bias" in tensors or piece.name.endswith(("kernel", ".w"))  # fmt: skip
        # Where both sizes are widths, a model of words writes as many outputs as there are words.
        fewer = into in widths and any(n < into for n in n_written)
        shaped = out in widths and (into not in widths or fewer) and not piece.name.endswith("W_E")
        return "read_in" if linear or shaped else "words"
    if piece.part in ("mlp_in", "mlp_out") and "Dense_" in piece.name and piece.layer is None:
        width, part = (into, "read_in") if piece.part == "mlp_in" else (out, "read_out")
        return piece.part if width in widths else part
    return piece.part


def _is_second(piece: Piece, outputs: Sequence[Piece], tensors: Tensors) -> bool:
    """True if another output matrix of the same layer is wider, so that this one is the read-out."""
    own = [p for p in outputs if p.name.rpartition(".")[0] == piece.name.rpartition(".")[0]]
    others = [p for p in outputs if (p.layer, p.head) == (piece.layer, piece.head) and p not in own]
    if piece.layer is not None or not own or not others:
        return False
    written = [min(tensors[p.name].shape, default=0) for p in (own[0], others[0])]
    return written[0] < written[1]


KERNELS = ("kernel", "w")
QUANTIZED = (torch.int8, torch.uint8)
WORD_MODEL = "a model of word tokens ({} {}); tokens must be numbers (x, y)."
HOOK = "hook the module in memory (mechinterp.hook_module)"


def require_known_kind(tensors: Tensors, layout: Layout) -> None:
    """Refuse models of other kinds, as names and shapes show them.

    Raises:
        ValueError: If it is a model of words, or has relative positions, gates, grouped keys or
            the like.
    """
    for piece in layout.pieces:
        if piece.part in ATTENTION and tensors[piece.name].dtype in QUANTIZED:
            raise ValueError(f"{shown(piece.name)} is quantized ({tensors[piece.name].dtype}); write floating-point numbers, the integers times their scale, or {HOOK}.")  # fmt: skip
    if grouped := _grouped(tensors, layout):
        raise ValueError(f"grouped keys ({grouped}) are not read from a file; {HOOK}.")
    for what_else, mark in TABLE["other_models"].items():
        for name in tensors:
            if re.search(mark, name) or re.search(mark, name.lower()):
                raise ValueError(f"{what_else} are not read from a file, got {shown(name)}; {HOOK}.")  # fmt: skip
    ends = [layout.ends.get((name, "weight")) for name in ("read_in", "read_out")]
    sizes = [tensors[p.name].shape for p in ends if p is not None and p.axes == TORCH]
    if len(sizes) == 2 and all(len(size) == 2 for size in sizes) and sizes[1][0] > sizes[0][1]:
        raise ValueError(
            f"a model of classes or words: {sizes[1][0]} outputs for tokens of {sizes[0][1]} entries (x, y), so that they are no y."
        )
    words = layout.ends.get(("words", "weight"))
    if words is not None and ("read_in", "weight") not in layout.ends:
        shape = list(tensors[words.name].shape)
        if shape[0] == 1:  # the placeholder in files for HookedTransformer
            return
        raise ValueError(WORD_MODEL.format(words.name, shape))


def _grouped(tensors: Tensors, layout: Layout) -> str:
    """Sizes of queries and keys if several heads share keys, else an empty text."""
    for layer in layout.layers[:1]:
        found = {p.part: tensors[p.name] for p in layer if p.kind == "weight" and p.head is None}
        if not {"q", "k"} <= found.keys() or any(found[x].ndim != 2 for x in "qk"):
            continue
        shapes = sorted(tuple(sorted(found[x].shape)) for x in "qk")
        (q_rows, q_in), (k_rows, k_in) = (tuple(found[x].shape) for x in "qk")
        if q_in == k_in and k_rows < q_rows and q_rows % k_rows == 0:
            return f"{q_rows} rows of queries, {k_rows} of keys"
        if q_rows == k_rows and k_in < q_in and q_in % k_in == 0 and shapes[0] != shapes[1]:
            return f"{q_in} columns of queries, {k_in} of keys"
    return ""


def shown(name: str) -> str:
    """A name from a file, cut to fit in one line."""
    return name if len(name) <= 100 else f"{name[:97]}..."


class TensorError(ValueError):
    """Refused tensor of a file; the error message adds how to state which part it is (--map)."""

    def __init__(self, what: str, rule: str, *, offer: bool = True) -> None:
        self.rule = f"{shown(what)} {rule}".lstrip()
        self.offer = offer
        super().__init__(f"{self.rule}.")


@contextmanager
def of_file(file: Path) -> Iterator[None]:
    """Puts the file's name before errors inside; errors about a tensor also say how to state its
    part."""
    with naming(file):
        try:
            yield
        except TensorError as error:
            if not error.offer:
                raise ValueError(f"{error.rule}; {HOOK}.") from None
            raise ValueError(
                f"{error.rule}; state its part by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, "
                f"where KNOWN is one of {', '.join(KNOWN)}."
            ) from None


UNUSED = "unused"


def mapped(tensors: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors renamed by `names`, {theirs: known}; those mapped to `unused` are dropped.

    The key is a whole name, or whole words of names. Words before the last one stay. The ending,
    such as weight or kernel, stays too, unless both sides end in such a word.

    Raises:
        ValueError: If a key matches no name, or two tensors would get the same name.
    Example:
        >>> import torch
        >>> list(mapped({"block.final.kernel": torch.zeros(1)}, {"block.final": "o_proj"}))
        ['block.o_proj.kernel']
    """
    named = dict(tensors)
    for theirs, known in names.items():
        pattern = _whole_words(theirs)
        if not any(map(pattern.search, named)):
            listed = ", ".join(map(shown, [*named][:8]))
            raise ValueError(f"map must name whole words of a tensor's name, got {theirs!r}; the names are {listed}.")  # fmt: skip
        if known == UNUSED:
            named = {name: t for name, t in named.items() if not pattern.search(name)}
            continue
        words = re.split(r"[./]", theirs)
        kind = words.pop() if len(words) > 1 and words[-1] in KINDS else ""
        path = theirs.removesuffix(kind).rstrip("./").removesuffix(words[-1])
        whole = kind and known.rpartition(".")[2] in KINDS
        after = "" if whole else theirs[len(path) + len(words[-1]) :]
        new = (path + known + after).replace("\\", r"\\")
        renamed = {pattern.sub(rf"\g<1>{new}", name): tensor for name, tensor in named.items()}
        if len(renamed) < len(named):
            raise ValueError(f"map must give different names to different tensors, got {theirs}={known}.")  # fmt: skip
        named = renamed
    return named


def _whole_words(name: str) -> re.Pattern[str]:
    return re.compile(rf"(^|[./])({re.escape(name)})(?=$|[./])")


def unused_names(tensors: Tensors, names: Mapping[str, str]) -> list[str]:
    """Names of the tensors that no reading uses: buffers, a table of words beside a read-in, and those mapped to `unused`."""
    dropped = [_whole_words(theirs) for theirs, known in names.items() if known == UNUSED]
    ends = layout_of(tensors).ends
    tables = [p.name for (part, _), p in ends.items() if part == "words" and ("read_in", "weight") in ends]  # fmt: skip
    return [
        name
        for name, tensor in tensors.items()
        if is_harmless(name, tensor) or name in tables or any(each.search(name) for each in dropped)
    ]


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
    containers = dict.fromkeys(tuple(w[:n]) for n in range(depth) for w in words.values() if len(w) > n)  # fmt: skip
    for path in containers:
        inside = {n: t for n, t in tensors.items() if tuple(words[n][: len(path)]) == path}
        own = {name: piece for name, piece in pieces.items() if name in inside}
        if not _is_stack(inside, own):
            continue
        if ends := [name for name, piece in own.items() if piece.part in ENDS]:
            count = len(inside[ends[0]])
            raise ValueError(f"must hold one model, got {count} on the first axis of all tensors; write one of them.")  # fmt: skip
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
    if not any(each <= parts for each in COMPLETE) or any(p.layer is not None for p in pieces.values()):  # fmt: skip
        return False
    if len({tensor.shape[:1] for tensor in tensors.values()}) > 1:
        return False
    return any(
        tensors[name].ndim > (3 if piece.part in ATTENTION else 2 if name.endswith(KERNELS) else 1)
        for name, piece in pieces.items()
        if name.endswith((*KERNELS, "scale"))
    )


FULL = {"q": "query", "k": "key", "v": "value", "o": "out"}
GROUPED = "grouped or multi-query attention is not read"


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


@dataclass(frozen=True)
class Parts:
    """The tensors of a file as parts of a model."""

    layers: tuple[dict[str, Tensor], ...]
    """Tensors of each layer: .weight and .bias of query, key, value, out, mlp_in, mlp_out, norm1,
    norm2, if there are any."""
    ends: dict[str, Tensor]
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
        return len(self.layers[0]["query.weight"])

    @property
    def d_head(self) -> int:
        """Width of the queries of a head in the first layer."""
        return self.layers[0]["query.weight"].shape[1] // self.n_heads

    @property
    def written(self) -> int:
        """Number of entries that a token has after the last layer."""
        last = self.layers[-1]
        name = next(n for n in ("mlp_out", "out", "value") if f"{n}.weight" in last)
        return last[f"{name}.weight"].shape[1] // (self.n_heads if name == "value" else 1)

    @property
    def shown_responses(self) -> int | None:
        """d_y if the shapes show it: a read-out, or heads that write less than a token."""
        if self.has("read_out.weight"):
            return self.ends["read_out.weight"].shape[1]
        narrow = self.written < self.width and not self.has("mlp_out.weight")
        return self.written if narrow else None

    @property
    def d_token(self) -> int:
        """Number of entries of a token that are read."""
        first = self.ends.get("read_mlp.weight", self.ends.get("read_in.weight"))
        return self.width if first is None else len(first)

    def has(self, name: str) -> bool:
        """True if every layer has this part, or it is a read-in, read-out or the like."""
        return name in self.ends or all(name in layer for layer in self.layers)

    def normed(self, chosen: Mapping[str, object]) -> "Parts":
        """The parts, with norms of factor 1 added if the reading has norms without weights in the
        file."""
        if chosen.get("norm") is None or self.has("norm1.weight") or self.has("norm2.weight"):
            return self
        ones = self.layers[0]["query.weight"].new_ones(self.width)
        unit = {"weight": ones, "bias": 0 * ones}
        norms = ("norm1", "norm2") if self.has("mlp_in.weight") else ("norm1",)
        added = {f"{name}.{kind}": unit[kind] for name in norms for kind in unit}
        final = {f"final_norm.{kind}": unit[kind] for kind in unit if chosen["norm"] == "before"}
        layers = tuple({**layer, **added} for layer in self.layers)
        return replace(self, layers=layers, ends={**self.ends, **final})

    @property
    def alone(self) -> bool:
        """True if there is only one layer of attention."""
        around = self.has("norm1.weight") or self.has("mlp_in.weight") or self.ends
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
    query = every_layer[0]["query.weight"]
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
    if width < 2 and not parts.has("read_in.weight"):
        raise TensorError(query.name, f"must read tokens of >= 2 entries, got {width}")
    if not parts.alone and "out.weight" not in every_layer[0]:
        name = shown(layout.layers[0][0].name)
        raise TensorError("an output projection", f"is needed with {name}, got none")
    named = [item for part in (ends, *layers) for item in part.items()]
    biases = [t for name, t in named if name.endswith(".bias") and "norm" not in name]
    biased = any(bool(t.any()) or not parts.alone for t in biases)
    norms = {name.partition(".")[2] for name, _ in named if "norm" in name}
    full = tuple(map(_with_biases, layers)), _with_biases(ends)
    return Parts(*full, n_heads, merged, biased, bare_norms=norms == {"weight"})


def _with_biases(tensors: Tensors) -> dict[str, Tensor]:
    """The tensors, with zeros for missing biases."""
    zeros = {n.replace("weight", "bias"): t.new_zeros(t.shape[-1]) for n, t in tensors.items()}
    return zeros | dict(tensors)


def _alike(layers: Sequence[Mapping[str, Matrix]], factor: float) -> tuple[dict[str, Tensor], ...]:
    """Layers in one dtype, the widest, but at least float32, with a factor on the output of
    attention."""
    kinds = (matrix.tensor.dtype for layer in layers for matrix in layer.values())
    dtype = reduce(torch.promote_types, kinds, torch.float32)
    last = "out." if "out.weight" in layers[0] else "value."
    factors = {name: factor if name.startswith(last) else 1.0 for name in layers[0]}
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
        name, tensor = f"{piece.part}.{piece.kind}", tensors[piece.name]
        _require_first(matrices.get(name), piece)
        if piece.part.startswith("mlp") and piece.kind == "weight":
            _require_matrix(piece.name, tensor)
            axis = 0 if piece.part == "mlp_in" else 1
            by_torch = tensor.shape[1 - axis] == width and piece.axes != TRANSPOSED
            if (by_torch and not by_columns) or tensor.shape[axis] != width:
                tensor = tensor.mT
        matrices[name] = Matrix(piece.name, tensor)
    mlp = {"mlp_in.weight", "mlp_out.weight"} & matrices.keys()
    if "norm2.weight" in matrices and not mlp:
        # Two norms around attention alone: a layer whose MLP writes zeros.
        zeros = torch.zeros(width, 1, dtype=matrices["norm2.weight"].tensor.dtype, device="cpu")
        matrices["mlp_in.weight"] = Matrix("mlp", zeros)
        matrices["mlp_out.weight"] = Matrix("mlp", zeros.mT)
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
            _require_matrix(piece.name, tensor)
            if part != "positions" and piece.axes != TRANSPOSED:
                tensor = tensor.mT
        matrices[f"{part}.{kind}"] = Matrix(piece.name, tensor)
    if "read_in.weight" in matrices and "read_out.weight" not in matrices:
        name = f"{shown(matrices['read_in.weight'].name)}, a read-in,"
        raise TensorError(name, "needs a read-out too, got none")
    if "read_mlp.weight" in matrices and "read_in.weight" not in matrices:
        first = shown(matrices["read_mlp.weight"].name)
        raise TensorError("a read-in of two layers", f"needs both, got only {first}")
    hidden = matrices["read_mlp.weight"].tensor.shape[1] if "read_mlp.weight" in matrices else None
    shapes: dict[str, tuple[int | None, ...]] = {
        **{"final_norm": (width,), "positions": (None, width)},
        **{"read_in": (hidden, width), "read_out": (width, None)},
    }
    _require_shapes(matrices, shapes)
    return {name: matrix.tensor for name, matrix in matrices.items()}


def require_numbers(tensor: Tensor, what: str) -> None:
    """Refuse a tensor unless it has finite floating-point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(f"{shown(what)} must hold floating-point numbers, got {tensor.dtype}.")
    if bad := int((~torch.isfinite(tensor)).sum()):
        require_finite(shown(what), bad)


def attention_matrices(pieces: Iterable[Piece], tensors: Tensors, axes: str) -> dict[str, Matrix]:
    """Weights and biases of one layer: `query.weight`, `query.bias`, and so on for key, value and
    out."""
    grouped: dict[tuple[str, str], dict[int | None, Piece]] = {}
    for piece in pieces:
        if piece.part in ATTENTION:
            heads = grouped.setdefault((piece.part, piece.kind), {})
            _require_first(heads.get(piece.head), piece)
            heads[piece.head] = piece
    order = _packed_axes(grouped, tensors)
    matrices: dict[str, Matrix] = {}
    for (part, kind), heads in grouped.items():
        whole = _matrix(heads, tensors, order, axes)
        for x, matrix in zip(part, _unpacked(whole, part), strict=True):
            name = f"{FULL[x]}.{kind}"
            _require_first(matrices.get(name), matrix)
            matrices[name] = matrix
    return matrices


def _require_first(one: Piece | Matrix | None, other: Piece | Matrix) -> None:
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
    _require_matrix(piece.name, tensor)
    if piece.part == "qk":  # rows of each head are the query's coordinates
        rows, width = got
        if rows % width:
            raise TensorError(piece.name, f"must have {width} rows for each head, got {rows}")
        return tensor.unflatten(0, (-1, width))
    return tensor.mT if order == TORCH else tensor


def _require_matrix(name: str, tensor: Tensor) -> None:
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


def _number_of_heads(
    layer: Mapping[str, Matrix], hints: Hints, settings: Mapping[str, object], n_heads: int | None
) -> int:
    """Number of heads, from the tensors' shapes, the file, its config or the user."""
    stated = settings.get("n_heads")
    n_heads = settle("n_heads", n_heads, stated if isinstance(stated, int) else None)
    query, value = layer["query.weight"].tensor, layer["value.weight"]
    width, inner = query.shape
    if n_heads is None and "out.weight" not in layer:  # each head writes a whole token, or y
        n_heads = _whole_tokens(value, width)
    elif n_heads is None and math.gcd(inner, value.tensor.shape[1]) == 1:
        n_heads = 1
    n_heads = settle("n_heads", n_heads, hints.n_heads)
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
        matrices[f"{name}.weight"].tensor.shape[1] if f"{name}.weight" in matrices else 0
        for name in ("query", "value", "out", "mlp_in", "mlp_out")
    )
    # Without an output projection, each head writes at most a whole token.
    most = values if "out.weight" in matrices else n_heads * width
    shapes: dict[str, tuple[int | None, ...]] = {
        **{"query": (width, None), "key": (width, inner), "value": (width, min(values, most))},
        **{"out": (values, min(written, width)), "norm1": (width,), "norm2": (width,)},
        **{"mlp_in": (width, None), "mlp_out": (hidden, min(narrowed, width))},
    }
    _require_shapes(matrices, shapes)
    for size in (inner, values):
        if size % n_heads:
            raise ValueError(f"n_heads must divide the width {size}, got {n_heads}.")


def _require_shapes(
    matrices: Mapping[str, Matrix], shapes: Mapping[str, tuple[int | None, ...]]
) -> None:
    """Refuse weights of other shapes than these, by part (None: any size), and biases that fit no
    weight."""
    weights_first = sorted(matrices, key=lambda name: name.endswith("bias"))
    for name in weights_first:
        matrix = matrices[name]
        part, got = name.rpartition(".")[0], tuple(matrix.tensor.shape)
        weight = matrices.get(f"{part}.weight")
        if weight is None:
            raise TensorError(matrix.name, "is a bias without a weight")
        of_weight = shapes.get(part, got)
        wanted = tuple(weight.tensor.shape[-1:]) if name.endswith("bias") else of_weight
        shape = tuple(n if n is not None else size for n, size in zip(wanted, got, strict=False))
        if shape != got:
            order = " as [in, out]" if len(shape) == 2 and part != "positions" else ""
            raise TensorError(matrix.name, f"must have shape {shape}{order}, got {got}")
