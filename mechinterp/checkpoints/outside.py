"""A checkpoint from what somebody else's file says of its one attention layer, and from what it does not.

What the file leaves open comes from the reader's hints, else from a stated setting: `Checkpoint.assumed`
holds it by name.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.folder_tensors import require_tensors
from mechinterp.checkpoints.hints import HEAD_KEYS, Hints
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.functional import AttentionWeights
from mechinterp.models.shapes import BIASES, NAMES
from mechinterp.models.weights import heads_of, weights_of_layer

Value = TypeVar("Value", bool, int, float, str)
UNSHOWN = {"model.score", "model.score_slope", "model.attend_to_self"}
"""What the tensors of one layer of attention do not show of it."""


@dataclass(frozen=True, eq=False)
class OneLayer:
    """What a file says of its one layer; None where it says nothing."""

    format: str
    tensors: Mapping[str, Tensor]
    """W_Q, W_K, W_V [head, d_model, d_head], W_O [head, d_head, d_model or d_y], and any of the biases."""
    d_y: int | None = None
    scale: float | None = None
    """Factor on the scores."""
    score: str | None = None
    columns: str | None = None
    """Order of a token's columns."""
    attend_to_self: bool | None = None
    merged_qk: bool = False
    """Whether the file has one matrix per head in place of W_Q W_K^T, here W_Q with W_K the identity."""
    task: Mapping[str, object] = field(default_factory=dict)
    """The task to assume, where it differs from the softmax paper's."""
    unsaid: Mapping[str, object] = field(default_factory=dict)
    """What else is assumed."""


def checkpoint_of(file: Path, layer: OneLayer, hints: Hints) -> Checkpoint:
    """The layer as a checkpoint, its weights brought to the scale 1/sqrt(d_head).

    Raises:
        CheckpointError: If shapes do not fit together, or a hint contradicts the file.
    """
    if hints.output_column is not None:
        layer = replace(layer, tensors=_at_column(file, layer, hints, hints.output_column))
    _require_shapes(file, layer.tensors)
    n_heads, _, d_head = layer.tensors["W_Q"].shape
    settle(file, "n_heads", n_heads, hints.n_heads)
    attend_to_self = settle(file, "attend_to_self", layer.attend_to_self, hints.attend_to_self)
    scale = settle(file, "scale", layer.scale, hints.scale)
    score = settle(file, "score", layer.score, hints.score)
    columns = settle(file, "columns", layer.columns, hints.columns)
    config, said = _config(
        file, layer, hints, attend_to_self=bool(attend_to_self), score=score or "softmax"
    )
    said |= {"model.attend_to_self"} if attend_to_self is not None else set()
    said |= {"model.score", "model.score_slope"} if score is not None else set()
    unsaid = dict(layer.unsaid) | ({"attn_scale": math.sqrt(d_head)} if scale is None else {})
    values = flatten(asdict(config)) | unsaid
    assumed = {name: value for name, value in values.items() if name not in said} | {"step": 0}
    y_first = columns == "y,x"
    tensors = _x_first(layer.tensors, config.task.d_y) if y_first else layer.tensors
    factor = (-1 if hints.sign == "minus" else 1) * (hints.output_scale or 1)
    tensors = {name: factor * t if name in ("W_O", "b_O") else t for name, t in tensors.items()}
    found = _weights(file, tensors, config, scale=scale)
    weights = weights_of_layer(found, model=config.model)
    return Checkpoint(file, config, 0, weights, layer.format, assumed)


def _at_column(file: Path, layer: OneLayer, hints: Hints, column: int) -> dict[str, Tensor]:
    """The tensors with those entries of the output alone that are the prediction."""
    d_model, written = layer.tensors["W_Q"].shape[1], layer.tensors["W_O"].shape[-1]
    given = {**dict(hints.task or {}), **hints.given}
    d_x, d_y = given.get("d_x"), layer.d_y or given.get("d_y")
    if not isinstance(d_y, int):
        d_y = d_model - d_x if isinstance(d_x, int) else 1
    if written < d_model:
        raise CheckpointError(
            f"{file}: output_column is for layers that write whole tokens, got one that writes {written} of {d_model} entries."
        )
    if column > written - d_y:
        raise CheckpointError(
            f"{file}: output_column must lie in 0 to {written - d_y}, got {column}."
        )
    ends = {name: layer.tensors[name] for name in ("W_O", "b_O") if name in layer.tensors}
    return {**layer.tensors, **{n: t[..., column : column + d_y] for n, t in ends.items()}}


def settle(file: Path, name: str, stated: Value | None, given: Value | None) -> Value | None:
    """What the file states or the reader gives.

    Raises:
        CheckpointError: If they differ.
    """
    if stated is None or given is None:
        return given if stated is None else stated
    close = name == "scale" and math.isclose(float(stated), float(given), rel_tol=1e-6)
    if not close and stated != given:
        raise CheckpointError(f"{file}: {name} must be the file's {stated}, got {given}.")
    return stated


def stated_heads(
    file: Path, hints: Hints, settings: Mapping[str, object], *, width: int, shown: int | None
) -> int:
    """The number of heads that the tensors show, a config file beside them states or the reader gives.

    Args:
        width: Of queries; heads lie side by side in it.
    Raises:
        CheckpointError: If there is none, they differ, or it does not divide the width.
    """
    n_heads = shown
    for name in HEAD_KEYS:
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{file}: {name}, stated beside it, must be an integer >= 1, got {value!r}."
            )
        n_heads = settle(file, name, n_heads, value)
    n_heads = settle(file, "n_heads", n_heads, hints.n_heads)
    if n_heads is None:
        raise CheckpointError(f"{file}: n_heads is not in the file; give --n-heads (n_heads=).")
    if width % n_heads:
        raise CheckpointError(f"{file}: n_heads must divide the width {width}, got {n_heads}.")
    return n_heads


def stated_task(settings: Mapping[str, object], model: ModelConfig) -> dict[str, object]:
    """Noise and context that a config file beside the weights states, by fields of TaskConfig.

    A context longer than the model has positions for is none that it takes, and not among them.
    """
    noise, points, most = (
        settings.get("noise_std"),
        settings.get("n_points"),
        model.longest_context,
    )
    found: dict[str, object] = {}
    if isinstance(noise, float):
        found["noise_var"] = noise**2
    if isinstance(points, int) and (most is None or points - 1 <= most):
        found["context_length"] = points - 1
    return found


def numbers(tensors: Mapping[str, Tensor], names: Collection[str], file: Path) -> list[Tensor]:
    """These tensors of a file.

    Raises:
        CheckpointError: If one is missing, or they are not finite floating-point numbers of one dtype.
    """
    shapes = {name: tuple(tensors[name].shape) if name in tensors else () for name in names}
    require_tensors(file, tensors, shapes)
    return [tensors[name] for name in names]


def require_shape(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape."""
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{file}: {name} must have shape {shape}, got {tuple(tensor.shape)}.")


def _require_shapes(file: Path, tensors: Mapping[str, Tensor]) -> None:
    first = tensors["W_Q"]
    if first.ndim != 3 or 0 in first.shape or first.shape[1] < 2:
        raise CheckpointError(
            f"{file}: W_Q must have shape [head, d_model >= 2, d_head], got {tuple(first.shape)}."
        )
    n_heads, d_model, d_head = first.shape
    for name in ("W_K", "W_V"):
        require_shape(file, name, tensors[name], (n_heads, d_model, d_head))
    W_O = tensors["W_O"]
    width = W_O.shape[-1] if W_O.ndim == 3 and 0 < W_O.shape[-1] < d_model else d_model
    require_shape(file, "W_O", W_O, (n_heads, d_head, width))
    for name in set(BIASES) & set(tensors):
        require_shape(file, name, tensors[name], (width,) if name == "b_O" else (n_heads, d_head))


def _biased(tensors: Mapping[str, Tensor]) -> bool:
    return any(bool(tensors[name].any()) for name in BIASES if name in tensors)


def _config(
    file: Path, layer: OneLayer, hints: Hints, *, attend_to_self: bool, score: str
) -> tuple[ExperimentConfig, set[str]]:
    """The config, and the names of its fields that are not assumed."""
    n_heads, d_model, d_head = layer.tensors["W_Q"].shape
    width = layer.tensors["W_O"].shape[2]
    stated = layer.d_y if width == d_model else settle(file, "d_y", width, layer.d_y)
    task = dict(hints.task or {})
    given = {name: hints.given.get(name, task.get(name)) for name in ("d_x", "d_y")}
    d_x, d_y = given["d_x"], stated if stated is not None else given["d_y"]
    if d_y is None:
        d_y = d_model - d_x if isinstance(d_x, int) else 1
    sizes = {"d_x": d_model - d_y, "d_y": d_y} if isinstance(d_y, int) else {}
    model = ModelConfig(
        n_heads=n_heads,
        d_head=None if d_head == d_model else d_head,
        score=score,
        score_slope=hints.score_slope or 1.0,
        attend_to_self=attend_to_self,
        biases=_biased(layer.tensors),
        merged_qk=layer.merged_qk,
    )
    try:
        filled = build(TaskConfig, {**layer.task, **sizes, **task}, "task.")
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    for name, size in sizes.items():
        for label, value in (("task.", getattr(filled, name)), ("", hints.given.get(name, size))):
            if value != size:
                raise CheckpointError(
                    f"{file}: {label}{name} must be the weights' {size}, got {value}."
                )
    said = {"task.d_x", "task.d_y", *flatten(task, "task.")}
    said |= {f"model.{each.name}" for each in fields(ModelConfig)} - UNSHOWN
    if stated is None and given == {"d_x": None, "d_y": None}:
        said.remove("task.d_y")
    return ExperimentConfig(task=filled, model=model), said


def _x_first(tensors: Mapping[str, Tensor], d_y: int) -> dict[str, Tensor]:
    """The tensors of tokens (y, x) as those of tokens (x, y); what writes y alone stays as it is."""
    d_model = tensors["W_Q"].shape[1]
    axes = dict.fromkeys(("W_Q", "W_K", "W_V"), 1) | {"W_O": -1, "b_O": -1}
    wide = {
        name for name in axes.keys() & tensors.keys() if tensors[name].shape[axes[name]] == d_model
    }
    turned = {name: tensors[name].roll(-d_y, axes[name]) for name in wide}
    return {**tensors, **turned}


def _weights(
    file: Path, tensors: Mapping[str, Tensor], config: ExperimentConfig, *, scale: float | None
) -> AttentionWeights:
    """The weights at the scale 1/sqrt(d_head), of W_O and b_O the y columns: in one layer only y is read."""
    found = {name: tensors[name] for name in NAMES}
    if config.model.biases:
        per_head, d_y = found["W_Q"][:, 0], config.task.d_y
        empty = {name: torch.zeros_like(per_head) for name in BIASES[:3]}
        empty["b_O"] = per_head.new_zeros(d_y)
        found |= {name: tensors.get(name, zeros) for name, zeros in empty.items()}
    for name in {"W_O", "b_O"} & set(found):
        found[name] = found[name][..., -config.task.d_y :].contiguous()
    native = config.d_head**-0.5
    if scale is not None and not math.isclose(scale, native, rel_tol=1e-6):
        for name in {"W_Q", "b_Q"} & set(found):
            found[name] = found[name] * (scale / native)
            if not torch.isfinite(found[name]).all():
                raise CheckpointError(
                    f"{file}: {name} must stay finite under the scale, got {scale:.4g}."
                )
    return heads_of(config.model, found, native)
