"""Every reading of what a file leaves open, tried on the same prompts.

What a known format settles is tried too where, as its code has it, the file predicts nothing.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.assemble import assembled, columns
from mechinterp.checkpoints.foreign.choices import DOUBTED
from mechinterp.checkpoints.foreign.options import Hints, option
from mechinterp.checkpoints.foreign.parsed import Parts
from mechinterp.checkpoints.foreign.readings import MARGIN, Errors, Reading, Said, ranked
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights

MAX_READINGS = 64
N_PROMPTS, N_OF_LAYERS, LEAST_PROMPTS = 2048, 512, 16
"""Prompts that readings are held against each other on: of one layer of attention, of others, and at least."""
AGAIN = 4
"""How many times as many where the best reading may be better than predicting 0, but not clearly."""
N_PRODUCTS, N_NUMBERS = 2**34, 2**24
"""About the products that all readings together may take, and the most numbers of the prompts."""
PER_WEIGHT = 16
"""What an attention weight costs, in products."""
TIE = 1e-6
"""Relative difference of predictions up to which two readings are one model."""


@dataclass(frozen=True, eq=False)
class Case:
    """Parts of a file, and how they are read."""

    parts: Parts
    said: Said
    task: TaskConfig
    hints: Hints
    known: frozenset[str]
    """Fields of the task that the file, its shapes or the reader say, as task.d_x."""

    def weights(self) -> Weights:
        """The model of this reading.

        Raises:
            ValueError: If its numbers do not stay finite.
        """
        return assembled(self.parts, self.said, (self.task.d_x, self.task.d_y), self.hints)

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale = self.said["scale"]
        return self.parts.d_head**-0.5 if scale is None else float(scale)

    def told(self, name: str) -> str | float | bool | None:
        """What is said of a choice; a usual scale, and the output's entry of y, as the number that it is."""
        if name == "scale":
            return self.scale
        if name == "output_column" and self.said[name] is None:
            return columns(self.parts, self.said, (self.task.d_x, self.task.d_y))[1][0]
        return self.said.get(name)

    def shown(self) -> AttentionWeights | Weights:
        """Its weights; of one layer of attention the heads."""
        weights = self.weights()
        return weights.circuits if weights.model.one_attention else weights


def tried(
    cases: Sequence[Case], closed: Collection[str], make: Callable[[Parts, Said], Case]
) -> tuple[Case, tuple[Reading, ...]]:
    """The case that predicts best, and the readings that were held against each other; none where one is said.

    Where none predicts, what is settled by convention is doubted: those that predict without it come behind.

    Args:
        closed: Names of choices that are not doubted.
        make: The case of parts that are read in one way.
    Raises:
        ValueError: If too much is left open, or both orientations predict for another d_x.
    """
    open_ones = open_choices(cases)
    if len(cases) > MAX_READINGS:
        rule = f"at most {MAX_READINGS} readings are tried, got {len(cases)}"
        raise ValueError(f"{rule}; say some of {', '.join(map(option, open_ones))}.")
    doubts = _doubts(cases, [*closed, *open_ones], make)
    if len(cases) == 1 and not doubts:
        return cases[0], ()
    for more in (1, AGAIN):
        count = _n_prompts(cases, more)
        kept, errors = _apart(cases, count)
        readings = _ranked(kept, errors, open_ones)
        predicts = any(each.predicts for each in readings)
        if predicts or all(each.loss >= 1 - MARGIN for each in readings):
            break
    first = next(case for case in kept if case.shown == readings[0].build)
    if predicts:
        _require_one_size(kept, readings)
    else:
        others, other_errors = _apart(doubts, count)
        names = open_choices([first, *others])
        names = [*open_ones, *(n for n in DOUBTED if n in names and n not in open_ones)]
        doubted = _ranked([*kept, *others], [*errors, *other_errors], names)
        if working := [each for each in doubted if each.predicts][:4]:
            told = {n: first.told(n) for n in names}
            return first, (replace(readings[0], stands=True, said=told), *working)
    return first, tuple(readings) if len(cases) > 1 else ()


def open_choices(cases: Sequence[Case]) -> list[str]:
    """The choices in which cases differ."""
    return [n for n in cases[0].said if len({case.said.get(n) for case in cases}) > 1]


def _ranked(cases: Sequence[Case], errors: Sequence[Errors], names: Sequence[str]) -> list[Reading]:
    """The readings by what they may differ in."""
    return ranked([({n: case.told(n) for n in names}, case.shown) for case in cases], errors)


def _doubts(
    cases: Sequence[Case], closed: Collection[str], make: Callable[[Parts, Said], Case]
) -> list[Case]:
    """Cases with one thing other than the format's code has it, of what neither is open nor closed."""
    doubts = []
    for case, (name, values) in product(cases, DOUBTED.items()):
        is_open = name not in closed and case.said.get(name) is not None
        for value in values if is_open and _is_possible(case, name) else ():
            if value != case.said[name]:
                with suppress(ValueError):  # tokens of other sizes may not fit
                    doubts.append(make(case.parts, {**case.said, name: value}))
    return doubts if len(doubts) <= MAX_READINGS else doubts[: len(doubts) // len(cases)]


def _is_possible(case: Case, name: str) -> bool:
    """Whether another value could mean something: tokens in turn need a read-in, and have no order of columns."""
    if name == "columns":
        return case.said.get("layout") != "in_turn"
    return name != "layout" or case.parts.has("read_in.weight")


def _require_one_size(cases: Sequence[Case], readings: Sequence[Reading]) -> None:
    """Refuse one layer of which both orientations predict, with other numbers of x."""
    if not all(case.parts.alone for case in cases):
        return
    tasks = {case.shown: case.task for case in cases}
    sizes = {tasks[each.build].d_x for each in readings if each.predicts}
    if len(sizes) > 1:
        listed = " or ".join(f"d_x = {d_x}" for d_x in sorted(sizes))
        raise ValueError(
            f"the orientation of its matrices is not in the file, {listed} predict both; give --d-x (d_x=) or "
            "--orientation (orientation=)."
        )


def _n_prompts(cases: Sequence[Case], more: int) -> int:
    """One number of prompts for all, of as many products as all together may take."""
    count = more * (N_PROMPTS if cases[0].parts.alone else N_OF_LAYERS)
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
        weights, drawn = case.weights(), prompts[case.task]
        if weights.model.one_attention:
            weights = weights.to(torch.float64)
        prediction = predictor_of(weights).predict(drawn.to(weights.dtype)).double()
        if any(o.task == case.task and _is_one(prediction, each) for o, each in kept):
            continue
        zero = drawn.y_query.square().mean(1)
        error = (prediction - drawn.y_query).square().mean(1)
        kept.append((case, prediction))
        errors.append((error / zero.mean(), zero / zero.mean()))
    return [case for case, _ in kept], errors


def _is_one(prediction: Tensor, other: Tensor) -> bool:
    """Whether two predictions are those of one model, but for rounding."""
    close = TIE * other.abs().max().nan_to_num(0.0, 0.0).item()
    return torch.allclose(prediction, other, rtol=0, atol=close, equal_nan=True)
