"""Somebody else's state dicts of models with norms and MLPs: a regression GPT-2, torch's encoder layers.

Everything a file says is checked against its own shapes before a library is imported or a model built;
what a file cannot say is taken from the reader's hints or assumed, and stated.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.native import write_folder
from mechinterp.checkpoints.outside import settle
from mechinterp.config import TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.layered import (
    ENCODER,
    GPT2,
    LayeredModel,
    LayerLaw,
    encoder_model,
    gpt2_model,
    n_layers,
    too_long,
)

if TYPE_CHECKING:
    from mechinterp.models.adapter import HookedPredictor

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
HEAD_KEYS = ("n_head", "num_attention_heads", "num_heads", "nhead", "n_heads")
# Field of LayerLaw: the settings that state it, and what holds where none does.
LAW_KEYS: dict[str, dict[str, tuple[tuple[str, ...], object]]] = {
    GPT2: {
        "activation": (("activation_function",), "gelu_new"),
        "layer_norm_eps": (("layer_norm_epsilon",), 1e-5),
    },
    ENCODER: {
        "activation": (("activation",), "relu"),
        "layer_norm_eps": (("layer_norm_eps",), 1e-5),
        "norm_first": (("norm_first",), False),
        "attend_to_self": (("attend_to_self",), True),
    },
}
# Where a folder written here has fields of the task.
TASK_KEY = "mechinterp_task"
ACTIVATIONS = {GPT2: ("gelu_new", "gelu", "relu", "silu", "tanh"), ENCODER: ("relu", "gelu")}
# Settings of GPT-2 that would make it another model.
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# The weight through which the outputs of a layer's heads go, and its axis of the heads.
PROJECTION = {
    GPT2: ("h.{}.attn.c_proj.weight", 0),
    ENCODER: ("layers.{}.self_attn.out_proj.weight", 1),
}
TOKENS = {
    GPT2: "x_1, y_1, ..., x_L, y_L, x_query; y padded with zeros to d_x; predicted at x_query",
    ENCODER: "(x_1, y_1), ..., (x_L, y_L), (x_query, 0); predicted at the last",
}


@dataclass(frozen=True, eq=False, repr=False)
class LayeredCheckpoint:
    """A layered model as its file gives it; the runnable model is built when it is asked for."""

    path: Path
    format: str
    """"gpt2" or "torch-encoder"."""
    task: TaskConfig
    n_layers: int
    law: LayerLaw
    assumed: Mapping[str, object]
    """What the file did not say and was filled in, by dotted name."""
    tensors: Mapping[str, Tensor]
    """Checked weights: GPT2Model's names or layers.{l}..., and read_in, read_out."""
    names: Mapping[str, str]
    """The file's own name of each of them."""

    def __repr__(self) -> str:
        layers = f"{self.n_layers} layer{'s' if self.n_layers > 1 else ''}"
        heads = f"{self.n_heads} head{'s' if self.n_heads > 1 else ''}"
        return f"LayeredCheckpoint({self.name}: {self.format}, {layers} of {heads}, d_x={self.task.d_x})"

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.resolve().name

    @property
    def n_heads(self) -> int:
        """Heads per layer."""
        return self.law.n_heads

    @cached_property
    def model(self) -> LayeredModel:
        """The runnable model, on the CPU."""
        if self.format == GPT2:
            return gpt2_model(self.tensors, self.law)
        return encoder_model(self.tensors, self.law, d_x=self.task.d_x, d_y=self.task.d_y)

    @cached_property
    def predictor(self) -> "HookedPredictor":
        """The model with hooks, as the analyses of heads take it."""
        from mechinterp.models.hooked_layers import layered_predictor

        return layered_predictor(self.model)

    def without(self, heads: Iterable[tuple[int, int]]) -> "LayeredCheckpoint":
        """The model with these heads' share of the output projections at zero; (layer, head), from 0."""
        tensors = dict(self.tensors)
        name, axis = PROJECTION[self.format]
        for layer, head in heads:
            weight = tensors[name.format(layer)].clone()
            width = weight.shape[axis] // self.n_heads
            weight.narrow(axis, head * width, width).zero_()
            tensors[name.format(layer)] = weight
        return replace(self, tensors=tensors)

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, with the names of the file that the model came from.

        config.json says what that file and its reader said; the rest is assumed again when it is read.

        Raises:
            CheckpointError: If the folder already holds a checkpoint or cannot be written.
        """
        said: dict[str, object] = {HEAD_KEYS[0]: self.n_heads}
        for name, (keys, _) in LAW_KEYS[self.format].items():
            if f"model.{name}" not in self.assumed:
                said[keys[0]] = getattr(self.law, name)
        task = flatten(asdict(self.task), "task.")
        stated = {name: value for name, value in task.items() if name not in self.assumed}
        said[TASK_KEY] = _nested(stated)["task"]
        tensors = {self.names[name]: tensor.clone() for name, tensor in self.tensors.items()}
        write_folder(Path(folder), said, tensors, history=None, snapshots={})


def layered_format(names: Iterable[str]) -> str | None:
    """Which kind of layered model these tensor names belong to, if any: "gpt2" or "torch-encoder".

    Example:
        >>> layered_format(["_read_in.weight", "_backbone.h.0.attn.c_attn.weight"])
        'gpt2'
        >>> layered_format(["self_attn.in_proj_weight", "self_attn.out_proj.weight"]) is None
        True
    """
    names = list(names)
    for format in (GPT2, ENCODER):
        beside = format == GPT2 or any(BESIDE_ATTENTION.fullmatch(name) for name in names)
        if beside and any(QKV[format].fullmatch(name) for name in names):
            return format
    return None


def read_layered(
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    format: str,
    hints: Hints,
    settings: Mapping[str, object],
) -> LayeredCheckpoint:
    """The layered model of a state dict.

    Args:
        format: "gpt2" or "torch-encoder", as `layered_format` says.
        settings: What a config.json beside the weights states (n_head, activation_function, ...); else empty.
    Raises:
        CheckpointError: If tensors are missing, unknown, not finite or of the wrong shape, the number of
            heads is not known or impossible, or a hint contradicts the file.
    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 8)
        >>> hints = Hints(n_heads=2)
        >>> read_layered(layer.state_dict(), Path("x.pt"), format="torch-encoder", hints=hints, settings={})
        LayeredCheckpoint(x.pt: torch-encoder, 1 layer of 2 heads, d_x=5)
    """
    stated = settings.get(TASK_KEY)
    if isinstance(stated, Mapping):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    names = _names(tensors, file, format)
    found = {name: tensors[there] for name, there in names.items()}
    for name, tensor in found.items():
        _require_numbers(tensor, f"{file}: {_shown(names[name])}")
    checks = _Checks(file, found, names)
    if format == GPT2:
        d_x, d_y = _check_gpt2(checks)
        width, length = found["wpe.weight"].shape[1], found["wpe.weight"].shape[0]
        most = (length - 1) // 2
        defaults = {"beta_var": 1.0, "noise_var": 0.0, "query_noise": False}
        defaults["context_length"] = min(2 * d_x, most)
    else:
        d_x, d_y = _check_encoder(checks, hints)
        width, most, defaults = found["layers.0.linear1.weight"].shape[1], None, {}
    task = _task(file, defaults | {"d_x": d_x, "d_y": d_y}, hints, most)
    law = _law(file, format, width, hints, settings)
    return LayeredCheckpoint(
        path=file,
        format=format,
        task=task,
        n_layers=n_layers(found),
        law=law,
        assumed=_assumed(task, law, format, _said(hints, settings, found)),
        tensors=found,
        names=names,
    )


@dataclass(frozen=True)
class _Checks:
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
            return _shown(self.names.get(name, f"_{name}"))
        like = next(n for n in self.names if n.endswith(("in_proj_weight", "attn.c_attn.weight")))
        start, number = _stem(self.names[like])
        if name.startswith("layers.") and number is None:
            return _shown(start + name.split(".", 2)[2])
        return _shown(start + name.removeprefix("layers."))


def _unknown(file: Path, name: str) -> str:
    """What to say of a tensor that has no place."""
    return f"{file}: {_shown(name)} is not among the tensors of such a model."


def _stem(name: str) -> tuple[str, str | None]:
    """The text before a layer's tensors, and the layer's number, from the name of its query weights."""
    match = QKV[GPT2].fullmatch(name) or QKV[ENCODER].fullmatch(name)
    assert match is not None
    return match[1], match[2]


def _names(tensors: Mapping[str, Tensor], file: Path, format: str) -> dict[str, str]:
    """Our names to the file's; what no regression model uses is left out."""
    stems = sorted({_stem(name)[0] for name in tensors if QKV[format].fullmatch(name)})
    if not stems:
        wanted = "h.0.attn.c_attn.weight" if format == GPT2 else "self_attn.in_proj_weight"
        raise CheckpointError(f"{file}: a file of format {format} must hold {wanted}, got none.")
    if len(stems) > 1:
        listed = ", ".join(repr(_shown(stem)) for stem in stems)
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
                f"{file}: {_shown(names[name])} and {_shown(there)} stand for the same tensor."
            )
        names[name] = there
    numbers = {name.split(".")[1] for name in names if re.match(rf"(?:h|layers)\.{INDEX}\.", name)}
    missing = sorted(set(map(str, range(len(numbers)))) - numbers, key=int)
    if missing:
        raise CheckpointError(f"{file}: layer {missing[0]} of {len(numbers)} is missing.")
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


def _check_gpt2(checks: _Checks) -> tuple[int, int]:
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


def _check_encoder(checks: _Checks, hints: Hints) -> tuple[int, int]:
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


def _task(file: Path, defaults: Mapping[str, object], hints: Hints, most: int | None) -> TaskConfig:
    """The task, as given and else as assumed, with the sizes that the shapes show."""
    given = dict(hints.task or {})
    for name in ("d_x", "d_y"):
        for said in (getattr(hints, name), given.get(name)):
            if said is not None and said != defaults[name]:
                raise CheckpointError(
                    f"{file}: {name} must be the weights' {defaults[name]}, got {said}."
                )
    try:
        task = build(TaskConfig, dict(defaults) | given, "task.")
        if most is not None and task.context_length > most:
            raise ValueError(too_long(task.context_length, most))
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    return task


def _law(
    file: Path, format: str, width: int, hints: Hints, settings: Mapping[str, object]
) -> LayerLaw:
    n_heads = _n_heads(file, width, hints, settings)
    values: dict[str, object] = {
        name: next((settings[key] for key in keys if key in settings), default)
        for name, (keys, default) in LAW_KEYS[format].items()
    }
    if values["activation"] not in ACTIVATIONS[format]:
        raise CheckpointError(
            f"{file}: the activation must be one of {', '.join(ACTIVATIONS[format])}, got {values['activation']!r}."
        )
    for key, value in ONLY.items():
        if format == GPT2 and settings.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} must be {value}, got {settings[key]!r}.")
    if format == GPT2 and hints.attend_to_self is False:
        raise CheckpointError(
            f"{file}: attend_to_self must be true, as GPT-2's mask is, got False."
        )
    scale = (width // n_heads) ** -0.5
    if hints.scale is not None and not math.isclose(hints.scale, scale, rel_tol=1e-6):
        raise CheckpointError(
            f"{file}: scale must be 1/sqrt(d_head) = {scale:.6g}, as such layers have, got {hints.scale}."
        )
    if hints.attend_to_self is not None:
        stated = settings.get("attend_to_self")
        stated = stated if isinstance(stated, bool) else None
        values["attend_to_self"] = settle(file, "attend_to_self", stated, hints.attend_to_self)
    try:
        law = build(LayerLaw, values | {"n_heads": n_heads})
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    if law.layer_norm_eps < 0:
        raise CheckpointError(f"{file}: layer_norm_eps must be >= 0, got {law.layer_norm_eps}.")
    return law


def _n_heads(file: Path, width: int, hints: Hints, settings: Mapping[str, object]) -> int:
    stated = {key: settings[key] for key in HEAD_KEYS if settings.get(key) is not None}
    if hints.n_heads is not None:
        stated = {"hint": hints.n_heads} | stated
    if not stated:
        raise CheckpointError(f"{file}: n_heads is not in the file; give --n-heads (n_heads=).")
    n_heads = next(iter(stated.values()))
    for key, value in stated.items():
        if value != n_heads:
            raise CheckpointError(
                f"{file}: n_heads must be {key} = {value!r}, as stated beside the file, got {n_heads!r}."
            )
    if type(n_heads) is not int or n_heads < 1 or width % n_heads:
        raise CheckpointError(
            f"{file}: n_heads must be a divisor of the width {width}, got {n_heads!r}."
        )
    return n_heads


def _said(hints: Hints, settings: Mapping[str, object], tensors: Mapping[str, Tensor]) -> set[str]:
    """Dotted names of what the reader or the file said; d_x and d_y imply each other."""
    said = {"task.d_x", *flatten(dict(hints.task or {}), "task.")}
    sizes = (hints.d_x, hints.d_y, *(dict(hints.task or {}).get(name) for name in ("d_x", "d_y")))
    if "read_out.weight" in tensors or any(size is not None for size in sizes):
        said.add("task.d_y")
    if hints.attend_to_self is not None:
        said.add("model.attend_to_self")
    return said | set(settings)


def _assumed(
    task: TaskConfig, law: LayerLaw, format: str, said: Collection[str]
) -> dict[str, object]:
    """What neither the file nor the reader said, by dotted name."""
    values = flatten(asdict(task), "task.")
    for name, (keys, _) in LAW_KEYS[format].items():
        if not set(keys) & set(said):
            values[f"model.{name}"] = getattr(law, name)
    values["model.tokens"] = TOKENS[format]
    return {name: value for name, value in values.items() if name not in said}


def _nested(values: Mapping[str, object]) -> dict:
    """A nested dictionary from values by dotted name."""
    groups: dict = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = groups
        for group in outer:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return groups


def _require_numbers(tensor: Tensor, what: str) -> None:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{what} must hold floating-point numbers of 16, 32 or 64 bits, got {tensor.dtype}, {tensor.layout}."
        )
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held < tensor.numel():
        raise CheckpointError(
            f"{what} of shape {tuple(tensor.shape)} must hold {tensor.numel()} numbers, got {held}."
        )
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise CheckpointError(f"{what} must hold finite numbers, got {bad} NaN or infinite.")


def _shown(name: str) -> str:
    """A name from a file, fit for one line."""
    plain = name if name.isprintable() else repr(name)
    return plain if len(plain) <= 100 else f"{plain[:97]}..."
