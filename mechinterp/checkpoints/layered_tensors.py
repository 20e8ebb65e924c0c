"""Which tensors a file of a layered model holds: its names in ours, and their shapes.

A regression GPT-2 has GPT2Model's names, a stack of torch's encoder layers layers.{l}..., both with read_in and read_out.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.headers import require_finite
from mechinterp.checkpoints.hints import Hints

GPT2, ENCODER = "gpt2", "torch-encoder"
INDEX = r"(0|[1-9][0-9]{0,5})"
# The text before a layer's name and the layer's number, which a single encoder layer lacks.
QKV = {
    GPT2: re.compile(rf"((?:.*?\.)??)h\.{INDEX}\.attn\.c_attn\.weight"),
    ENCODER: re.compile(rf"((?:.*?\.)??)(?:{INDEX}\.)?self_attn\.in_proj_weight"),
}
BESIDE_ATTENTION = re.compile(r"(?:.*\.)?(?:linear[12]|norm[12])\.weight")
READ = re.compile(r"(?:.*\.)?_?(read_(?:in|out)\.(?:weight|bias))")
# Buffers of older GPT-2 files, and embeddings of words, which a regression model never uses.
DROPPED = re.compile(rf"h\.{INDEX}\.attn\.(?:masked_)?bias|wte\.weight|(?:.*\.)?lm_head\.weight")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layered_format(tensors: Mapping[str, Tensor], *, strict: bool = False) -> str | None:
    """Which kind of layered model these tensors belong to, if any: "gpt2" or "torch-encoder".

    Args:
        strict: Whether a GPT-2 counts only if it has all that Hugging Face's has: Conv1D's axes, norms, biases and
            learned positions, which the like-named models of nanoGPT and minGPT lack.
    Example:
        >>> layered_format(torch.nn.TransformerEncoderLayer(6, 2, 8).state_dict())
        'torch-encoder'
        >>> layered_format(torch.nn.MultiheadAttention(6, 2).state_dict()) is None
        True
    """
    for format in (GPT2, ENCODER):
        beside = format == GPT2 or any(BESIDE_ATTENTION.fullmatch(name) for name in tensors)
        if beside and any(QKV[format].fullmatch(name) for name in tensors):
            return None if strict and format == GPT2 and not _is_whole_gpt2(tensors) else format
    return None


def _is_whole_gpt2(tensors: Mapping[str, Tensor]) -> bool:
    ends = (".ln_1.weight", ".c_attn.bias", "wpe.weight", "ln_f.weight", "read_in.weight")
    shapes = [t.shape for name, t in tensors.items() if QKV[GPT2].fullmatch(name)]
    by_columns = all(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in shapes)
    return by_columns and all(any(name.endswith(end) for name in tensors) for end in ends)


@dataclass(frozen=True)
class Checks:
    """A file's tensors by our names, and its own names for what is said of them."""

    file: Path
    tensors: Mapping[str, Tensor]
    names: Mapping[str, str]

    def sizes(self, name: str) -> tuple[int, int]:
        """Both sizes of a matrix that must be there."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.file}: {self.shown(name)} is missing.")
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise CheckpointError(
                f"{self.file}: {self.shown(name)} must be a matrix, got shape {tuple(tensor.shape)}."
            )
        return tensor.shape[0], tensor.shape[1]

    def require(self, expected: Mapping[str, tuple[int, ...]], optional: Collection[str]) -> None:
        """Refuse what is missing, of another shape or has no place."""
        for name in self.tensors:
            if name not in expected:
                raise CheckpointError(_unknown(self.file, self.names[name]))
        for name, shape in expected.items():
            tensor = self.tensors.get(name)
            if tensor is None and name not in optional:
                raise CheckpointError(f"{self.file}: {self.shown(name)} is missing.")
            if tensor is not None and tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.file}: {self.shown(name)} must have shape {shape}, got {tuple(tensor.shape)}."
                )

    def shown(self, name: str) -> str:
        """The file's name of a tensor, and one like its neighbours' for a tensor it lacks."""
        if name in self.names or name.startswith("read_"):
            return shown_name(self.names.get(name, f"_{name}"))
        like = next(n for n in self.names if n.endswith(("in_proj_weight", "attn.c_attn.weight")))
        start, number = _stem(self.names[like])
        if name.startswith("layers.") and number is None:
            return shown_name(start + name.split(".", 2)[2])
        return shown_name(start + name.removeprefix("layers."))


def _unknown(file: Path, name: str) -> str:
    """What to say of a tensor that has no place."""
    return f"{file}: {shown_name(name)} is not among the tensors of such a model."


def _stem(name: str) -> tuple[str, str | None]:
    """The text before a layer's tensors, and the layer's number, from the name of its query weights."""
    match = QKV[GPT2].fullmatch(name) or QKV[ENCODER].fullmatch(name)
    assert match is not None
    return match[1], match[2]


def own_names(tensors: Mapping[str, Tensor], file: Path, format: str) -> dict[str, str]:
    """Our names to the file's; what no regression model uses is left out."""
    if format == ENCODER and all(re.match(rf"{INDEX}\.", name) for name in tensors):
        return _names_of_sequential(tensors, file)
    stems = sorted({_stem(name)[0] for name in tensors if QKV[format].fullmatch(name)})
    if not stems:
        wanted = "h.0.attn.c_attn.weight" if format == GPT2 else "self_attn.in_proj_weight"
        raise CheckpointError(f"{file}: a file of format {format} must hold {wanted}, got none.")
    if len(stems) > 1:
        listed = ", ".join(repr(shown_name(stem)) for stem in stems)
        raise CheckpointError(f"{file}: the layers must stand under one name, got {listed}.")
    names: dict[str, str] = {}
    for there in tensors:
        name = _own_name(there, format, stems[0])
        if format == GPT2 and DROPPED.fullmatch(name or there):
            continue
        if name is None:
            raise CheckpointError(_unknown(file, there))
        if name in names:
            raise CheckpointError(
                f"{file}: {shown_name(names[name])} and {shown_name(there)} stand for the same tensor."
            )
        names[name] = there
    numbers = {name.split(".")[1] for name in names if re.match(rf"(?:h|layers)\.{INDEX}\.", name)}
    missing = sorted(set(map(str, range(len(numbers)))) - numbers, key=int)
    if missing:
        raise CheckpointError(f"{file}: layer {missing[0]} of {len(numbers)} is missing.")
    return names


def _names_of_sequential(tensors: Mapping[str, Tensor], file: Path) -> dict[str, str]:
    """Our names to the file's where all stands in one nn.Sequential: a way in, encoder layers, a norm, a way out."""
    numbers = sorted({int(name.split(".")[0]) for name in tensors})
    missing = set(range(len(numbers))) - set(numbers)
    if missing:
        raise CheckpointError(
            f"{file}: module {min(missing)} of the nn.Sequential has no weights, and a file does not say what it does."
        )
    layers = [n for n in numbers if f"{n}.self_attn.in_proj_weight" in tensors]
    names: dict[str, str] = {}
    for there in tensors:
        number, _, rest = there.partition(".")
        if int(number) in layers:
            place = f"layers.{layers.index(int(number))}"
        elif int(number) < min(layers, default=0):
            place = "read_in"
        else:
            weight = tensors.get(f"{number}.weight")
            place = "norm" if weight is not None and weight.ndim == 1 else "read_out"
        if f"{place}.{rest}" in names:
            raise CheckpointError(_unknown(file, there))
        names[f"{place}.{rest}"] = there
    return names


def _own_name(there: str, format: str, stem: str) -> str | None:
    """Our name for a tensor of the file, None if it stands outside of the model."""
    read = READ.fullmatch(there)
    if read is not None:
        return read[1]
    last_norm = stem.removesuffix("layers.") + "norm."
    if format == ENCODER and there.startswith(last_norm):
        return there.removeprefix(last_norm.removesuffix("norm."))
    if not there.startswith(stem):
        return None
    rest = there.removeprefix(stem)
    if format == GPT2:
        return rest
    return f"layers.{rest}" if re.match(rf"{INDEX}\.", rest) else f"layers.0.{rest}"


def n_layers(tensors: Iterable[str]) -> int:
    """Number of layers among names such as h.0.ln_1.weight or layers.0.norm1.weight."""
    numbered = (name.split(".") for name in tensors)
    return len({parts[1] for parts in numbered if parts[0] in ("h", "layers")})


def gpt2_sizes(checks: Checks) -> tuple[int, int]:
    """d_x and d_y of a regression GPT-2 whose tensors are all there."""
    for end in ("read_in", "read_out"):
        if f"{end}.weight" not in checks.tensors:
            raise CheckpointError(
                f"{checks.file}: a GPT-2 needs a read_in and a read_out to take numbers, got no _{end}.weight."
            )
    width, d_x = checks.sizes("read_in.weight")
    n_positions, _ = checks.sizes("wpe.weight")
    _, inner = checks.sizes("h.0.mlp.c_fc.weight")
    d_y, _ = checks.sizes("read_out.weight")
    expected = _ends(width, d_x, d_y) | {"wpe.weight": (n_positions, width)}
    expected |= {f"ln_f.{part}": (width,) for part in ("weight", "bias")}
    linear = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(n_layers(checks.tensors)):
        for name, shape in linear.items():
            expected[f"h.{layer}.{name}.weight"] = shape
            expected[f"h.{layer}.{name}.bias"] = shape[1:]
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            expected[f"h.{layer}.{name}"] = (width,)
    checks.require(expected, optional=("read_in.bias", "read_out.bias"))
    if d_y > d_x:
        raise CheckpointError(
            f"{checks.file}: d_y must be <= d_x = {d_x}, as y is padded to a token of x, got {d_y}."
        )
    if n_positions < 3:
        raise CheckpointError(
            f"{checks.file}: {checks.shown('wpe.weight')} must have >= 3 positions (x, y, query), got {n_positions}."
        )
    return d_x, d_y


def encoder_sizes(checks: Checks, hints: Hints) -> tuple[int, int]:
    """d_x and d_y of a stack of encoder layers whose tensors are all there."""
    tensors = checks.tensors
    inner, width = checks.sizes("layers.0.linear1.weight")
    n_tokens = checks.sizes("read_in.weight")[1] if "read_in.weight" in tensors else width
    if "read_out.weight" in tensors:
        d_y = checks.sizes("read_out.weight")[0]
    elif "read_in.weight" in tensors:
        raise CheckpointError(
            f"{checks.file}: {checks.shown('read_in.weight')} needs a read_out, got no _read_out.weight."
        )
    else:
        d_y = _size_without_read_out(hints, width)
    if not 1 <= d_y < n_tokens:
        raise CheckpointError(
            f"{checks.file}: d_y must lie in 1 to {n_tokens - 1}, as tokens are d_x + d_y = {n_tokens} wide, got {d_y}."
        )
    expected = _ends(width, n_tokens, d_y)
    expected |= {f"norm.{part}": (width,) for part in ("weight", "bias")}
    biased = "layers.0.linear1.bias" in tensors
    for layer in range(n_layers(tensors)):
        expected |= {
            f"layers.{layer}.{name}": shape
            for name, shape in _encoder_shapes(width, inner).items()
            if biased or not name.endswith("bias")
        }
    checks.require(expected, optional=(*_ends(width, 0, 0), "norm.weight", "norm.bias"))
    if "norm.bias" in tensors and "norm.weight" not in tensors:
        raise CheckpointError(f"{checks.file}: {checks.shown('norm.bias')} has no norm.weight.")
    return n_tokens - d_y, d_y


def _encoder_shapes(width: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.in_proj_weight": (3 * width, width),
        "self_attn.in_proj_bias": (3 * width,),
        "self_attn.out_proj.weight": (width, width),
        "self_attn.out_proj.bias": (width,),
        "linear1.weight": (inner, width),
        "linear1.bias": (inner,),
        "linear2.weight": (width, inner),
        "linear2.bias": (width,),
    }
    norms = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")
    return shapes | {name: (width,) for name in norms}


def _ends(width: int, n_in: int, n_out: int) -> dict[str, tuple[int, ...]]:
    return {
        "read_in.weight": (width, n_in),
        "read_in.bias": (width,),
        "read_out.weight": (n_out, width),
        "read_out.bias": (n_out,),
    }


def _size_without_read_out(hints: Hints, width: int) -> int:
    """d_y where tokens (x, y) enter and leave as they are: as given, or what d_x leaves, or 1."""
    given = dict(hints.task or {})
    d_x, d_y = hints.d_x or given.get("d_x"), hints.d_y or given.get("d_y")
    if type(d_y) is int:
        return d_y
    return width - d_x if type(d_x) is int else 1


def require_numbers(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that does not hold finite floating-point numbers, one for each of its entries.

    Raises:
        CheckpointError: Naming `what`.
    """
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{what} must hold floating-point numbers of 16, 32 or 64 bits, got {tensor.dtype}, {tensor.layout}."
        )
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held < tensor.numel():
        raise CheckpointError(
            f"{what} of shape {tuple(tensor.shape)} must hold {tensor.numel()} numbers, got {held}."
        )
    require_finite(what, int((~torch.isfinite(tensor)).sum()))


def shown_name(name: str) -> str:
    """A name from a file, fit for one line."""
    plain = name if name.isprintable() else repr(name)
    return plain if len(plain) <= 100 else f"{plain[:97]}..."
