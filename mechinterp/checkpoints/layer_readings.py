"""The ways in which the parts of layers can be joined, tried on prompts of the task.

Names and shapes do not say where norms stand, what a token reads and which entry is the prediction. Every way that they
allow is a reading; the one that predicts best comes first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import COLUMNS, JOINS, SIGNS, Hints
from mechinterp.checkpoints.layer_models import model_of_parts, said_sizes
from mechinterp.checkpoints.named_parts import Parts
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.checkpoints.readings import (
    Reading,
    Said,
    evaluation_prompts,
    ranked,
    require_few,
)

N_PROMPTS, LEAST_PROMPTS, N_PRODUCTS = 256, 16, 2**34
"""Prompts that readings are held against each other on, and about the products that all of them may take."""
PER_WEIGHT = 16
"""What an attention weight costs, in products."""
TIE = 1e-6
MOST_SHOWN = 8
"""Readings that are listed under what was assumed; the checkpoint has all."""
HINTED = ("attend_to_self", "score", "scale", "sign", "columns", "output_column")
"""What a reading says by an argument of `load` of its own; the rest is said by `model`."""
Options = Mapping[str, tuple[str | float | bool | None, ...]]
Candidate = tuple[Said, Checkpoint]
Errors = tuple[Tensor, Tensor]


def best_reading(
    sources: Sequence[tuple[Said, Parts]],
    file: Path,
    *,
    hints: Hints,
    settings: Mapping[str, object],
    usual: Options,
    format: str,
) -> Checkpoint:
    """The model that the parts of a file make, of the readings the one that predicts best.

    Args:
        sources: The parts, and what is said of how they were taken from the file.
        settings: What a config file beside the weights states: norm_first, norm_eps, and fields of `JOINS`.
        usual: What the format settles or has in another order, the most usual first.
    Raises:
        CheckpointError: If shapes do not fit together, or too much is left open.
    """
    settings = {**settings, **(hints.model or {})}
    candidates: list[Candidate] = []
    faults: list[CheckpointError] = []
    for source, parts in sources:
        for choices in _choices(parts, file, hints, settings, usual):
            said = {**source, **choices}
            try:
                found = model_of_parts(parts, file, said, hints, settings)
                candidates.append((said, replace(found, format=format)))
            except CheckpointError as error:
                faults.append(error)
    if not candidates:
        raise faults[0]
    return _best(candidates, file)


def _choices(
    parts: Parts, file: Path, hints: Hints, settings: Mapping[str, object], usual: Options
) -> Iterator[Said]:
    """What names and shapes leave open, every combination of it, the most usual first."""
    options = _open(parts, file, hints)
    normed = parts.has("norm1.weight")
    options |= usual
    first = settings.get("norm_first")
    if isinstance(first, bool) and normed:
        options["norm"] = ("before" if first else "after",)
    given = {name: settings.get(name) for name in (*JOINS, "attend_to_self")}
    given |= {name: hints.given[name] for name in HINTED if name in hints.given}
    given = {name: value for name, value in given.items() if value is not None}
    options |= {name: (value,) for name, value in given.items()}  # type: ignore[misc]
    both_sides = usual.get("context_only", (False,))[0] is True
    for values in product(*options.values()):
        choices = dict(zip(options, values, strict=True))
        if _is_usual(choices, given, both_sides=both_sides):
            yield choices


def _open(
    parts: Parts, file: Path, hints: Hints
) -> dict[str, tuple[str | float | bool | None, ...]]:
    """What the parts of layers under any names can be, the most usual first."""
    normed, mlps = parts.has("norm1.weight"), parts.has("mlp_in.weight")
    read_in, bare = parts.has("read_in.weight"), not parts.has("read_out.weight")
    plain = not (normed or mlps)
    open_positions = read_in and not plain and not parts.has("positions.weight")
    scale = parts.d_head**-0.5
    return {
        "norm": ("before", "after") if normed else (None,),
        "activation": ("relu", "gelu") if mlps or parts.has("read_mlp.weight") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        "context_only": (False, True),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (scale, 1.0) if plain and parts.d_head > 1 else (scale,),
        "residual": (True, False) if len(parts.layers) == 1 and not normed else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "sign": SIGNS if bare else SIGNS[:1],
        "columns": COLUMNS[:1],
        "output_column": _output_columns(parts, hints, file),
    }


def _output_columns(parts: Parts, hints: Hints, file: Path) -> tuple[int | None, ...]:
    """Entries of the output that can be the (first) prediction; None: that of y, or what the read-out writes.

    Where columns of positions stand behind (x, y), code reads the entry of y or the last one.
    """
    if parts.has("read_out.weight"):
        if hints.output_column is not None:
            raise CheckpointError(
                f"{file}: output_column is for layers without a read-out, got {hints.output_column}."
            )
        return (None,)
    d_x, d_y = said_sizes(hints)
    last = parts.width_written - (d_y or 1)
    if hints.output_column is not None and hints.output_column > last:
        raise CheckpointError(
            f"{file}: output_column must lie in 0 to {last}, got {hints.output_column}."
        )
    wide = None not in (d_x, d_y) and (d_x or 0) + (d_y or 0) < parts.d_token
    if not wide or parts.width_written < parts.width:
        return (None,)
    return (0 if hints.columns == "y,x" else d_x, last)


def _is_usual(choices: Said, given: Mapping[str, object], *, both_sides: bool) -> bool:
    """Whether a way to join the parts is one that people use, or was said.

    Args:
        both_sides: Whether layers of this format read the tokens on both sides as a rule.
    """
    causal = {"attend_to_self": True, "context_only": False, "columns": COLUMNS[0]}
    if choices["layout"] == "in_turn" and any(
        choices[name] != value and name not in given for name, value in causal.items()
    ):
        return False
    if both_sides:  # there a causal mask without the diagonal leaves the first token without a key
        strict = not (choices["attend_to_self"] or choices["context_only"])
        return not strict or {"attend_to_self", "context_only"} <= given.keys()
    numbered = choices["positions"] == "sinusoidal" and choices["context_only"] is True
    return not numbered or {"positions", "context_only"} <= given.keys()


def _best(candidates: Sequence[Candidate], file: Path) -> Checkpoint:
    """The checkpoint that predicts best, with all readings: the first of those that tie exactly, or if none predicts."""
    said_of_all = [said for said, _ in candidates]
    open_ones = [n for n in said_of_all[0] if len({said[n] for said in said_of_all}) > 1]
    require_few(len(candidates), open_ones, file)
    checkpoint = candidates[0][1]
    readings: tuple[Reading, ...] = ()
    if len(candidates) > 1:
        candidates, errors = _apart(candidates)
        pairs = [({n: said[n] for n in open_ones}, each.weights) for said, each in candidates]
        found = ranked(pairs, errors)
        losses = [each.loss for each in found]
        least = min(losses)
        best = next(i for i, loss in enumerate(losses) if not loss > least * (1 + TIE))
        first = best if any(each.predicts for each in found) else 0
        checkpoint = candidates[first][1]
        order = sorted(range(len(found)), key=lambda i: (i != first, not found[i].ties, losses[i]))
        readings = tuple(found[i] for i in order)
    assumed: dict[str, object] = {}
    if readings:
        told = {name: readings[0].said[name] for name in sorted(open_ones) if name != "scale"}
        assumed |= {f"model.{name}": value for name, value in told.items()}
        assumed["readings"] = [each.to_document() for each in readings[:MOST_SHOWN]]
    return replace(
        checkpoint, assumed={**checkpoint.assumed, **assumed, "step": 0}, readings=readings
    )


def _apart(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Errors]]:
    """The candidates, of those that predict alike the first, with their errors over those of predicting 0."""
    kept: list[Candidate] = []
    predictions: list[Tensor] = []
    errors: list[Errors] = []
    n_prompts = _n_prompts([each for _, each in candidates])
    for said, checkpoint in candidates:
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


def _n_prompts(checkpoints: Sequence[Checkpoint]) -> int:
    """As many prompts, the same for each, as all of them together take about `N_PRODUCTS` for."""
    return max(LEAST_PROMPTS, min(N_PROMPTS, N_PRODUCTS // sum(map(_products, checkpoints))))


def _products(checkpoint: Checkpoint) -> int:
    """About the products that a prompt takes."""
    task, model = checkpoint.task, checkpoint.config.model
    n_pos = 2 * (task.context_length + 1)
    size = sum(t.numel() for n, t in checkpoint.weights.tensors.items() if n.startswith("blocks"))
    return n_pos * (size + PER_WEIGHT * n_pos * model.n_layers * model.n_heads)
