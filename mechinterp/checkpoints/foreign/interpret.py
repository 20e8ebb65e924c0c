"""What a file leaves open, as choices; each reading of them is tried on the same prompts.

What a known format settles is tried too where, as its code has it, the file predicts nothing.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.assemble import assembled
from mechinterp.checkpoints.foreign.formats import BARE, Format
from mechinterp.checkpoints.foreign.options import COLUMNS, SIGNS, Hints, option
from mechinterp.checkpoints.foreign.parsed import Parts, settle
from mechinterp.checkpoints.foreign.readings import Errors, Reading, Said, ranked
from mechinterp.checkpoints.io.errors import CheckpointError, one_line
from mechinterp.config import TaskConfig
from mechinterp.config.model import LAYOUTS, NORMS
from mechinterp.icl.prompts import Prompts
from mechinterp.models.evaluation import evaluation_prompts
from mechinterp.models.functional import AttentionWeights
from mechinterp.models.predictor import predictor_of
from mechinterp.models.weights import Weights

MAX_READINGS = 64
N_PROMPTS, N_OF_LAYERS, LEAST_PROMPTS = 2048, 512, 16
"""Prompts that readings are held against each other on: of one layer of attention, of others, and at least."""
N_PRODUCTS, N_NUMBERS = 2**34, 2**24
"""About the products that all readings together may take, and the most numbers of the prompts."""
PER_WEIGHT = 16
"""What an attention weight costs, in products."""
TIE = 1e-6
"""Relative difference of predictions up to which two readings are one model."""
DOUBTED: dict[str, tuple[str | bool, ...]] = {
    "columns": COLUMNS,
    "sign": SIGNS,
    "norm": NORMS,
    "layout": LAYOUTS,
    "attend_to_self": (True, False),
}
"""What a format settles by convention, and names and shapes do not say."""
SETTINGS = {
    "activation": ("activation_function", "activation"),
    "norm_eps": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps"),
}
"""Settings beside weights that state a choice under another name."""
ONLY = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings of GPT-2 that would make it another model."""
Choices = Mapping[str, tuple[object, ...]]


@dataclass(frozen=True, eq=False)
class Case:
    """Parts of a file, and how they are read."""

    parts: Parts
    said: Said
    task: TaskConfig
    hints: Hints
    file: Path

    def weights(self) -> Weights:
        """The model of this reading.

        Raises:
            CheckpointError: If its numbers do not stay finite.
        """
        try:
            return assembled(self.parts, self.said, (self.task.d_x, self.task.d_y), self.hints)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {one_line(error)}") from None

    def shown(self) -> AttentionWeights | Weights:
        """Its weights; of one layer of attention the heads."""
        found = self.weights()
        return found.circuits if found.model.one_attention else found


def given_choices(
    form: Format, hints: Hints, settings: Mapping[str, object], file: Path
) -> dict[str, object]:
    """What the reader or a file beside the weights says of choices.

    Raises:
        CheckpointError: If it contradicts what the format settles, or settings are those of another model.
    """
    for key, value in ONLY.items():
        if settings.get(key, value) != value:
            raise CheckpointError(f"{file}: {key} must be {value}, got {settings[key]!r}.")
    beside = {
        name: next((settings[k] for k in keys if k in settings), None)
        for name, keys in SETTINGS.items()
    }
    if isinstance(first := settings.get("norm_first"), bool):
        beside["norm"] = "before" if first else "after"
    names = ("norm", "layout", "residual", "context_only", "positions", "attend_to_self")
    beside = {name: settings.get(name) for name in names} | beside
    found = {
        name: value
        for name, value in {**beside, **(hints.model or {})}.items()
        if value is not None
    }
    stated = ("score", "scale", "columns", "attend_to_self", "sign", "orientation", "output_column")
    for name in stated:
        if (value := getattr(hints, name)) is not None:
            found[name] = settle(file, name, found.get(name), value)
    return found


def choices_of(
    parts: Parts, form: Format, given: Mapping[str, object], hints: Hints, file: Path
) -> Choices:
    """What names and shapes leave open, with what it can be, the most usual first; one value where it is settled.

    Raises:
        CheckpointError: If the reader contradicts what the format settles.
    """
    tries = _of_attention(parts, form) if parts.alone else _of_layers(parts, form)
    if not parts.has("read_out.weight"):
        tries["output_column"] = _output_columns(parts, hints, file)
    elif hints.output_column is not None:
        column = hints.output_column
        raise CheckpointError(
            f"{file}: output_column is for layers without a read-out, got {column}."
        )
    tries |= {n: values for n, values in form.tries.items() if n in tries and len(tries[n]) > 1}
    tries |= {
        n: (value,)
        for n, value in {**form.usual, **form.settled}.items()
        if n in tries or n == "norm_eps"
    }
    for name, value in given.items():
        if name not in (*tries, "norm_eps") or (name == "norm" and tries[name] == (None,)):
            continue
        fixed = form.settled.get(name, value)
        if name == "scale" and fixed is None:
            fixed = parts.d_head**-0.5
        if name not in DOUBTED or name == "attend_to_self":
            value = settle(file, name, fixed, value)  # type: ignore[type-var]
        tries[name] = (value,)
    return tries


def _output_columns(parts: Parts, hints: Hints, file: Path) -> tuple[int | None, ...]:
    """Entries of the output that can be the first of the prediction; None: that of y.

    Where columns of positions stand behind (x, y), code reads the entry of y or the last one.
    """
    last, column = parts.written - (hints.d_y or 1), hints.output_column
    if column is not None and parts.written < parts.width:
        got = f"one that writes {parts.written} of {parts.width} entries"
        raise CheckpointError(
            f"{file}: output_column is for layers that write whole tokens, got {got}."
        )
    if column is not None and column > last:
        raise CheckpointError(f"{file}: output_column must lie in 0 to {last}, got {column}.")
    wide = None not in (hints.d_x, hints.d_y)
    wide = wide and (hints.d_x or 0) + (hints.d_y or 0) < parts.d_token
    return (None, last) if wide and parts.written == parts.width else (None,)


def _of_attention(parts: Parts, form: Format) -> dict[str, tuple[object, ...]]:
    bare = form is BARE
    return {
        "score": ("linear", "linear/L", "softmax") if bare else ("softmax", "linear/L"),
        "scale": (1.0, None) if bare else (None, 1.0),
        "columns": COLUMNS,
        "attend_to_self": (False, True),
        "sign": SIGNS,
    }


def _of_layers(parts: Parts, form: Format) -> dict[str, tuple[object, ...]]:
    normed, mlps = parts.has("norm1.weight"), parts.has("mlp_in.weight")
    read_in, bare = parts.has("read_in.weight"), not parts.has("read_out.weight")
    plain, final = not (normed or mlps), parts.has("final_norm.weight")
    bent = mlps and any(bool(layer["mlp_in.weight"].any()) for layer in parts.layers)
    open_positions = read_in and not plain and not parts.has("positions.weight")
    return {
        "norm": ("before", "after") if normed else (None,),
        "activation": ("relu", "gelu") if bent or parts.has("read_mlp.weight") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        # In one layer the query alone matters, which reads the whole context either way.
        "context_only": (False, True) if len(parts.layers) > 1 else (False,),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (None, 1.0) if plain and parts.d_head > 1 else (None,),
        "residual": (True, False) if len(parts.layers) == 1 and not (normed or final) else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "columns": COLUMNS[:1],
        "sign": SIGNS if bare else SIGNS[:1],
    }


def combinations(choices: Choices, given: Mapping[str, object]) -> Iterator[Said]:
    """Every combination of choices that people use, or that was said."""
    for values in product(*choices.values()):
        said: dict[str, object] = dict(zip(choices, values, strict=True))
        if _is_usual(said, choices, given):
            yield said  # type: ignore[misc]


def _is_usual(said: Mapping[str, object], choices: Choices, given: Mapping[str, object]) -> bool:
    """Whether a way to read and join the parts is one that people use, or was said."""
    if (
        "layout" not in said
    ):  # only softmax is tried with the query among its keys; the published linear code has it
        own = said["score"] != "softmax" and len(choices["attend_to_self"]) > 1
        return not own or said["attend_to_self"] is (choices["score"][0] == "linear")
    causal = {"attend_to_self": True, "context_only": False}
    if said["layout"] == "in_turn" and any(
        said[n] != value and n not in given and len(choices[n]) > 1 for n, value in causal.items()
    ):
        return False
    numbered = said["positions"] == "sinusoidal" and said["context_only"] is True
    return not numbered or {"positions", "context_only"} <= given.keys()


def tried(
    cases: Sequence[Case],
    closed: Collection[str],
    make: Callable[[Parts, Said], Case],
    file: Path,
) -> tuple[Case, tuple[Reading, ...]]:
    """The case that predicts best, and the readings that were held against each other; none where one is said.

    Where none predicts, what is settled by convention is doubted: those that predict without it come behind.

    Args:
        closed: Names of choices that are not doubted.
        make: The case of parts that are read in one way.
    Raises:
        CheckpointError: If too much is left open, or both orientations predict for another d_x.
    """
    open_ones = [n for n in cases[0].said if len({case.said.get(n) for case in cases}) > 1]
    if len(cases) > MAX_READINGS:
        listed = ", ".join(map(option, open_ones))
        raise CheckpointError(
            f"{file}: at most {MAX_READINGS} readings are tried, got {len(cases)}; say some of {listed}."
        )
    doubts = _doubts(cases, [*closed, *open_ones], make)
    if len(cases) == 1 and not doubts:
        return cases[0], ()
    count = _n_prompts(cases)
    kept, errors = _apart(cases, count)
    found = _ranked(kept, errors, open_ones)
    first = next(case for case in kept if case.shown == found[0].build)
    if any(each.predicts for each in found):
        _require_one_size(kept, found, file)
        return first, tuple(found) if len(cases) > 1 else ()
    more, more_errors = _apart(doubts, count)
    changed = [n for n in DOUBTED if any(each.said.get(n) != first.said.get(n) for each in more)]
    names = [*open_ones, *(n for n in changed if n not in open_ones)]
    doubted = _ranked([*kept, *more], [*errors, *more_errors], names)
    working = [each for each in doubted if each.predicts][:4]
    if working:
        said = {n: first.said.get(n) for n in names}
        return first, (replace(found[0], stands=True, said=said), *working)
    return first, tuple(found) if len(cases) > 1 else ()


def _ranked(cases: Sequence[Case], errors: Sequence[Errors], names: Sequence[str]) -> list[Reading]:
    """The readings by what they may differ in, a scale as the number that it is."""
    told = []
    for case in cases:
        said = {n: case.said.get(n) for n in names}
        if "scale" in said and said["scale"] is None:
            said["scale"] = case.parts.d_head**-0.5
        told.append((said, case.shown))
    return ranked(told, errors)


def _doubts(
    cases: Sequence[Case],
    closed: Collection[str],
    make: Callable[[Parts, Said], Case],
) -> list[Case]:
    """Cases with one thing other than the format's code has it, of what neither is open nor closed."""
    found = []
    for case in cases:
        for name, values in DOUBTED.items():
            if name in closed or case.said.get(name) is None:
                continue
            for value in values:
                if value != case.said[name] and _is_possible(case, name):
                    with suppress(CheckpointError):  # tokens of other sizes may not fit
                        found.append(make(case.parts, {**case.said, name: value}))
    return found if len(found) <= MAX_READINGS else found[: len(found) // len(cases)]


def _is_possible(case: Case, name: str) -> bool:
    """Whether another value could mean something: tokens in turn need a read-in, and have no order of columns."""
    if name == "columns":
        return case.said.get("layout") != "in_turn"
    return name != "layout" or case.parts.has("read_in.weight")


def _require_one_size(cases: Sequence[Case], readings: Sequence[Reading], file: Path) -> None:
    """Refuse one layer of which both orientations predict, with other numbers of x."""
    if not all(case.parts.alone for case in cases):
        return
    tasks = {case.shown: case.task for case in cases}
    sizes = {tasks[each.build].d_x for each in readings if each.predicts}
    if len(sizes) > 1:
        listed = " or ".join(f"d_x = {d_x}" for d_x in sorted(sizes))
        raise CheckpointError(
            f"{file}: the orientation of its matrices is not in the file, {listed} predict both; give --d-x (d_x=) or "
            "--orientation (orientation=)."
        )


def _n_prompts(cases: Sequence[Case]) -> int:
    """One number of prompts for all, of as many products as all together may take."""
    count = N_PROMPTS if cases[0].parts.alone else N_OF_LAYERS
    for case in cases:
        task, parts = case.task, case.parts
        n_pos = (2 if case.said.get("layout") == "in_turn" else 1) * (task.context_length + 1)
        size = sum(t.numel() for layer in parts.layers for t in layer.values())
        products = n_pos * (size + PER_WEIGHT * n_pos * len(parts.layers) * parts.n_heads)
        numbers = n_pos * max(parts.width, task.d_x + task.d_y)
        count = min(count, N_PRODUCTS // (len(cases) * products), N_NUMBERS // numbers)
    return max(LEAST_PROMPTS, count)


def _apart(cases: Sequence[Case], count: int) -> tuple[list[Case], list[Errors]]:
    """The cases, of those that predict alike the first, with their errors over those of predicting 0."""
    prompts: dict[TaskConfig, Prompts] = {}
    kept: list[tuple[Case, Tensor]] = []
    errors: list[Errors] = []
    for case in cases:
        if case.task not in prompts:
            prompts[case.task] = evaluation_prompts(case.task, n_prompts=count)
        weights, there = case.weights(), prompts[case.task]
        if weights.model.one_attention:
            weights = weights.to(torch.float64)
        prediction = predictor_of(weights).predict(there.to(weights.dtype)).double()
        if any(o.task == case.task and _is_one(prediction, each) for o, each in kept):
            continue
        zero = there.y_query.square().mean(1)
        error = (prediction - there.y_query).square().mean(1)
        kept.append((case, prediction))
        errors.append((error / zero.mean(), zero / zero.mean()))
    return [case for case, _ in kept], errors


def _is_one(prediction: Tensor, other: Tensor) -> bool:
    """Whether two predictions are those of one model, but for rounding."""
    close = TIE * other.abs().max().nan_to_num(0.0, 0.0).item()
    return torch.allclose(prediction, other, rtol=0, atol=close, equal_nan=True)
