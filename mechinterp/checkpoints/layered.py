"""Somebody else's state dicts of models with norms and MLPs: a regression GPT-2, torch's encoder layers.

Everything a file says is checked against its own shapes; what it cannot say is taken from the reader's hints or
assumed, and stated.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import Hints
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
from mechinterp.checkpoints.outside import settle, stated_heads
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.weights import Weights

# Field of ModelConfig: the settings that state it, and what holds where none does.
STATED: dict[str, dict[str, tuple[tuple[str, ...], object]]] = {
    GPT2: {
        "activation": (("activation_function",), "gelu_new"),
        "norm_eps": (("layer_norm_epsilon",), 1e-5),
    },
    ENCODER: {
        "activation": (("activation",), "relu"),
        "norm_eps": (("layer_norm_eps",), 1e-5),
        "norm": (("norm_first",), "after"),
        "attend_to_self": (("attend_to_self",), True),
    },
}
ACTIVATIONS = {GPT2: ("gelu_new", "gelu", "relu", "silu", "tanh"), ENCODER: ("relu", "gelu")}
# Settings of GPT-2 that would make it another model.
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
# Where a folder that an earlier version wrote has fields of the task.
TASK_KEY = "mechinterp_task"
TOKENS = {
    GPT2: "x_1, y_1, ..., x_L, y_L, x_query; y padded with zeros to d_x; predicted at x_query",
    ENCODER: "(x_1, y_1), ..., (x_L, y_L), (x_query, 0); predicted at the last",
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
    settings = {**settings, **_joined(file, format, hints)}
    stated = settings.get(TASK_KEY)
    if isinstance(stated, Mapping):
        hints = replace(hints, task={**stated, **(hints.task or {})})
    names = own_names(tensors, file, format)
    found = {name: tensors[there] for name, there in names.items()}
    for name, tensor in found.items():
        require_numbers(tensor, f"{file}: {shown_name(names[name])}")
    checks = Checks(file, found, names)
    sizes = gpt2_sizes(checks) if format == GPT2 else encoder_sizes(checks, hints)
    model = _architecture(file, format, found, hints, settings)
    defaults: dict[str, object] = {"d_x": sizes[0], "d_y": sizes[1]}
    if format == GPT2:
        defaults |= _gpt2_task(settings, model, sizes[0])
    task = _task(file, defaults, hints, model)
    weights = joined(
        layered_parts(found, format, model.n_heads),
        model,
        sizes,
        positions=found.get("wpe.weight"),
        sign=1,
        apart=False,
    )
    return Checkpoint(
        path=file,
        config=ExperimentConfig(task=task, model=model),
        step=0,
        weights=Weights(model, *sizes, weights),
        format=format,
        assumed=_assumed(task, model, format, _said(hints, settings, found)),
    )


def _joined(file: Path, format: str, hints: Hints) -> dict[str, object]:
    """What the reader says of how parts are joined, by the names of settings."""
    found: dict[str, object] = {}
    for name, value in (hints.model or {}).items():
        if name not in STATED[format]:
            raise CheckpointError(
                f"{file}: {name} is known of format {format} and not to be given."
            )
        found[STATED[format][name][0][0]] = value == "before" if name == "norm" else value
    return found


def _gpt2_task(settings: Mapping[str, object], model: ModelConfig, d_x: int) -> dict[str, object]:
    """The task of the code of Garg et al., with the noise and the number of points that the settings state."""
    noise, points = settings.get("noise_std"), settings.get("n_points")
    length = points - 1 if isinstance(points, int) and points > 1 else 2 * d_x
    assert model.longest_context is not None
    return {
        "beta_var": 1.0,
        "noise_var": noise**2 if isinstance(noise, float) else 0.0,
        "query_noise": False,
        "context_length": min(length, model.longest_context),
    }


def _task(
    file: Path, defaults: Mapping[str, object], hints: Hints, model: ModelConfig
) -> TaskConfig:
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
        ExperimentConfig(task=task, model=model)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    return task


def _architecture(
    file: Path,
    format: str,
    found: Mapping[str, Tensor],
    hints: Hints,
    settings: Mapping[str, object],
) -> ModelConfig:
    """The architecture: what the shapes show, what is stated beside the weights, and what is assumed."""
    first = "h.0.mlp.c_fc.weight" if format == GPT2 else "layers.0.linear1.weight"
    # GPT-2 stores what multiplies from the right, torch.nn.Linear its transpose.
    width, inner = found[first].shape if format == GPT2 else found[first].shape[::-1]
    n_heads = stated_heads(file, hints, settings, width=width, shown=None)
    values = _stated(file, format, width // n_heads, hints, settings)
    try:
        values |= {"n_layers": n_layers(found), "n_heads": n_heads, "d_head": width // n_heads}
        values |= {"d_mlp": inner, **_around(format, found, width)}
        return build(ModelConfig, values, "model.")
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None


def _around(format: str, found: Mapping[str, Tensor], width: int) -> dict[str, object]:
    """What the tensors show of norms, biases, positions and the ways in and out."""
    if format == GPT2:
        return {
            "norm": "before",
            "final_norm": True,
            "biases": True,
            "attend_to_self": True,
            "d_model": width,
            "layout": "in_turn",
            "n_positions": len(found["wpe.weight"]),
        }
    return {
        "final_norm": "norm.weight" in found,
        "biases": any(name.endswith("bias") and "norm" not in name for name in found),
        "context_only": True,
        "d_model": width if "read_out.weight" in found else None,
    }


def _stated(
    file: Path, format: str, d_head: int, hints: Hints, settings: Mapping[str, object]
) -> dict[str, object]:
    """Fields of the architecture that no tensor shows."""
    values: dict[str, object] = {
        name: next((settings[key] for key in keys if key in settings), default)
        for name, (keys, default) in STATED[format].items()
    }
    if isinstance(values.get("norm"), bool):
        values["norm"] = "before" if values["norm"] else "after"
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
    scale = d_head**-0.5
    if hints.scale is not None and not math.isclose(hints.scale, scale, rel_tol=1e-6):
        raise CheckpointError(
            f"{file}: scale must be 1/sqrt(d_head) = {scale:.6g}, as such layers have, got {hints.scale}."
        )
    if hints.attend_to_self is not None:
        stated = settings.get("attend_to_self")
        stated = stated if isinstance(stated, bool) else None
        values["attend_to_self"] = settle(file, "attend_to_self", stated, hints.attend_to_self)
    return values


def _said(hints: Hints, settings: Mapping[str, object], tensors: Mapping[str, Tensor]) -> set[str]:
    """Dotted names of what the reader or the file said; d_x and d_y imply each other."""
    said = {"task.d_x", *flatten(dict(hints.task or {}), "task.")}
    sizes = (hints.d_x, hints.d_y, *(dict(hints.task or {}).get(name) for name in ("d_x", "d_y")))
    if "read_out.weight" in tensors or any(size is not None for size in sizes):
        said.add("task.d_y")
    if hints.attend_to_self is not None:
        said.add("model.attend_to_self")
    if "n_points" in settings:
        said.add("task.context_length")
    if "noise_std" in settings:
        said.add("task.noise_var")
    return said | set(settings)


def _assumed(
    task: TaskConfig, model: ModelConfig, format: str, said: Collection[str]
) -> dict[str, object]:
    """What neither the file nor the reader said, by dotted name."""
    values = flatten(asdict(task), "task.")
    for name, (keys, _) in STATED[format].items():
        if not set(keys) & set(said):
            values[f"model.{name}"] = getattr(model, name)
    values["model.tokens"] = TOKENS[format]
    return {name: value for name, value in values.items() if name not in said} | {"step": 0}
