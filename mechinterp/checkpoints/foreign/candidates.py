"""Candidates: the models that a file may mean, with their predictions for prompts of the task."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.assemble import Tried, architecture, assembled, columns
from mechinterp.checkpoints.foreign.formats import BARE, Format
from mechinterp.checkpoints.foreign.names import ROTARY, Tensors
from mechinterp.checkpoints.foreign.options import COLUMNS, JOINS, SIGNS, Hints, stated_or_given
from mechinterp.checkpoints.foreign.parts import Parts
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.config.model import LAYOUTS, MLP_NORM, NORMS
from mechinterp.fields import build, flatten
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights

DOUBTED: dict[str, tuple[str | bool, ...]] = {
    "columns": COLUMNS,
    "sign": SIGNS,
    "norm": NORMS,
    "layout": LAYOUTS,
    "attend_to_self": (True, False),
}
"""Choices that a format fixes by convention, but names and shapes do not show."""
CAUSAL = {"attend_to_self": True, "context_keys": False}
"""Mask of tokens x and y in turn, unless another is stated."""
STATED = (*JOINS, "norm_eps", "attend_to_self", "score", "rotary_base", "rotary_adjacent_pairs")
"""Settings of a file that fix a choice."""
ROTARY_BASE = 10000.0
REFINED: tuple[Tried, ...] = (
    {"positions": "rotary", "rotary_base": ROTARY_BASE, "rotary_adjacent_pairs": False},
    {"positions": "rotary", "rotary_base": ROTARY_BASE, "rotary_adjacent_pairs": True},
    {"positions": "sinusoidal_halves"},
    {"rms_norm": True},
    {"rotary_adjacent_pairs": True},
    {"norm": "before"},
    {"norm": "before", "rms_norm": True},
)
"""Choices that leave no trace in names and shapes, tried on the best readings."""
REFINED_NAMES = {*(name for change in REFINED for name in change), "scale", "activation"}
PLAIN = ("none", False, None)
"""Values of these choices that are no refinement."""
BASES = (100.0, 1000.0, ROTARY_BASE)
"""Bases of rotary positions, tried on variations of the best reading."""
FINER_BASES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, ROTARY_BASE, 30000.0, 1e5, 5e5, 1e6)
"""Bases of which the neighbours of the best one so far are tried as well."""
Choices = Mapping[str, tuple]

N_PROMPTS, N_OF_LAYERS, LEAST_PROMPTS = 2048, 512, 16
"""Prompts for the comparison of readings: for one layer of attention, for other models, and at
least."""
AGAIN = 4
"""Factor on the number of prompts for the second comparison, of the best readings.

Set after the losses of published files had been seen: with a factor of 1 some losses were not
clearly below that of predicting 0.
"""
N_PRODUCTS, N_NUMBERS = 2**34, 2**24
"""Approximate limit on the products of all readings together, and limit on the numbers of the
prompts."""
PER_WEIGHT = 16
"""Cost of an attention weight, in products."""
TIE = 1e-6
"""Relative difference of predictions up to which two readings count as one model; larger values
merge more readings."""


def given_choices(hints: Hints, settings: Mapping[str, object]) -> dict[str, object]:
    """Choices that the user or the file's settings state.

    Raises:
        ValueError: If they contradict each other.
    """
    choices = {name: settings[name] for name in STATED if name in settings}
    choices |= hints.model or {}
    if choices.get("norm") == "none":
        choices["norm"] = None
    stated = ("score", "scale", "columns", "attend_to_self", "sign", "orientation", "output_column")
    for name in stated:
        if (value := getattr(hints, name)) is not None:
            choices[name] = stated_or_given(name, choices.get(name), value)
    return choices


def rotary_of(tensors: Tensors) -> dict[str, object]:
    """Rotary positions and their base, if the file has a table of their angles; else empty."""
    tables = [name for name in tensors if ROTARY.fullmatch(name)]
    if not tables:
        return {}
    found: dict[str, object] = {"positions": "rotary"}
    for name in tables:
        turns = tensors[name]
        if name.endswith("inv_freq") and turns.ndim == 1 and len(turns) > 1 and 0 < turns[1] < 1:
            found["rotary_base"] = float(turns[1].double() ** -len(turns))
    return found


def choices_of(parts: Parts, form: Format, given: Mapping[str, object], hints: Hints) -> Choices:
    """Choices with their possible values, the most common first; a single value if the choice is
    fixed.

    Raises:
        ValueError: If the user contradicts what the format fixes.
    """
    tries = _of_attention(form) if parts.alone else _of_layers(parts, form, given)
    tries["score_slope"] = (hints.score_slope or 1.0,)
    if not parts.has("unembed.W_U"):
        tries["output_column"] = _output_columns(parts, hints)
    elif hints.output_column is not None:
        column = hints.output_column
        raise ValueError(f"output_column needs a file without a read-out, got {column}.")
    tries |= {n: values for n, values in form.tries.items() if n in tries and len(tries[n]) > 1}
    closed = {**form.assumed, **form.fixed}.items()
    tries |= {n: (value,) for n, value in closed if n in tries or n == "norm_eps"}
    if given.get("positions") == "rotary":
        tries |= {"rotary_adjacent_pairs": (False,), "rotary_base": (ROTARY_BASE,)}
    for name, value in given.items():
        if name not in (*tries, "norm_eps"):
            continue
        fixed = form.fixed.get(name, value)
        if name == "scale" and fixed is None:
            fixed = parts.d_head**-0.5
        if name not in DOUBTED or name == "attend_to_self":
            value = stated_or_given(name, fixed, value)  # type: ignore[type-var]
        tries[name] = (value,)
    return tries


def _output_columns(parts: Parts, hints: Hints) -> tuple[int | None, ...]:
    """Entries of the output that may be the first of the prediction; None: the entry of y.

    If columns of positions follow (x, y), code reads the entry of y or the last entry.
    """
    last, column = parts.written - (hints.d_y or 1), hints.output_column
    if column is not None and parts.written < parts.width:
        got = f"one that writes {parts.written} of {parts.width} entries"
        raise ValueError(f"output_column needs a layer that writes whole tokens, got {got}.")
    if column is not None and column > last:
        raise ValueError(f"output_column must lie in 0 to {last}, got {column}.")
    wide = None not in (hints.d_x, hints.d_y)
    wide = wide and (hints.d_x or 0) + (hints.d_y or 0) < parts.d_token
    return (None, last) if wide and parts.written == parts.width else (None,)


def _of_attention(form: Format) -> dict[str, tuple[object, ...]]:
    bare = form is BARE
    return {
        "score": ("linear", "linear/L", "softmax") if bare else ("softmax", "linear/L"),
        "scale": (1.0, None) if bare else (None, 1.0),
        "columns": COLUMNS,
        "attend_to_self": (False, True),
        "sign": SIGNS,
        "positions": ("none",),
    }


def _of_layers(
    parts: Parts, form: Format, given: Mapping[str, object]
) -> dict[str, tuple[object, ...]]:
    normed, mlps = parts.has("ln1.w"), parts.has("mlp.W_in")
    read_in, bare = parts.has("W_in"), not parts.has("unembed.W_U")
    of_mlps = mlps and parts.has("ln2.w")
    plain, final = not (normed or mlps), parts.has("ln_final.w")
    bent = mlps and any(bool(layer["mlp.W_in"].any()) for layer in parts.layers)
    several = len(parts.layers) > 1 or given.get("passes", 1) != 1
    open_positions = read_in and not plain and not parts.has("pos_embed.W_pos")
    return {
        "norm": ("before", "after") if normed else (MLP_NORM if of_mlps else None,),
        "activation": ("relu", "gelu") if bent or parts.has("W_read") else ("relu",),
        "layout": ("pairs", "in_turn") if read_in else ("pairs",),
        "attend_to_self": (True, False),
        # In a single layer that runs once only the query matters, and it attends to the whole
        # context in both cases.
        "context_keys": (False, True) if several else (False,),
        "score": ("softmax", "linear/L", "linear") if plain else ("softmax", "linear/L"),
        "scale": (None, 1.0) if plain and parts.d_head > 1 else (None,),
        "residual": (True, False) if len(parts.layers) == 1 and not (normed or final) else (True,),
        "positions": ("none", "sinusoidal") if open_positions else ("none",),
        "passes": (1,),
        "rms_norm": (False,),
        "columns": COLUMNS[:1],
        "sign": SIGNS if bare else SIGNS[:1],
    }


def combinations(choices: Choices, given: Mapping[str, object]) -> Iterator[Tried]:
    """Every combination of choices that is common, or was stated."""
    for values in product(*choices.values()):
        chosen: dict[str, object] = dict(zip(choices, values, strict=True))
        if _is_usual(chosen, choices, given):
            yield chosen  # type: ignore[misc]


def refinements(chosen: Tried, parts: Parts, form: Format, closed: Collection[str]) -> list[Tried]:
    """Changes of a reading to rotary positions or RMS norms.

    Several runs through the layers are not tried: each goes on with any descent, so that more of them always look better.

    Args:
        closed: Names of choices that the file or the user states.
    """
    turns = form.turns and not parts.merged and not parts.has("pos_embed.W_pos")
    possible = {
        "positions": turns,
        "rms_norm": parts.bare_norms,
        "rotary_adjacent_pairs": chosen.get("positions") == "rotary",
        "norm": bool(chosen.get("residual")) and not parts.has("ln1.w"),
    }
    numbered = parts.has("W_in") and not parts.has("pos_embed.W_pos")
    # Linear scores of a wrong size can predict better than softmax scores of the right one.
    possible["scale"] = chosen["score"] == "softmax" and parts.d_head > 1
    scales = [1 / parts.d_head]
    if "layout" in chosen and parts.d_head != parts.width:
        scales.append(parts.width**-0.5)
    return [
        change
        for change in (*REFINED, *({"scale": scale} for scale in scales))
        for name in list(change)[:1]
        if possible[name] and chosen.get(name) in PLAIN and name not in closed
        if numbered or change.get(name) != "sinusoidal_halves"
    ]


def near_values(chosen: Tried, parts: Parts, closed: Collection[str]) -> dict[str, tuple]:
    """Less common values of choices, tried on variations of the best reading only.

    Args:
        closed: Names of choices that the file or the user states.
    """
    values: dict[str, tuple] = {}
    if "activation" in chosen and parts.has("mlp.W_in"):
        values["activation"] = ("silu", "tanh")
    if chosen.get("positions") == "rotary":
        at = bisect_left(FINER_BASES, float(chosen["rotary_base"] or 0))
        values["rotary_base"] = (*BASES, *FINER_BASES[max(at - 1, 0) : at + 2])
    return {name: more for name, more in values.items() if name not in closed}


def _is_usual(chosen: Mapping[str, object], choices: Choices, given: Mapping[str, object]) -> bool:
    """True if a combination of choices is common, or was stated."""
    if "layout" not in chosen:
        # Only softmax is tried with a query that attends to itself; the published linear code does
        # so too.
        own = chosen["score"] != "softmax" and len(choices["attend_to_self"]) > 1
        return not own or chosen["attend_to_self"] is (choices["score"][0] == "linear")
    odd = [n for n, value in CAUSAL.items() if chosen[n] != value and n not in given]
    if chosen["layout"] == "in_turn" and any(len(choices[n]) > 1 for n in odd):
        return False
    numbered = chosen["positions"] == "sinusoidal" and chosen["context_keys"] is True
    return not numbered or {"positions", "context_keys"} <= given.keys()


Errors = tuple[Tensor, Tensor]
"""Squared errors per prompt of a model and of predicting 0, divided by the mean of the latter."""


@dataclass(frozen=True, eq=False)
class FileFacts:
    """Facts about a file that hold for all its readings."""

    form: Format
    choices: Choices
    given: Mapping[str, object]
    """Choices that the user or the file's settings state."""
    hints: Hints
    """Arguments of `load`; `task` has the fields that the file's settings state, too."""
    settings: Mapping[str, object]
    usual_length: int | None = None
    """Number of pairs to assume; None: that of the format's paper."""
    _tasks: dict[object, tuple[TaskConfig, frozenset[str]]] = field(
        default_factory=dict, init=False
    )

    @property
    def closed(self) -> Mapping[str, object]:
        """Choices that are stated, or that the format fixes."""
        return {**self.form.fixed, **self.given}

    @cached_property
    def stated(self) -> tuple[int | None, int | None]:
        """d_x and d_y, where the user or the file states them."""
        given = {**(self.hints.task or {}), **self.hints.given}
        d_x, d_y = (given.get(name) for name in ("d_x", "d_y"))
        return (d_x if type(d_x) is int else None, d_y if type(d_y) is int else None)

    @property
    def context_length(self) -> int | None:
        """Number of pairs in a prompt, if the file's settings state it."""
        points, length = (self.settings.get(name) for name in ("n_points", "context_length"))
        length = points - 1 if isinstance(points, int) else length
        return length if isinstance(length, int) else None

    def task(self, sizes: tuple[int, int], most: int | None) -> tuple[TaskConfig, frozenset[str]]:
        """Task of these sizes with at most so many pairs, made once; and its stated fields, such as task.d_x."""
        if (sizes, most) not in self._tasks:
            stated, length = dict(self.hints.task or {}), self.context_length
            if length is not None and (most is None or length <= most):
                stated = {"context_length": length, **stated}
            paper = self.form.task
            usual = {} if paper is None else paper(*sizes, str(self.choices["score"][0]))
            if self.usual_length is not None:
                usual["context_length"] = self.usual_length
            fields = {**usual, "d_x": sizes[0], "d_y": sizes[1], **stated}
            task = build(TaskConfig, fields, "task.")
            if most is not None and "context_length" not in stated:
                task = replace(task, context_length=max(1, min(task.context_length, most)))
            self._tasks[sizes, most] = task, frozenset(flatten(stated, "task."))
        return self._tasks[sizes, most]

    def room(self, parts: Parts, tried: Tried) -> int | None:
        """Largest number of pairs that fits the number of positions in the file's settings.

        None if a table of positions shows it, as Garg et al. state half of the rows of their table.
        """
        room = self.settings.get("n_positions")
        if not isinstance(room, int) or room < 2 or "pos_embed.W_pos" in parts.ends:
            return None
        return (room - 1) // 2 if tried.get("layout") == "in_turn" else room - 1

    def sizes(self, parts: Parts, tried: Tried) -> tuple[int, int]:
        """d_x and d_y; if the user states both and the token is longer, its further columns are
        positions."""
        (stated_d_x, stated_d_y), n = self.stated, parts.d_token
        in_turn = tried.get("layout") == "in_turn"
        room = 0 if in_turn else 1
        d_y = parts.shown_responses or stated_d_y
        if d_y is None:
            d_y = 1 if stated_d_x is None or in_turn else n - stated_d_x
        if not 1 <= d_y <= n - room:
            wide = f"tokens of x are {n} wide" if in_turn else f"tokens are d_x + d_y = {n} wide"
            raise ValueError(f"d_y must lie in 1 to {n - room}, as {wide}, got {d_y}.")
        d_x = n - room * d_y
        exact = "output_column" in self.form.fixed or in_turn
        if stated_d_x is not None and stated_d_y is not None and not exact:
            d_x = min(d_x, stated_d_x)
        for label, values in (("task.", self.hints.task or {}), ("", self.hints.given)):
            for name, size in {"d_x": d_x, "d_y": d_y}.items():
                got = values.get(name, size)
                if type(got) is int and got != size:
                    raise ValueError(f"{label}{name} must be the weights' {size}, got {got}.")
        return d_x, d_y


@dataclass(frozen=True, eq=False)
class Case:
    """Parts of a file under one reading."""

    source: FileFacts
    parts: Parts
    tried: Tried
    model: ModelConfig
    task: TaskConfig
    known: frozenset[str]
    """Fields of the task that are stated or that shapes show, such as task.d_x."""
    stated: frozenset[str]
    """Fields of the task that the file's settings or the user state."""
    _predicted: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Predictions by number of prompts, as a case is compared several times."""

    def changed(self, changes: Iterable[Tried]) -> list["Case"]:
        """The case with each of these changes to its choices, where there is such a model."""
        cases = []
        for change in changes:
            with suppress(ValueError):  # rotary positions, for one, need heads of even width
                cases.append(case_of(self.source, self.parts, {**self.tried, **change}))
        return cases

    def refined(self) -> list["Case"]:
        """Cases with choices that leave no trace in names and shapes."""
        source = self.source
        return self.changed(refinements(self.tried, self.parts, source.form, source.closed))

    def predicted(self, prompts: Prompts) -> Tensor:
        """Predictions for the evaluation prompts of its task, in double precision.

        Raises:
            ValueError: If the weights are not finite.
        """
        count = len(prompts)
        if count not in self._predicted:
            weights = self.weights()
            if weights.model.one_attention:
                weights = weights.to(torch.float64)
            found = predictor_of(weights).predict(prompts.to(weights.dtype))
            self._predicted[count] = found.double()
        return self._predicted[count]

    def weights(self) -> Weights:
        """Weights of this reading."""
        return assembled(self.parts, self.tried, (self.task.d_x, self.task.d_y), self.model)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale = self.tried["scale"]
        return self.parts.d_head**-0.5 if scale is None else float(scale)

    def value_of(self, name: str) -> str | float | bool | None:
        """Value of a choice; the default scale and the entry of y are given as numbers."""
        if name == "scale":
            return self.scale
        if name == "output_column" and self.tried[name] is None:
            return columns(self.parts, self.tried, (self.task.d_x, self.task.d_y))[1][0]
        return self.tried.get(name)


def case_of(source: FileFacts, parts: Parts, tried: Tried) -> Case:
    """The parts under one reading, with the sizes of the task.

    Raises:
        ValueError: If no model or task has these sizes.
    """
    sizes = source.sizes(parts, tried)
    model = architecture(parts, tried, sizes)
    limits = (model.longest_context, source.room(parts, tried))
    task, known = source.task(sizes, min((n for n in limits if n is not None), default=None))
    ExperimentConfig(task=task, model=model)
    d_x, d_y = source.stated
    stated = known | {f"task.{n}" for n in ("d_x", "d_y") if n in source.hints.given}
    if parts.shown_responses or (d_x, d_y) != (None, None):
        in_doubt = len(source.choices.get("layout", ())) > 1 and d_x is None
        known |= {"task.d_y"} if in_doubt else {"task.d_x", "task.d_y"}
    return Case(source, parts, tried, model, task, known, stated)


def n_prompts_for(cases: Sequence[Case], more: int) -> int:
    """Number of prompts for all cases, so that their products stay within the limit."""
    count = more * (N_PROMPTS if cases[0].parts.alone else N_OF_LAYERS)
    for case in cases:
        task, parts = case.task, case.parts
        n_pos = (2 if case.tried.get("layout") == "in_turn" else 1) * (task.context_length + 1)
        size = sum(t.numel() for layer in parts.layers for t in layer.values())
        products = n_pos * (size + PER_WEIGHT * n_pos * len(parts.layers) * parts.n_heads)
        numbers = n_pos * max(parts.width, task.d_x + task.d_y)
        count = min(count, N_PRODUCTS // (len(cases) * products), N_NUMBERS // numbers)
    return max(LEAST_PROMPTS, count)


@dataclass(frozen=True, eq=False)
class Look:
    """Cases with different predictions, and their errors on the same prompts."""

    cases: list[Case]
    errors: list[Errors]
    count: int
    """Number of prompts."""

    @cached_property
    def losses(self) -> list[float]:
        """Mean error of each case; infinite if it is not a number."""
        return [float(error.mean().nan_to_num(torch.inf)) for error, _ in self.errors]

    @property
    def best(self) -> Case:
        """The case of the lowest loss, the first of several."""
        return self.cases[min(range(len(self.cases)), key=self.losses.__getitem__)]

    def of(self, rows: Sequence[int]) -> "Look":
        """Some of the cases."""
        return Look([self.cases[i] for i in rows], [self.errors[i] for i in rows], self.count)

    def groups(self, *names: str) -> dict[object, list[int]]:
        """Indices of the cases by their values of some choices, the lowest loss first."""
        groups: dict[object, list[int]] = {}
        for i, case in enumerate(self.cases):
            groups.setdefault(tuple(case.tried.get(n) for n in names), []).append(i)
        return {of: sorted(rows, key=self.losses.__getitem__) for of, rows in groups.items()}


def looked_at(cases: Sequence[Case], count: int) -> Look:
    """Cases without those that predict the same as an earlier one, with their errors relative to
    predicting 0."""
    prompts: dict[TaskConfig, Prompts] = {}
    kept: list[tuple[Case, Tensor]] = []
    errors: list[Errors] = []
    for case in cases:
        if case.task not in prompts:
            prompts[case.task] = evaluation_prompts(case.task, n_prompts=count)
        drawn = prompts[case.task]
        prediction = case.predicted(drawn)
        same_task = (each for other, each in kept if other.task == case.task)
        if any(_is_one(prediction, each) for each in same_task):
            continue
        zero = drawn.y_query.square().mean(1)
        error = (prediction - drawn.y_query).square().mean(1)
        kept.append((case, prediction))
        errors.append((error / zero.mean(), zero / zero.mean()))
    return Look([case for case, _ in kept], errors, count)


def _is_one(prediction: Tensor, other: Tensor) -> bool:
    """True if two predictions are equal up to rounding."""
    close = TIE * other.abs().max().nan_to_num(0.0, 0.0).item()
    return torch.allclose(prediction, other, rtol=0, atol=close, equal_nan=True)
