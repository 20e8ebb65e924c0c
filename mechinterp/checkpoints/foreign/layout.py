"""What the names of a file's tensors stand for, layer by layer, and which models of other kinds they tell."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.foreign.names import ATTENTION, ENDS, INNER, KNOWN, Piece, piece_of
from mechinterp.checkpoints.io.errors import naming


@dataclass(frozen=True)
class Layout:
    """The parts that a file's names stand for."""

    layers: tuple[tuple[Piece, ...], ...]
    """Attention, norms and MLP of every layer."""
    ends: dict[tuple[str, str], Piece]
    """Read-in, read-out, positions, words and final norm by part and kind."""
    unknown: tuple[str, ...]

    @property
    def pieces(self) -> list[Piece]:
        return [*(piece for layer in self.layers for piece in layer), *self.ends.values()]

    @property
    def lacking(self) -> list[str]:
        """The names in layers without queries, keys or values."""
        wanted = ({"q", "k", "v"}, {"qkv"}, {"q", "kv"}, {"qk", "v"})
        names = []
        for layer in self.layers:
            parts = {piece.part for piece in layer if piece.kind == "weight"}
            if not any(each <= parts for each in wanted):
                names += [piece.name for piece in layer]
        return names

    @property
    def open_axes(self) -> bool:
        """Whether the names leave open which end of a matrix is where."""
        pieces = [piece for layer in self.layers for piece in layer if piece.kind == "weight"]
        return any(piece.axes is None and piece.part in ATTENTION for piece in pieces)


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The parts that these names stand for."""
    read = {name: piece_of(name) for name in tensors}
    pieces = [piece for piece in read.values() if piece is not None]
    unknown = [name for name, piece in read.items() if piece is None]
    paths = {piece.path for piece in pieces if piece.part in INNER}
    layers: dict[int, list[Piece]] = {}
    ends: dict[tuple[str, str], Piece] = {}
    for piece in pieces:
        if piece.part not in ENDS and (piece.part != "o" or piece.path in paths):
            layers.setdefault(-1 if piece.layer is None else piece.layer, []).append(piece)
            continue
        part = "read_out" if piece.part == "o" else piece.part
        if part == "words" and _is_linear(piece, tensors):
            part = "read_in"
        key = (part, piece.kind)
        names = [each.name.split(".")[-2:-1] for each in (piece, ends.get(key, piece))]
        if key in ends and ["lm_head"] in names:  # of a model of words with a read-out of its own
            own = piece if names[1] == ["lm_head"] else ends[key]
            ends["words_out", piece.kind] = piece if own is not piece else ends[key]
            ends[key] = own
        elif key in ends or piece.layer is not None:
            unknown.append(piece.name)
        else:
            ends[key] = piece
    return Layout(tuple(tuple(layers[n]) for n in sorted(layers)), ends, tuple(unknown))


def _is_linear(piece: Piece, tensors: Mapping[str, Tensor]) -> bool:
    """Whether what is called an embedding has a bias, as a layer that reads numbers in; a table of words has none."""
    stem = piece.name.rpartition(".")[0]
    return piece.kind == "bias" or f"{stem}.bias" in tensors


OTHER_MODELS = {
    r"relative|rpe\.": "relative positions",
    r"rotary|inv_freq": "rotary positions",
    "fourier_proj": "tokens of random Fourier features",
    "cls_token": "class tokens",
    r"A_log|conv1d|dt_proj|ssm": "state-space models (Mamba)",
    r"conv1\.": "convolutions",
    r"lstm|gru\.|rnn\.|weight_[ih]h_l0": "recurrent layers",
    r"W_g\b|\bgates?\b|gate_proj": "gates",
    r"feature_map|kernel_proj|random_features|phi\.": "features of kernels",
    r"[EF]_block|\b[EF](?:_[kv])?(?:\.weight)?$|linformer|low_rank": "low-rank attention (Linformer, low-rank blocks)",
    r"\blayers?\.\d+\.scale$": "learned factors of layers, as of attention by kernels,",
    r"bias_[kv]$": "learned extra keys and values",
}
"""Parts of names that tell a model of another kind."""


def require_known_kind(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Refuse what names tell to be another kind of model, by what it is.

    Raises:
        ValueError: If it is a model of words, has relative positions, gates, or the like.
    """
    for mark, what in OTHER_MODELS.items():
        for name in tensors:
            if re.search(mark, name) or re.search(mark, name.lower()):
                raise TensorError(what, f"are not read, got {shown(name)}")
    words = layout.ends.get(("words", "weight"))
    if words is not None and ("read_in", "weight") not in layout.ends:
        shape = list(tensors[words.name].shape)
        if shape[0] == 1:  # the placeholder that files for HookedTransformer have
            return
        rule = f"({words.name} {shape}); numbers (x, y) are needed as tokens"
        raise TensorError("a model of word tokens", rule)


def shown(name: str) -> str:
    """A name from a file, fit for one line."""
    return name if len(name) <= 100 else f"{name[:97]}..."


class TensorError(ValueError):
    """A tensor of a file, or what it is part of, breaks a rule; its name may stand for another part."""

    def __init__(self, what: str, rule: str) -> None:
        self.rule = f"{shown(what)} {rule}".lstrip()
        super().__init__(f"{self.rule}.")


@contextmanager
def of_file(file: Path) -> Iterator[None]:
    """Puts the file's name before what is refused inside; what names a tensor tells how to say what it is."""
    with naming(file):
        try:
            yield
        except TensorError as error:
            raise ValueError(
                f"{error.rule}; say what it is by --map THEIRS=KNOWN (map=), such as --map my_queries=q_proj, "
                f"KNOWN being one of {', '.join(KNOWN)}."
            ) from None


def mapped(tensors: Mapping[str, Tensor], rows: Iterable[str]) -> dict[str, Tensor]:
    """The tensors with each row "theirs=known" applied to the parts of their names.

    Raises:
        ValueError: If a row fits no name, or makes two names one.
    """
    named = dict(tensors)
    for row in rows:
        theirs, _, known = row.partition("=")
        pattern = re.compile(rf"(^|[./])({re.escape(theirs)})(?=$|[./])")
        renamed = {pattern.sub(rf"\g<1>{known}", name): tensor for name, tensor in named.items()}
        if list(renamed) == list(named):
            raise ValueError(f"map must name a part of a tensor's name, got {row!r}.")
        if len(renamed) < len(named):
            raise ValueError(f"map must keep the names apart, got {row!r}.")
        named = renamed
    return named
