"""Somebody else's state dicts of models with norms and MLPs: a regression GPT-2, torch's encoder layers.

Everything a file says is checked against its own shapes; what it cannot say is taken from the reader's hints or
assumed, and stated.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import COLUMNS, Hints
from mechinterp.checkpoints.layer_models import NORM_EPS
from mechinterp.checkpoints.layer_readings import Options, best_reading
from mechinterp.checkpoints.layered_parts import layered_parts
from mechinterp.checkpoints.layered_tensors import (
    ENCODER,
    GPT2,
    Checks,
    encoder_sizes,
    gpt2_sizes,
    n_layers,
    own_names,
    require_numbers,
    shown_name,
)
from mechinterp.checkpoints.named_weights import joined
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.outside import settle, stated_heads, stated_task
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.weights import Weights

# Field of ModelConfig: the settings of a GPT-2 that state it, and what holds where none does.
STATED: dict[str, tuple[tuple[str, ...], object]] = {
    "activation": (("activation_function",), "gelu_new"),
    "norm_eps": (("layer_norm_epsilon",), 1e-5),
}
ACTIVATIONS = {GPT2: ("gelu_new", "gelu", "relu", "silu", "tanh"), ENCODER: ("relu", "gelu")}
USUAL: Options = {
    "norm": ("after", "before"),
    "context_only": (True, False),
    "score": ("softmax",),
    "residual": (True,),
    "columns": COLUMNS,
}
"""What torch.nn.TransformerEncoderLayer settles, and in which order the rest is tried."""
KNOWN = {
    GPT2: {"score", "score_slope", "columns", "sign", "output_scale", "output_column"},
    ENCODER: {"score", "score_slope", "output_scale"},
}
"""Arguments of `load` that a format leaves no room for."""
# Settings of GPT-2 that would make it another model.
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Where a folder that an earlier version wrote has fields of the task.
TASK_KEY = "mechinterp_task"
TOKENS = {
    "in_turn": "x_1, y_1, ..., x_L, y_L, x_query; y padded with zeros to d_x; predicted at x_query",
    "pairs": "(x_1, y_1), ..., (x_L, y_L), (x_query, 0); predicted at the last",
}


def read_layered(
    tensors: Mapping[str, Tensor],
    file: Path,
    *,
    format: str,
    hints: Hints,
    settings: Mapping[str, object],
) -> Checkpoint:
    """The model of a state dict.

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
        Checkpoint(x.pt: 1 layer of 2 heads with MLPs, d_x=5, context_length=40)
    """
    for option in KNOWN[format] & set(hints.given):
        raise CheckpointError(f"{file}: {option} is known of format {format} and not to be given.")
    stated = settings.get(TASK_KEY)
    if isinstance(stated, Mapping):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    names = own_names(tensors, file, format)
    found = {name: tensors[there] for name, there in names.items()}
    for name, tensor in found.items():
        require_numbers(tensor, f"{file}: {shown_name(names[name])}")
    checks = Checks(file, found, names)
    if format == ENCODER:
        return _read_encoder(checks, hints, settings)
    return _read_gpt2(checks, hints, {**settings, **_joined(file, hints)})


def _read_gpt2(checks: Checks, hints: Hints, settings: Mapping[str, object]) -> Checkpoint:
    """The model of a regression GPT-2, whose code settles all but its task."""
    file, found = checks.file, checks.tensors
    sizes = gpt2_sizes(checks)
    model = _architecture(file, found, hints, settings)
    defaults = _gpt2_task(model, sizes) | stated_task(settings, model)
    task = _task(file, defaults, hints, model)
    weights = joined(
        layered_parts(found, GPT2, model.n_heads),
        model,
        sizes,
        positions=found.get("wpe.weight"),
        said={"residual": True, "sign": "plus", "columns": "x,y", "output_column": None},
    )
    return Checkpoint(
        path=file,
        config=ExperimentConfig(task=task, model=model),
        step=0,
        weights=Weights(model, *sizes, weights),
        format=GPT2,
        assumed=_assumed(task, model, hints, settings),
    )


def _read_encoder(checks: Checks, hints: Hints, settings: Mapping[str, object]) -> Checkpoint:
    """The model of torch's encoder layers; where norms stand and what a token reads, the loss decides."""
    file, found = checks.file, checks.tensors
    d_x, d_y = encoder_sizes(checks, hints)
    if "read_in.weight" not in found:
        _require_sizes(file, {"d_x": d_x, "d_y": d_y}, hints)
    if "residual" in (hints.model or {}):
        raise CheckpointError(f"{file}: residual is known of format {ENCODER} and not to be given.")
    width = found["layers.0.linear1.weight"].shape[1]
    n_heads = stated_heads(file, hints, settings, width=width, shown=None)
    _require_own_scale(file, hints, width // n_heads)
    activation = {**settings, **(hints.model or {})}.get("activation", "relu")
    _require_activation(file, activation, ENCODER)
    attend = settings.get("attend_to_self")
    if isinstance(attend, bool):
        settle(file, "attend_to_self", attend, hints.attend_to_self)
    parts = layered_parts(found, ENCODER, n_heads)
    checkpoint = best_reading(
        [({}, parts)], file, hints=hints, settings=settings, usual=USUAL, format=ENCODER
    )
    model = checkpoint.config.model
    assumed = {n: value for n, value in checkpoint.assumed.items() if n != "attn_scale"}
    if not set(NORM_EPS) & set(settings):
        assumed["model.norm_eps"] = model.norm_eps
    return replace(checkpoint, assumed=assumed | {"model.tokens": TOKENS[model.layout]})


def _joined(file: Path, hints: Hints) -> dict[str, object]:
    """What the reader says of how the parts of a GPT-2 are joined, by the names of settings."""
    for name in (hints.model or {}).keys() - STATED.keys():
        raise CheckpointError(f"{file}: {name} is known of format {GPT2} and not to be given.")
    return {STATED[name][0][0]: value for name, value in (hints.model or {}).items()}


def _gpt2_task(model: ModelConfig, sizes: tuple[int, int]) -> dict[str, object]:
    """The task of the code of Garg et al., for the sizes that the shapes show."""
    assert model.longest_context is not None
    usual: dict[str, object] = {"beta_var": 1.0, "noise_var": 0.0, "query_noise": False}
    length = min(2 * sizes[0], model.longest_context)
    return usual | {"d_x": sizes[0], "d_y": sizes[1], "context_length": length}


def _require_sizes(file: Path, sizes: Mapping[str, object], hints: Hints) -> None:
    """Refuse a d_x or d_y that the shapes contradict."""
    for name in ("d_x", "d_y"):
        for said in (getattr(hints, name), dict(hints.task or {}).get(name)):
            if said is not None and said != sizes[name]:
                raise CheckpointError(
                    f"{file}: {name} must be the weights' {sizes[name]}, got {said}."
                )


def _task(
    file: Path, defaults: Mapping[str, object], hints: Hints, model: ModelConfig
) -> TaskConfig:
    """The task, as given and else as assumed, with the sizes that the shapes show."""
    _require_sizes(file, defaults, hints)
    try:
        task = build(TaskConfig, {**defaults, **dict(hints.task or {})}, "task.")
        ExperimentConfig(task=task, model=model)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    return task


def _architecture(
    file: Path, found: Mapping[str, Tensor], hints: Hints, settings: Mapping[str, object]
) -> ModelConfig:
    """The architecture of a GPT-2: what the shapes show, what is stated beside the weights, and what is assumed."""
    width, inner = found["h.0.mlp.c_fc.weight"].shape
    n_heads = stated_heads(file, hints, settings, width=width, shown=None)
    values: dict[str, object] = {
        name: next((settings[key] for key in keys if key in settings), default)
        for name, (keys, default) in STATED.items()
    }
    _require_activation(file, values["activation"], GPT2)
    for key, value in ONLY.items():
        if settings.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} must be {value}, got {settings[key]!r}.")
    if hints.attend_to_self is False:
        raise CheckpointError(
            f"{file}: attend_to_self must be true, as GPT-2's mask is, got False."
        )
    _require_own_scale(file, hints, width // n_heads)
    values |= {"n_layers": n_layers(found), "n_heads": n_heads, "d_head": width // n_heads}
    values |= {"norm": "before", "final_norm": True, "biases": True, "attend_to_self": True}
    values |= {"d_model": width, "d_mlp": inner, "layout": "in_turn"}
    try:
        return build(ModelConfig, values | {"n_positions": len(found["wpe.weight"])}, "model.")
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None


def _require_activation(file: Path, activation: object, format: str) -> None:
    if activation not in ACTIVATIONS[format]:
        raise CheckpointError(
            f"{file}: the activation must be one of {', '.join(ACTIVATIONS[format])}, got {activation!r}."
        )


def _require_own_scale(file: Path, hints: Hints, d_head: int) -> None:
    """Refuse a scale that such layers do not have."""
    scale = d_head**-0.5
    if hints.scale is not None and not math.isclose(hints.scale, scale, rel_tol=1e-6):
        raise CheckpointError(
            f"{file}: scale must be 1/sqrt(d_head) = {scale:.6g}, as such layers have, got {hints.scale}."
        )


def _assumed(
    task: TaskConfig, model: ModelConfig, hints: Hints, settings: Mapping[str, object]
) -> dict[str, object]:
    """What neither a GPT-2's file nor the reader said, by dotted name."""
    values = flatten(asdict(task), "task.")
    for name, (keys, _) in STATED.items():
        if not set(keys) & set(settings):
            values[f"model.{name}"] = getattr(model, name)
    values["model.tokens"] = TOKENS[model.layout]
    said = {"task.d_x", "task.d_y", *flatten(dict(hints.task or {}), "task.")}
    said |= {f"task.{name}" for name in stated_task(settings, model)}
    return {name: value for name, value in values.items() if name not in said} | {"step": 0}
