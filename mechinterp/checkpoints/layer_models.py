"""The model that the parts of layers make under one reading: its sizes, its architecture and what is assumed of it."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import COLUMNS, Hints
from mechinterp.checkpoints.named_parts import Parts
from mechinterp.checkpoints.named_weights import joined
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.outside import settle, stated_task
from mechinterp.checkpoints.readings import Said
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.weights import Weights

N_POSITIONS = 512
"""Rows of a table of sinusoidal positions."""
NORM_EPS = ("norm_eps", "layer_norm_eps", "layer_norm_epsilon")
"""Settings that state what layer norms add to the variance."""


def model_of_parts(
    parts: Parts, file: Path, said: Said, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """The model of one reading.

    Args:
        settings: What a config file beside the weights states.
    Raises:
        CheckpointError: If the parts do not make such a model.
    """
    d_x, d_y = _sizes(parts, file, said, hints)
    positions = parts.ends.get("positions.weight")
    if positions is None and said["positions"] == "sinusoidal":
        positions = _sinusoidal(N_POSITIONS, parts.width)
    fields = _model_fields(parts, said, positions, d_x + d_y)
    for name in set(NORM_EPS) & set(settings):
        fields["norm_eps"] = settings[name]
    try:
        model = build(ModelConfig, fields, "model.")
        stated = {**stated_task(settings, model), **dict(hints.task or {})}
        task = build(TaskConfig, {"d_x": d_x, "d_y": d_y, **stated}, "task.")
        most = model.longest_context
        if most is not None and "context_length" not in stated:
            task = replace(task, context_length=min(task.context_length, most))
        config = ExperimentConfig(task=task, model=model)
        found = joined(parts, model, (d_x, d_y), positions=positions, said=said)
        weights = Weights(model, task.d_x, task.d_y, found)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    scale = said["scale"]
    assert isinstance(scale, float | int)
    if scale != parts.d_head**-0.5:
        weights = replace(weights, scale=float(scale))
    beside = _assumed_task(parts, task, hints, stated)
    left_out = parts.d_token - (d_x + d_y) if said["layout"] == "pairs" else 0
    if left_out:
        beside["model.position_columns_left_out"] = left_out
    if hints.scale is None:
        beside["attn_scale"] = 1 / scale
    if hints.columns is None and said["layout"] == "pairs":
        beside["model.columns"] = said["columns"]
    return Checkpoint(file, config, 0, weights, assumed=beside)


def _assumed_task(
    parts: Parts, task: TaskConfig, hints: Hints, stated: Mapping[str, object]
) -> dict[str, object]:
    """Fields of the task that nobody said; d_x and d_y imply each other."""
    said = {"task.d_x", *flatten(dict(stated), "task.")}
    if parts.has("read_out.weight") or said_sizes(hints) != (None, None):
        said.add("task.d_y")
    return {n: v for n, v in flatten(asdict(task), "task.").items() if n not in said}


def said_sizes(hints: Hints) -> tuple[int | None, int | None]:
    """d_x and d_y as the reader says them."""
    given = {**dict(hints.task or {}), **hints.given}
    d_x, d_y = given.get("d_x"), given.get("d_y")
    return d_x if isinstance(d_x, int) else None, d_y if isinstance(d_y, int) else None


def _sizes(parts: Parts, file: Path, said: Said, hints: Hints) -> tuple[int, int]:
    """d_x and d_y; entries of tokens behind (x, y), where the reader says both sizes, are positions."""
    read, (asked, asked_d_y) = parts.ends.get("read_out.weight"), said_sizes(hints)
    d_y = settle(file, "d_y", None if read is None else read.shape[1], asked_d_y)
    in_turn = said["layout"] == "in_turn"
    if d_y is None:
        d_y = 1 if asked is None or in_turn else max(1, parts.d_token - asked)
    d_x = parts.d_token - (0 if in_turn else d_y)
    wide = read is None and None not in (asked, asked_d_y)
    if wide and asked is not None and asked < d_x:
        return asked, d_y
    if asked not in (None, d_x):
        raise CheckpointError(f"{file}: d_x must be the weights' {d_x}, got {asked}.")
    return d_x, d_y


def _model_fields(
    parts: Parts, said: Said, positions: Tensor | None, d_token: int
) -> dict[str, object]:
    """The architecture of one reading."""
    apart, width = not said["residual"], parts.width
    around = parts.ends.keys() & {"read_in.weight", "read_out.weight"}
    moved = said["columns"] != COLUMNS[0] or said["output_column"] is not None
    ways = around or apart or said["sign"] == "minus" or d_token < parts.d_token or moved
    names = ("norm", "activation", "layout", "score", "attend_to_self", "context_only")
    fields: dict[str, object] = {
        **{name: said[name] for name in names},
        "n_layers": len(parts.layers),
        "n_heads": parts.n_heads,
        "d_head": parts.d_head,
        "biases": parts.biases,
        "d_model": (3 * width if apart else width) if ways else None,
        "final_norm": parts.has("final_norm.weight"),
    }
    if parts.has("mlp_in.weight"):
        fields["d_mlp"] = parts.layers[0]["mlp_in.weight"].shape[1]
    if parts.has("read_mlp.weight"):
        fields["d_read_in"] = parts.ends["read_mlp.weight"].shape[1]
    if positions is not None:
        fields["n_positions"] = len(positions)
    return fields


def _sinusoidal(n_positions: int, width: int) -> Tensor:
    """sin(t / 10000^(2i/width)) and cos of it in turn, [pos, width].

    Source:
        Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    angle = torch.arange(n_positions)[:, None] * 1e4 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
