"""The tensors of layers with known names, by what they are: attention, norms, MLPs and the ways in and out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.layered_tensors import require_numbers, shown_name
from mechinterp.checkpoints.named_matrices import attention_matrices
from mechinterp.checkpoints.names import Layout, Piece
from mechinterp.checkpoints.outside import require_shape, settle, stated_heads

READ = ("read_mlp", "read_in", "read_out")


@dataclass(frozen=True)
class Parts:
    """The tensors of a file by what they are, matrices [in, out]."""

    layers: tuple[dict[str, Tensor], ...]
    """Per layer query, key, value, out, mlp_in, mlp_out, norm1, norm2 .weight and .bias, those that are there."""
    ends: dict[str, Tensor]
    n_heads: int

    @property
    def width(self) -> int:
        """Width of the stream."""
        return len(self.layers[0]["query.weight"])

    @property
    def width_written(self) -> int:
        """Entries of the stream that a prediction without a read-out is taken from."""
        return (
            self.layers[-1]["mlp_out.weight"].shape[1] if self.has("mlp_out.weight") else self.width
        )

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.layers[0]["query.weight"].shape[1] // self.n_heads

    @property
    def d_token(self) -> int:
        """Entries of a token that are read."""
        first = self.ends.get("read_mlp.weight", self.ends.get("read_in.weight"))
        return self.width if first is None else len(first)

    def has(self, name: str) -> bool:
        """Whether every layer has a part, or the ends have it."""
        return name in self.ends or all(name in layer for layer in self.layers)

    @property
    def biases(self) -> bool:
        """Whether there are biases besides those of norms."""
        named = [*self.ends, *(name for layer in self.layers for name in layer)]
        return any(name.endswith(".bias") and "norm" not in name for name in named)


def parts_of(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    file: Path,
    *,
    axes: str,
    hints: Hints,
    settings: Mapping[str, object],
) -> Parts:
    """The tensors of a file, sorted and held against each other.

    Args:
        axes: One of ORIENTATIONS, for matrices whose names do not say it.
    Raises:
        CheckpointError: If shapes do not fit together, or a part has no place here.
    """
    for name, tensor in tensors.items():
        require_numbers(tensor, f"{file}: {shown_name(name)}")
    layers: list[dict[str, Tensor]] = []
    shown: int | None = None
    for pieces in layout.layers:
        matrices, n_heads = attention_matrices(pieces, tensors, file, axes=axes)
        shown = settle(file, "n_heads", shown, n_heads)
        found = {n: t.mT if n.endswith("weight") else t for n, t in matrices.items()}
        if "out.weight" not in found:
            raise CheckpointError(
                f"{file}: an output projection is needed beside {pieces[0].name}, got none."
            )
        width, inner = (layers[0] if layers else found)["query.weight"].shape
        found |= _beside(pieces, tensors, file, width)
        _require_shapes(found, file, _layer_shapes(found, width, inner))
        for name in {"out.weight", "out.bias"} & set(found):
            found[name] = found[name] * (hints.output_scale or 1)
        if layers and found.keys() ^ layers[0].keys():
            other = min(found.keys() ^ layers[0].keys())
            raise CheckpointError(f"{file}: layers must be alike, got {other} in some of them.")
        layers.append(found)
    width, inner = layers[0]["query.weight"].shape
    n_heads = stated_heads(file, hints, settings, width=inner, shown=shown)
    return Parts(tuple(layers), _ends(tensors, layout, file, width), n_heads)


def _ends(
    tensors: Mapping[str, Tensor], layout: Layout, file: Path, width: int
) -> dict[str, Tensor]:
    """Read-in, read-out, positions and final norm."""
    ends: dict[str, Tensor] = {}
    for (part, kind), piece in layout.ends.items():
        tensor = tensors[piece.name]
        if part in ("words", "words_out"):
            continue
        if part == "positions" and tensor.ndim == 3 and 1 in tensor.shape[:2]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        if part in READ and kind == "weight":
            if tensor.ndim != 2:
                raise CheckpointError(f"{file}: {piece.name} must be a matrix.")
            tensor = tensor.mT if piece.axes != "in,out" else tensor
        ends[f"{part}.{kind}"] = tensor
    if "read_in.weight" in ends and "read_out.weight" not in ends:
        raise CheckpointError(f"{file}: a read-in needs a read-out beside it, got none.")
    if "read_mlp.weight" in ends and "read_in.weight" not in ends:
        raise CheckpointError(f"{file}: a read-in of two layers needs both, got the first alone.")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("final_norm.weight", "final_norm.bias", "read_in.bias"), (width,)
    )
    columns = {name: t.shape[-1] for name, t in ends.items() if t.ndim == 2}
    rows = {name: len(t) for name, t in ends.items() if t.ndim == 2}
    hidden = columns.get("read_mlp.weight")
    shapes["read_in.weight"] = (hidden or rows.get("read_in.weight", 1), width)
    shapes["positions.weight"] = (rows.get("positions.weight", 1), width)
    if hidden is not None:
        shapes |= {"read_mlp.weight": (rows["read_mlp.weight"], hidden), "read_mlp.bias": (hidden,)}
    if "read_out.weight" in ends:
        n_out = columns["read_out.weight"]
        shapes |= {"read_out.weight": (width, n_out), "read_out.bias": (n_out,)}
    _require_shapes(ends, file, shapes)
    return ends


def _layer_shapes(
    found: Mapping[str, Tensor], width: int, inner: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors, matrices [in, out]; the MLP may be of any inner width."""
    shapes: dict[str, tuple[int, ...]] = {"out.weight": (inner, width), "out.bias": (width,)}
    for name in ("query", "key", "value"):
        shapes |= {f"{name}.weight": (width, inner), f"{name}.bias": (inner,)}
    for name in ("norm1", "norm2"):
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    if "mlp_in.weight" in found:
        hidden, written = found["mlp_in.weight"].shape[1], found["mlp_out.weight"].shape[1]
        shapes |= {"mlp_in.weight": (width, hidden), "mlp_in.bias": (hidden,)}
        shapes |= {"mlp_out.weight": (hidden, min(written, width))}
        shapes["mlp_out.bias"] = shapes["mlp_out.weight"][1:]
    return shapes


def _require_shapes(
    found: Mapping[str, Tensor], file: Path, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for name, tensor in found.items():
        matrix = f"{name.rpartition('.')[0]}.weight"
        if name not in shapes or matrix not in found:
            raise CheckpointError(f"{file}: {name} has no matrix beside it.")
        require_shape(file, name, tensor, shapes[name])


def _beside(
    pieces: Sequence[Piece], tensors: Mapping[str, Tensor], file: Path, width: int
) -> dict[str, Tensor]:
    """Norms and MLP of a layer; matrices [in, out], turned so that they meet the stream."""
    found: dict[str, Tensor] = {}
    by_columns = _has_conv1d(pieces, tensors)
    for piece in pieces:
        name, tensor = f"{piece.part}.{piece.kind}", tensors[piece.name]
        if piece.part not in ("mlp_in", "mlp_out", "norm1", "norm2"):
            continue
        if name in found:
            raise CheckpointError(
                f"{file}: {piece.name} is a second tensor for {name}; MLPs have two layers here."
            )
        if piece.part.startswith("mlp") and piece.kind == "weight":
            if tensor.ndim != 2:
                raise CheckpointError(f"{file}: {piece.name} must be a matrix.")
            near = 0 if piece.part == "mlp_in" else 1
            by_torch = tensor.shape[1 - near] == width and piece.axes != "in,out" and not by_columns
            tensor = tensor.mT if by_torch or tensor.shape[near] != width else tensor
        found[name] = tensor
    if "norm2.weight" in found and not {"mlp_in.weight", "mlp_out.weight"} & found.keys():
        # Two norms around attention alone: those of a layer whose MLP writes zeros.
        zeros = found["norm2.weight"].new_zeros(width, 1)
        found |= {"mlp_in.weight": zeros, "mlp_out.weight": zeros.T}
    if ("mlp_in.weight" in found) != ("mlp_out.weight" in found):
        raise CheckpointError(f"{file}: an MLP needs both of its matrices, got one.")
    return found


def _has_conv1d(pieces: Sequence[Piece], tensors: Mapping[str, Tensor]) -> bool:
    """Whether queries, keys and values are one matrix [in, 3 width], as GPT-2 has all of its matrices."""
    shapes = [tensors[p.name].shape for p in pieces if (p.part, p.kind) == ("qkv", "weight")]
    return any(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in shapes)
