"""Parts of a model that the names of a file's tensors stand for, layer by layer, and models of
unknown kinds."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.foreign.names import (
    ATTENTION,
    COMPLETE,
    ENDS,
    GATED,
    INNER,
    KINDS,
    KNOWN,
    TABLE,
    TORCH,
    TRANSPOSED,
    Piece,
    Tensors,
    piece_of,
)
from mechinterp.checkpoints.io.errors import naming


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
    layers: dict[int, list[Piece]] = {}
    ends: dict[tuple[str, str], Piece] = {}
    for piece in pieces:
        part = _part_of(piece, tensors, widths)
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


def _part_of(piece: Piece, tensors: Tensors, widths: Collection[int]) -> str:
    """Part that a name stands for; shapes decide if the name alone does not.

    Args:
            widths: Sizes of the matrices of queries, keys and values, including the width of the
                stream.
    """
    stem, _, _ = piece.name.rpartition(".")
    weight = tensors.get(f"{stem}.weight", tensors.get(f"{stem}.kernel", tensors[piece.name]))
    rows, columns = tuple(weight.shape) if weight.ndim == 2 else (0, 0)
    into, out = (rows, columns) if piece.axes == TRANSPOSED else (columns, rows)
    if piece.part == "words":
        # A table of words is [words, width] without a bias; a layer that reads numbers is [width, entries].
        linear = piece.kind == "bias" or f"{stem}.bias" in tensors or piece.name.endswith(("kernel", ".w"))  # fmt: skip
        shaped = out in widths and into not in widths and not piece.name.endswith("W_E")
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
HOOK = "hook the module in memory (mechinterp.hook_module)"


def require_known_kind(tensors: Tensors, layout: Layout) -> None:
    """Refuse models of other kinds, as names and shapes show them.

    Raises:
            ValueError: If it is a model of words, or has relative positions, gates, grouped keys or
                the like.
    """
    gated = next(filter(GATED.search, tensors), None)
    grouped = _grouped(tensors, layout)
    if gated is not None or grouped:
        what = [] if gated is None else [f"a gated MLP ({shown(gated)})"]
        what += [f"grouped keys ({grouped})"] if grouped else []
        norms = {p.kind for p in layout.pieces if "norm" in p.part}
        what += ["norms without biases (RMSNorm)"] if norms == {"weight"} else []
        kind = "a Llama-like block" if len(what) > 1 else "a model"
        raise ValueError(f"{kind} with {', '.join(what)}, which is not read from a file; {HOOK}.")
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
        kind = f"a model of word tokens ({words.name} {shape})"
        raise ValueError(f"{kind}; tokens must be numbers (x, y).")


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

    def __init__(self, what: str, rule: str) -> None:
        self.rule = f"{shown(what)} {rule}".lstrip()
        super().__init__(f"{self.rule}.")


@contextmanager
def of_file(file: Path) -> Iterator[None]:
    """Puts the file's name before errors inside; errors about a tensor also say how to state its
    part."""
    with naming(file):
        try:
            yield
        except TensorError as error:
            raise ValueError(
                f"{error.rule}; state its part by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, "
                f"where KNOWN is one of {', '.join(KNOWN)}."
            ) from None


def mapped(tensors: Tensors, rows: Iterable[str]) -> dict[str, Tensor]:
    """Tensors renamed by rows "theirs=known".

    The left side is a whole name, or whole words of names. Words before the last one stay. The
    ending, such as weight or kernel, stays too, unless both sides end in such a word.

    Raises:
            ValueError: If a row matches no name, or gives two tensors the same name.
    Example:
        >>> import torch
        >>> list(mapped({"block.final.kernel": torch.zeros(1)}, ["block.final=o_proj"]))
        ['block.o_proj.kernel']
    """
    named = dict(tensors)
    for row in rows:
        theirs, _, known = row.partition("=")
        words = re.split(r"[./]", theirs)
        kind = words.pop() if len(words) > 1 and words[-1] in KINDS else ""
        path = theirs.removesuffix(kind).rstrip("./").removesuffix(words[-1])
        whole = kind and known.rpartition(".")[2] in KINDS
        after = "" if whole else theirs[len(path) + len(words[-1]) :]
        new = (path + known + after).replace("\\", r"\\")
        pattern = re.compile(rf"(^|[./])({re.escape(theirs)})(?=$|[./])")
        renamed = {pattern.sub(rf"\g<1>{new}", name): tensor for name, tensor in named.items()}
        if not any(map(pattern.search, named)):
            names = ", ".join(map(shown, [*named][:8]))
            raise ValueError(f"map must name whole words of a tensor's name, got {row!r}; the names are {names}.")  # fmt: skip
        if len(renamed) < len(named):
            raise ValueError(f"map must give different names to different tensors, got {row!r}.")
        named = renamed
    return named


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
    depth = max(map(len, words.values()), default=0)
    containers = dict.fromkeys(tuple(w[:n]) for n in range(depth) for w in words.values() if len(w) > n)  # fmt: skip
    for path in containers:
        inside = {n: t for n, t in tensors.items() if tuple(words[n][: len(path)]) == path}
        if not _is_stack(inside):
            continue
        ends = [n for n in inside if (piece := piece_of(n)) is not None and piece.part in ENDS]
        if ends:
            count = len(inside[ends[0]])
            raise ValueError(f"must hold one model, got {count} on the first axis of all tensors; write one of them.")  # fmt: skip
        named = {
            ".".join((*path[:-1], "layers", str(number), *words[name][len(path) :])): each
            for name, tensor in inside.items()
            for number, each in enumerate(tensor)
        }
        return {n: tensor for n, tensor in tensors.items() if n not in inside} | named
    return dict(tensors)


def _is_stack(tensors: Tensors) -> bool:
    """True if all have one first axis, and axes show that it counts layers of attention."""
    pieces = {name: piece for name in tensors if (piece := piece_of(name)) is not None}
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
