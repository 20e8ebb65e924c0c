"""Layers whose names are in the table of names, with what lies around their attention: norms, MLPs, read-in, read-out.

Such names do not say how the parts are joined. Every way that the shapes allow is a reading, tried on prompts of the
task; the one that predicts best comes first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.hints import ORIENTATIONS, SIGNS, Hints, option
from mechinterp.checkpoints.named_parts import Parts, parts_of
from mechinterp.checkpoints.named_weights import joined
from mechinterp.checkpoints.names import Layout
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.outside import settle
from mechinterp.checkpoints.readings import MAX_READINGS, Reading, Said, evaluation_prompts, ranked
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.models.weights import Weights

N_PROMPTS, LEAST_PROMPTS, N_PRODUCTS = 256, 16, 2**32
"""Prompts that readings are held against each other on, and about the products that all of them may take."""
PER_WEIGHT = 16
"""What an attention weight costs, in products."""
TIE = 1e-6
N_POSITIONS = 512
"""Rows of a table of sinusoidal positions."""
MOST_SHOWN = 8
"""Readings that are listed under what was assumed; the checkpoint has all."""
FORMAT = "named-layers"
Candidate = tuple[Said, Checkpoint]
Errors = tuple[Tensor, Tensor]


def read_named_layers(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    file: Path,
    *,
    hints: Hints,
    settings: Mapping[str, object],
) -> Checkpoint:
    """The model of layers with known names, of the readings the one that predicts best.

    Args:
        settings: What a config file beside the weights states: n_heads, norm_first, and fields of `JOINS`.
    Raises:
        CheckpointError: If shapes do not fit together, a part has no place here, or too much is left open.
    """
    settings = {**settings, **(hints.model or {})}
    tries: tuple[str, ...] = ORIENTATIONS if layout.open_axes else ORIENTATIONS[:1]
    tries = tries if hints.orientation is None else (hints.orientation,)
    candidates: list[Candidate] = []
    faults: list[CheckpointError] = []
    for axes in tries:
        try:
            parts = parts_of(tensors, layout, file, axes=axes, hints=hints, settings=settings)
        except CheckpointError as error:
            faults.append(error)
            continue
        for choices in _choices(parts, hints, settings):
            said = {"orientation": axes, **choices}
            try:
                candidates.append((said, _checkpoint(parts, file, said, hints, settings)))
            except CheckpointError as error:
                faults.append(error)
    if not candidates:
        raise faults[0]
    return _best(candidates, hints, file)


def _choices(parts: Parts, hints: Hints, settings: Mapping[str, object]) -> Iterator[Said]:
    """What names and shapes leave open, every combination of it, the most usual first."""
    normed, mlps = parts.has("norm1.weight"), parts.has("mlp_in.weight")
    read_in, bare = parts.has("read_in.weight"), not parts.has("read_out.weight")
    plain = not (normed or mlps)
    open_positions = read_in and not plain and not parts.has("positions.weight")
    usual = parts.d_head**-0.5
    options: dict[str, tuple[str | float | bool | None, ...]] = {
        "norm": ("before", "after") if normed else (None,),
        "activation": ("relu", "gelu") if mlps or parts.has("read_mlp.weight") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        "context_only": (False, True),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (usual, 1.0) if plain and parts.d_head > 1 else (usual,),
        "residual": (True, False) if len(parts.layers) == 1 and not normed else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "sign": SIGNS if bare else SIGNS[:1],
    }
    first = settings.get("norm_first")
    if isinstance(first, bool) and normed:
        options["norm"] = ("before" if first else "after",)
    given = {name: settings.get(name) for name in options} | {
        name: getattr(hints, name) for name in ("attend_to_self", "score", "scale", "sign")
    }
    given = {name: value for name, value in given.items() if value is not None}
    options |= {name: (value,) for name, value in given.items()}  # type: ignore[misc]
    for values in product(*options.values()):
        choices = dict(zip(options, values, strict=True))
        if _is_usual(choices, given):
            yield choices


def _is_usual(choices: Said, given: Mapping[str, object]) -> bool:
    """Whether a way to join the parts is one that people use, or was said."""
    causal = {"attend_to_self": True, "context_only": False}
    if choices["layout"] == "in_turn" and any(
        choices[name] != value and name not in given for name, value in causal.items()
    ):
        return False
    numbered = choices["positions"] == "sinusoidal" and choices["context_only"] is True
    return not numbered or {"positions", "context_only"} <= given.keys()


def _best(candidates: Sequence[Candidate], hints: Hints, file: Path) -> Checkpoint:
    """The checkpoint that predicts best, of those that tie exactly the first, with all readings."""
    said_of_all = [said for said, _ in candidates]
    open_ones = [n for n in said_of_all[0] if len({said[n] for said in said_of_all}) > 1]
    if len(candidates) > MAX_READINGS:
        listed = ", ".join(map(option, open_ones))
        raise CheckpointError(
            f"{file}: at most {MAX_READINGS} readings are tried, got {len(candidates)}; say some of {listed}."
        )
    checkpoint = candidates[0][1]
    readings: tuple[Reading, ...] = ()
    if len(candidates) > 1:
        candidates, errors = _apart(candidates)
        pairs = [({n: said[n] for n in open_ones}, each.weights) for said, each in candidates]
        found = ranked(pairs, errors)
        losses = [each.loss for each in found]
        least = min(losses)
        first = next(i for i, loss in enumerate(losses) if not loss > least * (1 + TIE))
        checkpoint = candidates[first][1]
        order = sorted(range(len(found)), key=lambda i: (i != first, not found[i].ties, losses[i]))
        readings = tuple(found[i] for i in order)
    values = flatten(asdict(checkpoint.task), "task.")
    said_of_task = {"task.d_x", *flatten(dict(hints.task or {}), "task.")}
    assumed = {name: value for name, value in values.items() if name not in said_of_task}
    if readings:
        told = {name: readings[0].said[name] for name in sorted(open_ones) if name != "scale"}
        assumed |= {f"model.{name}": value for name, value in told.items()}
        assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
    return replace(
        checkpoint, assumed={**checkpoint.assumed, **assumed, "step": 0}, readings=readings
    )


def _checkpoint(
    parts: Parts, file: Path, said: Said, hints: Hints, settings: Mapping[str, object]
) -> Checkpoint:
    """The model of one reading."""
    d_x, d_y = _sizes(parts, file, said, hints)
    if parts.has("positions.weight"):
        positions = parts.ends["positions.weight"]
    elif said["positions"] == "sinusoidal":
        positions = _sinusoidal(N_POSITIONS, parts.width)
    else:
        positions = None
    sizes: dict[str, object] = {"d_x": d_x, "d_y": d_y}
    points = settings.get("n_points")
    if isinstance(points, int) and points > 1:
        sizes["context_length"] = points - 1
    fields = _model_fields(parts, said, positions, d_x + d_y)
    try:
        model = build(ModelConfig, fields, "model.")
        task = build(TaskConfig, {**sizes, **dict(hints.task or {})}, "task.")
        most = model.longest_context
        if most is not None and "context_length" not in {*sizes, *dict(hints.task or {})}:
            task = replace(task, context_length=min(task.context_length, most))
        config = ExperimentConfig(task=task, model=model)
        sign = -1 if said["sign"] == "minus" else 1
        apart = not said["residual"]
        found = joined(parts, model, (d_x, d_y), positions=positions, sign=sign, apart=apart)
        weights = Weights(model, task.d_x, task.d_y, found)
    except ValueError as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None
    scale = said["scale"]
    assert isinstance(scale, float | int)
    if scale != parts.d_head**-0.5:
        weights = replace(weights, scale=float(scale))
    left_out = parts.d_token - (d_x + d_y) if said["layout"] == "pairs" else 0
    beside: dict[str, object] = {"model.position_columns_left_out": left_out} if left_out else {}
    if hints.scale is None:
        beside["attn_scale"] = 1 / scale
    return Checkpoint(file, config, 0, weights, FORMAT, beside)


def _sizes(parts: Parts, file: Path, said: Said, hints: Hints) -> tuple[int, int]:
    """d_x and d_y; entries of tokens behind (x, y), where the reader says both sizes, are positions."""
    given = {**dict(hints.task or {}), **hints.given}
    read = parts.ends.get("read_out.weight")
    asked = given.get("d_y")
    asked = asked if isinstance(asked, int) else None
    d_y = settle(file, "d_y", None if read is None else read.shape[1], asked) or 1
    d_x = parts.d_token if said["layout"] == "in_turn" else parts.d_token - d_y
    wide = read is None and None not in (hints.d_x, asked)
    if wide and hints.d_x is not None and hints.d_x < d_x:
        return hints.d_x, d_y
    if hints.d_x not in (None, d_x):
        raise CheckpointError(f"{file}: d_x must be the weights' {d_x}, got {hints.d_x}.")
    return d_x, d_y


def _model_fields(
    parts: Parts, said: Said, positions: Tensor | None, d_token: int
) -> dict[str, object]:
    """The architecture of one reading."""
    apart, width = not said["residual"], parts.width
    around = parts.ends.keys() & {"read_in.weight", "read_out.weight"}
    ways = around or apart or said["sign"] == "minus" or d_token < parts.d_token
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


def _apart(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Errors]]:
    """The candidates, of those that predict alike the first, with their errors over those of predicting 0."""
    kept: list[Candidate] = []
    predictions: list[Tensor] = []
    errors: list[Errors] = []
    for said, checkpoint in candidates:
        n_prompts = _n_prompts(checkpoint, len(candidates))
        prompts = evaluation_prompts(checkpoint.task, n_prompts)
        prediction = checkpoint.predictor.run(prompts, [[]])[0].double()
        alike = (
            torch.allclose(prediction, other, rtol=TIE, atol=TIE, equal_nan=True)
            for (_, each), other in zip(kept, predictions, strict=True)
            if each.task == checkpoint.task
        )
        if any(alike):
            continue
        zero = prompts.y_query.square().mean(1)
        error = (prediction - prompts.y_query).square().mean(1)
        kept.append((said, checkpoint))
        predictions.append(prediction)
        errors.append((error / zero.mean(), zero / zero.mean()))
    return kept, errors


def _n_prompts(checkpoint: Checkpoint, n_readings: int) -> int:
    """As many prompts as all readings together take about `N_PRODUCTS` for, the same number for each."""
    task, model = checkpoint.task, checkpoint.config.model
    n_pos = 2 * (task.context_length + 1)
    size = sum(t.numel() for n, t in checkpoint.weights.tensors.items() if n.startswith("blocks"))
    products = n_pos * (size + PER_WEIGHT * n_pos * model.n_layers * model.n_heads)
    return max(LEAST_PROMPTS, min(N_PROMPTS, N_PRODUCTS // (n_readings * products)))
