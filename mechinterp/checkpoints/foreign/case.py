"""One reading of a file as a model, with its predictions for prompts of its task."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.assemble import architecture, assembled, columns
from mechinterp.checkpoints.foreign.choices import Choices, refinements
from mechinterp.checkpoints.foreign.formats import Format
from mechinterp.checkpoints.foreign.options import Hints
from mechinterp.checkpoints.foreign.parsed import Parts
from mechinterp.checkpoints.foreign.readings import Errors, Said
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.fields import build, flatten
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights

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


@dataclass(frozen=True, eq=False)
class Source:
    """Facts about a file that hold for all its readings."""

    form: Format
    choices: Choices
    given: Mapping[str, object]
    """Choices that the user or the file's settings state."""
    hints: Hints
    """Arguments of `load`; `task` has the fields that the file's settings state, too."""
    settings: Mapping[str, object]

    @property
    def closed(self) -> Mapping[str, object]:
        """Choices that are stated, or that the format fixes."""
        return {**self.form.settled, **self.given}

    def stated(self, name: str) -> int | None:
        """d_x or d_y, if the user or the file states it."""
        value = self.hints.given.get(name, (self.hints.task or {}).get(name))
        return value if type(value) is int else None

    @property
    def context_length(self) -> int | None:
        """Number of pairs in a prompt, if the file's settings state it."""
        points, length = (self.settings.get(name) for name in ("n_points", "context_length"))
        length = points - 1 if isinstance(points, int) else length
        return length if isinstance(length, int) else None

    def room(self, parts: Parts, said: Said) -> int | None:
        """Largest number of pairs that fits the number of positions in the file's settings.

        None if a table of positions shows it, as Garg et al. state half of the rows of their table.
        """
        room = self.settings.get("n_positions")
        if not isinstance(room, int) or room < 2 or "positions.weight" in parts.ends:
            return None
        return (room - 1) // 2 if said.get("layout") == "in_turn" else room - 1

    def sizes(self, parts: Parts, said: Said) -> tuple[int, int]:
        """d_x and d_y; if the user states both and the token is longer, its further columns are
        positions."""
        stated_d_x, stated_d_y, n = self.stated("d_x"), self.stated("d_y"), parts.d_token
        in_turn = said.get("layout") == "in_turn"
        room = 0 if in_turn else 1
        d_y = parts.shown_responses or stated_d_y
        if d_y is None:
            d_y = 1 if stated_d_x is None or in_turn else n - stated_d_x
        if not 1 <= d_y <= n - room:
            wide = f"tokens of x are {n} wide" if in_turn else f"tokens are d_x + d_y = {n} wide"
            raise ValueError(f"d_y must lie in 1 to {n - room}, as {wide}, got {d_y}.")
        d_x = n - room * d_y
        exact = "output_column" in self.form.settled or in_turn
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

    source: Source
    parts: Parts
    said: Said
    task: TaskConfig
    known: frozenset[str]
    """Fields of the task that the file, its shapes or the user state, such as task.d_x."""
    _predicted: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Predictions by number of prompts, as a case is compared several times."""

    def changed(self, changes: Iterable[Said]) -> list["Case"]:
        """The case with each of these changes to its choices, where there is such a model."""
        cases = []
        for change in changes:
            with suppress(ValueError):  # rotary positions, for one, need heads of even width
                cases.append(case_of(self.source, self.parts, {**self.said, **change}))
        return cases

    def refined(self) -> list["Case"]:
        """Cases with choices that leave no trace in names and shapes."""
        source = self.source
        return self.changed(refinements(self.said, self.parts, source.form, source.closed))

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
        return assembled(self.parts, self.said, (self.task.d_x, self.task.d_y))

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale = self.said["scale"]
        return self.parts.d_head**-0.5 if scale is None else float(scale)

    def told(self, name: str) -> str | float | bool | None:
        """Value of a choice; the default scale and the entry of y are given as numbers."""
        if name == "scale":
            return self.scale
        if name == "output_column" and self.said[name] is None:
            return columns(self.parts, self.said, (self.task.d_x, self.task.d_y))[1][0]
        return self.said.get(name)

    def shown(self) -> AttentionWeights | Weights:
        """Weights of this reading; for one layer of attention, its circuits."""
        weights = self.weights()
        return weights.circuits if weights.model.one_attention else weights


def case_of(source: Source, parts: Parts, said: Said) -> Case:
    """The parts under one reading, with the sizes of the task.

    Raises:
            ValueError: If no model or task has these sizes.
    """
    sizes, stated = source.sizes(parts, said), dict(source.hints.task or {})
    model = architecture(parts, said, sizes)
    limits = (model.longest_context, source.room(parts, said))
    most = min((n for n in limits if n is not None), default=None)
    length = source.context_length
    if length is not None and (most is None or length <= most):
        stated = {"context_length": length, **stated}
    usual = source.form.task(*sizes, str(source.choices["score"][0]))
    fields = {**usual, "d_x": sizes[0], "d_y": sizes[1], **stated}
    task = build(TaskConfig, fields, "task.")
    if most is not None and "context_length" not in stated:
        task = replace(task, context_length=max(1, min(task.context_length, most)))
    ExperimentConfig(task=task, model=model)
    known = set(flatten(stated, "task."))
    d_x, d_y = source.stated("d_x"), source.stated("d_y")
    if parts.shown_responses or (d_x, d_y) != (None, None):
        known.add("task.d_y")
        in_doubt = len(source.choices.get("layout", ())) > 1 and d_x is None
        known |= set() if in_doubt else {"task.d_x"}
    return Case(source, parts, said, task, frozenset(known))


def n_prompts_for(cases: Sequence[Case], more: int) -> int:
    """Number of prompts for all cases, so that their products stay within the limit."""
    count = more * (N_PROMPTS if cases[0].parts.alone else N_OF_LAYERS)
    for case in cases:
        task, parts = case.task, case.parts
        n_pos = (2 if case.said.get("layout") == "in_turn" else 1) * (task.context_length + 1)
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
            groups.setdefault(tuple(case.said.get(n) for n in names), []).append(i)
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
        if any(o.task == case.task and _is_one(prediction, each) for o, each in kept):
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
