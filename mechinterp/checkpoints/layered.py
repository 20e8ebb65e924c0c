"""Somebody else's state dicts of models with norms and MLPs: a regression GPT-2, torch's encoder layers.

Everything a file says is checked against its own shapes before a library is imported or a model built;
what a file cannot say is taken from the reader's hints or assumed, and stated.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line, printable
from mechinterp.checkpoints.folders import write_folder
from mechinterp.checkpoints.hints import Hints
from mechinterp.checkpoints.layered_tensors import (
    Checks,
    encoder_sizes,
    gpt2_sizes,
    own_names,
    require_numbers,
    shown_name,
)
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
        return printable(self.path.resolve().name)

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
            CheckpointError: If the folder is not empty or cannot be written.
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
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 8)
        >>> hints = Hints(n_heads=2)
        >>> read_layered(layer.state_dict(), Path("x.pt"), format="torch-encoder", hints=hints, settings={})
        LayeredCheckpoint(x.pt: torch-encoder, 1 layer of 2 heads, d_x=5)
    """
    stated = settings.get(TASK_KEY)
    if isinstance(stated, Mapping):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    names = own_names(tensors, file, format)
    found = {name: tensors[there] for name, there in names.items()}
    for name, tensor in found.items():
        require_numbers(tensor, f"{file}: {shown_name(names[name])}")
    checks = Checks(file, found, names)
    if format == GPT2:
        d_x, d_y = gpt2_sizes(checks)
        width, length = found["wpe.weight"].shape[1], found["wpe.weight"].shape[0]
        most = (length - 1) // 2
        defaults = {"beta_var": 1.0, "noise_var": 0.0, "query_noise": False}
        defaults["context_length"] = min(2 * d_x, most)
    else:
        d_x, d_y = encoder_sizes(checks, hints)
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
