"""Parts of a model that the names of a file stand for; shapes decide where a name alone does not."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mechinterp.checkpoints.foreign.tensors.names import (
    ATTENTION,
    COMPLETE,
    ENDS,
    INNER,
    TRANSPOSED,
    Piece,
    Tensors,
    piece_of,
)


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
    widths = {
        n for p in pieces if p.part in INNER and p.kind == "weight" for n in tensors[p.name].shape
    }
    outputs = [p for p in pieces if p.part == "o" and p.kind == "weight" and p.path in paths]
    n_written = [
        min(tensors[p.name].shape, default=0)
        for p in pieces
        if p.part == "read_out" and p.kind == "weight"
    ]
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
        linear = (
            piece.kind == "bias"
            or f"{stem}.bias" in tensors
            or piece.name.endswith(("kernel", ".w"))
        )
        # Where both sizes are widths, a model of words writes as many outputs as there are words.
        fewer = into in widths and any(n < into for n in n_written)
        shaped = out in widths and (into not in widths or fewer)
        shaped = shaped and (bool(n_written) or not piece.name.endswith("W_E"))
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
