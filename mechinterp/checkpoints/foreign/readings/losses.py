"""Losses of readings on the same prompts of the task, and their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
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
_LOSS_ROUNDING = 1e-12
"""Standard errors below this count as 0."""
MARGIN, ERRORS = 0.05, 3.0
"""A loss is below another if it is lower by more than this fraction and this many standard errors,
else they tie.

Larger values make more readings tie.
"""
Errors = tuple[Tensor, Tensor]
"""Squared errors per prompt of a model and of predicting 0, divided by the mean of the latter."""


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
class ComparedCases:
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
    def best_row(self) -> int:
        """Index of the case of the lowest loss, the first of several."""
        return min(range(len(self.cases)), key=self.losses.__getitem__)

    @property
    def best(self) -> Case:
        """The case of the lowest loss."""
        return self.cases[self.best_row]

    def of(self, rows: Sequence[int]) -> "ComparedCases":
        """Some of the cases."""
        return ComparedCases(
            [self.cases[i] for i in rows], [self.errors[i] for i in rows], self.count
        )

    def groups(self, *names: str) -> dict[object, list[int]]:
        """Indices of the cases by their values of some choices, the lowest loss first."""
        groups: dict[object, list[int]] = {}
        for i, case in enumerate(self.cases):
            groups.setdefault(tuple(case.tried.get(n) for n in names), []).append(i)
        return {of: sorted(rows, key=self.losses.__getitem__) for of, rows in groups.items()}


def compare_cases(cases: Sequence[Case], count: int) -> ComparedCases:
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
    return ComparedCases([case for case, _ in kept], errors, count)


def _is_one(prediction: Tensor, other: Tensor) -> bool:
    """True if two predictions are equal up to rounding."""
    close = TIE * other.abs().max().nan_to_num(0.0, 0.0).item()
    return torch.allclose(prediction, other, rtol=0, atol=close, equal_nan=True)


@dataclass(frozen=True, eq=False)
class Reading:
    """One possible meaning of a file's tensors."""

    tried: Tried
    build: Callable[[], Weights]
    """Makes the weights on first use, as all readings together are many times as large as the file.
    """
    loss: float
    """Mean squared error relative to that of predicting 0, on prompts of the assumed task."""
    loss_sem: float
    predicts: bool
    """True if the loss is clearly below that of predicting 0."""
    ties: bool
    """True if no reading predicts clearly better, and this one predicts if any does."""
    stands: bool
    """False if another reading predicts clearly better, and has the same score or this one does not
    predict."""

    @cached_property
    def weights(self) -> Weights:
        """Weights under this reading."""
        return self.build()

    def to_document(self) -> dict[str, object]:
        """Choices, loss, and the flag `stands`."""
        numbers = {"loss": self.loss, "loss_sem": self.loss_sem, "stands": self.stands}
        return {**self.tried, **numbers}

    def __repr__(self) -> str:
        named = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.tried.items()
        )
        error = f" ± {self.loss_sem:.1g}" if self.loss_sem > _LOSS_ROUNDING else ""
        return f"{named or 'as it is'}: {self.loss:.3g}{error}"


class LazyReadings(Sequence[Reading]):
    """Readings of a file that leaves nothing open, which are tried on first use."""

    def __init__(self, make: Callable[[], Sequence[Reading]]) -> None:
        self.make = make

    @cached_property
    def every(self) -> Sequence[Reading]:
        return self.make()

    def __getitem__(self, row: int | slice) -> Any:
        return self.every[row]

    def __len__(self) -> int:
        return len(self.every)


def open_readings(readings: Sequence[Reading]) -> Sequence[Reading]:
    """Readings of a file that leaves settings open; empty for a file that leaves nothing open."""
    return () if isinstance(readings, LazyReadings) else readings


def ranked(
    candidates: Sequence[tuple[Tried, Callable[[], Weights]]],
    errors: Sequence[Errors],
) -> list[Reading]:
    """Readings, the best first; those that tie with the best keep the given order, as all do if
    none predicts.

    Args:
        errors: Errors per reading, on the same number of prompts; differences are paired, which is
            exact for the same prompts.
    """
    means = [float(error.mean().nan_to_num(torch.inf)) for error, _ in errors]
    best, zero = errors[means.index(min(means))]
    any_predicts = below(best, zero)
    rivals: dict[object, Tensor] = {}
    for row in sorted(range(len(means)), key=means.__getitem__):
        rivals.setdefault(candidates[row][0].get("score"), errors[row][0])
    readings, alike = [], []
    for (tried, build), (error, zero) in zip(candidates, errors, strict=True):
        loss, predicts = float(error.mean()), below(error, zero)
        # The standard error of heavy tails is large: a reading that may be no better than 0 does
        # not tie with one that predicts.
        ties = not below(best, error) and (predicts or not any_predicts)
        first_of_score = loss < 1 - MARGIN and not below(rivals[tried.get("score")], error)
        reading = Reading(
            tried=tried,
            build=build,
            loss=loss,
            loss_sem=float((error - loss * zero).std() / len(zero) ** 0.5),
            predicts=predicts,
            ties=ties,
            stands=not any_predicts or ties or first_of_score,
        )
        readings.append(reading)
        alike.append(ties and not below(best, error, margin=0.0))
    if not any(each.predicts for each in readings):
        return readings
    rows = range(len(readings))
    order = sorted(rows, key=lambda i: (not alike[i], 0.0 if alike[i] else means[i], i))
    return [readings[i] for i in order]


def below(error: Tensor, other: Tensor, margin: float = MARGIN) -> bool:
    """True if the mean of `error` is clearly below that of `other`; False if it is not finite."""
    if not torch.isfinite(error).all():
        return False
    gap = (other - error).nan_to_num(torch.inf)
    if not torch.isfinite(gap).all():
        return True
    clear = gap.mean() > ERRORS * gap.std() / len(gap) ** 0.5
    return bool(clear and gap.mean() > margin * other.mean())
