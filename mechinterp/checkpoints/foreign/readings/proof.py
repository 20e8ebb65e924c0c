"""Proof of a reading: which of the readings that the options allow give the predictions that the owner recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from pathlib import Path

import numpy as np
import torch

from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.case import Case, predicted_by
from mechinterp.checkpoints.foreign.readings.nearest import why_unproven
from mechinterp.checkpoints.foreign.readings.recorded import Recording, predictions_of
from mechinterp.checkpoints.foreign.readings.variations import Groups, merged, possible, usual_first
from mechinterp.checkpoints.io.files import NotUnderstoodError
from mechinterp.display import counted
from mechinterp.icl.prompts import draw_prompts

N_FEW = 16
"""Number of prompts for the first comparison of readings."""
MOST_TRIED = 512
"""Up to this number all combinations of choices are tried; otherwise the search starts at the nearest readings and changes one or
two choices at a time. A larger number only costs time."""
STARTS, _ROUNDS = 12, 4
"""Number of readings from which the search starts, and largest number of steps from each."""
N_PAIRED = 3
"""Number of nearest readings of which two choices at a time are changed."""
SAME = 1e-4
"""Largest relative difference of predictions of two readings that are one model; larger values merge more."""
_ROUNDED = 1e-5
"""Differences below this, in standard deviations, count as rounding: the more usual reading comes first."""
ELSEWHERE = 8
"""Number of prompts of another length on which proven readings are compared."""


@dataclass(frozen=True, eq=False)
class Proof:
    """Readings that give the recorded predictions; at least one."""

    cases: tuple[Case, ...]
    """Different models, the most usual first."""
    difference: float
    """Largest difference of the first from the recorded predictions, in standard deviations."""
    half: bool
    """True: to half precision only."""
    n_tried: int
    """Number of readings that were tried."""

    @property
    def open(self) -> list[str]:
        """Choices in which the proven readings differ."""
        first = self.cases[0]
        return [n for n in first.tried if len({case.value_of(n) for case in self.cases}) > 1]

    @property
    def in_words(self) -> str:
        """Clause on the proof: the number of readings tried, and the largest difference."""
        how = "to half precision" if self.half else "exactly"
        size = f"largest difference {self.difference:.1g} of their standard deviation"
        return (
            f"{self.n_tried} readings tried; this one gives the recorded predictions {how} ({size})"
        )


def prove(
    cases: Sequence[Case],
    recordings: Sequence[Recording],
    file: Path,
    *,
    shown: Sequence[Tried] = (),
    most: int | None = None,
) -> Proof:
    """The readings that give the recorded predictions.

    Args:
        cases: Usual readings of a file; their other choices are tried from here.
        recordings: Recorded predictions, all of which a proven reading gives.
        file: File of the weights, for messages.
        shown: Settings that a running module shows, which are not varied; several if it leaves open which of them holds.
        most: Largest number of readings to try, one forward pass on a few prompts each; the message then names the number alone.
    Raises:
        NotUnderstoodError: If no reading gives them; the message has the nearest, its R², and the one factor that
            would explain the difference.
        ValueError: If no reading has predictions of this kind.
    """
    search = _Search(cases, recordings, shown, most)
    search.go()
    proven = [case for case in search.ordered if search.difference(case) <= 1]
    if not proven and most is not None:
        tried = counted(len(search.known), "reading")
        raise NotUnderstoodError(
            f"{file}: no reading gives the predictions ({tried} tried, at most {most})"
        )
    if not proven:
        raise NotUnderstoodError(
            f"{file}: {why_unproven(search.ordered, search.by_shape, recordings[0])}"
        )
    proven = sorted(search.with_neighbours(proven), key=search.rank)
    different = _different(proven, recordings[0])
    half = any(each.half for each in recordings)
    gap = search.gap(different[0])
    return Proof(tuple(different), gap, half, len(search.misfits))


def _different(proven: Sequence[Case], recording: Recording) -> list[Case]:
    """Proven readings that are different models; what the code of a known format fixes is not open among them."""
    different: list[Case] = []
    for case in proven:
        if not any(_is_one_model(case, other, recording) for other in different):
            different.append(case)
    fixed = proven[0].source.form.fixed.items()
    known = [case for case in different if all(case.tried.get(n, v) == v for n, v in fixed)]
    return known or different


class _Search:
    """Readings by how far their predictions are from the recorded ones."""

    def __init__(
        self,
        cases: Sequence[Case],
        recordings: Sequence[Recording],
        shown: Sequence[Tried] = (),
        most: int | None = None,
    ) -> None:
        cases = _as_shown(cases, shown) if shown else cases
        self.starts, self.recordings, self.most = cases, recordings, most
        self.closed = {name for each in shown for name in each}
        by_parts = {id(case.parts): case for case in reversed(cases)}
        self.groups = {key: self.possible(case) for key, case in by_parts.items()}
        self.firsts = by_parts
        first = recordings[0]
        self.few = first.rows(slice(N_FEW))
        self.spread = first.prediction.var(0).sum().item()
        self.misfits: dict[Case, float] = {}
        self.shapes: dict[Case, float] = {}
        self.known: set[tuple[object, ...]] = set()
        self.fault: ValueError | None = None
        self.differences: dict[Case, float] = {}

    @property
    def ordered(self) -> list[Case]:
        """All readings tried so far, the nearest first."""
        return sorted(self.misfits, key=self.misfits.__getitem__)

    @property
    def by_shape(self) -> list[Case]:
        """All readings tried so far, the nearest up to a factor on the output first."""
        return sorted(self.shapes, key=self.shapes.__getitem__)

    def possible(self, case: Case) -> Groups:
        """Values of a reading's choices that are open."""
        return possible(case, self.recordings[0], self.closed)

    def neighbours(self, case: Case, most: int = 1) -> list[Case]:
        """Readings that differ in up to `most` groups of choices."""
        groups = self.possible(case)
        changes: list[Tried] = []
        for count in range(1, most + 1):
            for chosen in combinations(groups, count):
                changes += merged(product(*chosen))
        return case.changed(changes)

    def go(self) -> None:
        """Try all combinations, or search from the nearest of the usual ones.

        Raises:
            ValueError: If no reading has finite predictions.
        """
        self.add(self.starts)
        if sum(prod(map(len, each)) for each in self.groups.values()) > MOST_TRIED:
            self._climb()
        else:
            for key, case in self.firsts.items():
                self.add(case.changed(usual_first(self.groups[key])), self.most)
        if not any(np.isfinite(each) for each in self.misfits.values()):
            raise self.fault or ValueError(
                "no reading has finite predictions for the recorded prompts."
            )

    def _climb(self) -> None:
        """Search from the nearest readings, changing one and then two choices at a time."""
        for start in self.ordered[:STARTS]:
            case = start
            for _ in range(_ROUNDS):
                if self.most is not None and len(self.known) >= self.most:
                    return
                near = self.neighbours(case)
                self.add(near, self.most)
                # Each start has a path of its own, as the nearest of all may be a dead end.
                compared = [each for each in near if each in self.misfits]
                nearest = min(compared, key=self.misfits.__getitem__, default=case)
                if self.misfits[nearest] >= self.misfits[case]:
                    break
                case = nearest
            if self.difference(self.ordered[0]) <= 1:
                return
        for start in self.ordered[:N_PAIRED]:
            self.add(self.neighbours(start, 2), self.most)

    def with_neighbours(self, proven: Sequence[Case]) -> list[Case]:
        """Proven readings, with those that differ from the first in one choice."""
        for case in proven[:1]:
            self.add(self.neighbours(case), most=None)
        return [case for case in self.ordered if self.difference(case) <= 1]

    def add(self, cases: Sequence[Case], most: int | None = None) -> None:
        """Compare further readings on a few prompts.

        Args:
            most: Limit on the number of all readings; with a limit, the first proven one ends the comparison.
        """
        for case in cases:
            if case.key in self.known:
                continue
            if most is not None and len(self.known) >= most:
                return
            self.known.add(case.key)
            try:
                predicted = predictions_of(case.weights(), self.few)
            except ValueError as error:
                self.fault = self.fault or error
                continue
            rest = (predicted - self.few.prediction).square().mean(0).sum() / self.spread
            self.misfits[case] = float(rest.nan_to_num(torch.inf, torch.inf))
            wanted = self.few.prediction
            along = (predicted * wanted).sum() ** 2 / predicted.square().sum().clamp(min=1e-300)
            self.shapes[case] = float((1 - along / wanted.square().sum()).nan_to_num(torch.inf))
            if most is not None and self.difference(case) <= 1:
                return

    def difference(self, case: Case) -> float:
        """Largest difference from the recorded predictions over the limit; proven up to 1."""
        if case not in self.differences:
            # A mean of squares over the few prompts is at most the square of the largest difference.
            most = max(each.tolerance for each in self.recordings) ** 2
            worst = np.inf
            if self.misfits[case] <= 2 * most * self.few.prediction[0].numel():
                worst = max(
                    each.difference(predictions_of(case.weights(), each)) / each.tolerance
                    for each in self.recordings
                )
            self.differences[case] = worst
        return self.differences[case]

    def gap(self, case: Case) -> float:
        """Largest difference from the recorded predictions, in standard deviations."""
        return max(
            each.difference(predictions_of(case.weights(), each)) for each in self.recordings
        )

    def rank(self, case: Case) -> tuple[float, ...]:
        """Order of proven readings: the more exact first, then the more usual."""
        gap, places = self.gap(case), 0
        for values in self.groups[id(case.parts)]:
            fits = (i for i, each in enumerate(values) if each.items() <= case.tried.items())
            places += next(fits, len(values))
        return (gap if gap > _ROUNDED else 0.0, places)


def _as_shown(cases: Sequence[Case], shown: Sequence[Tried]) -> list[Case]:
    """The readings with the settings that a module shows, each once."""
    own: dict[object, Case] = {}
    for case in cases:
        extra = ("norm_eps",) if case.tried.get("norm") else ()
        known = {*case.tried, "rotary_base", "rotary_adjacent_pairs", *extra}
        for changed in case.changed(
            {n: v for n, v in each.items() if n in known} for each in shown
        ):
            own.setdefault(changed.key, changed)
    return list(own.values())


def _is_one_model(case: Case, other: Case, recording: Recording) -> bool:
    """True if two readings predict the same at other lengths, too."""
    own, longest = recording.length, case.model.longest_context
    for length in {max(1, own // 2), 2 * own if longest is None else min(2 * own, longest)} - {own}:
        task = replace(case.task, context_length=length)
        prompts = draw_prompts(task, ELSEWHERE, seed=0, dtype=torch.float64)
        try:
            one = predicted_by(case.weights(), prompts)
            two = predicted_by(other.weights(), prompts)
        except ValueError:
            continue
        if not (one - two).abs().max() <= SAME * one.abs().max():
            return False
    return True
