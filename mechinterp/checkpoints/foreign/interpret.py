"""Tests of all readings that a file leaves open, on the same prompts.

If no reading of a known format predicts anything, choices that the format fixes are tried too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from mechinterp.checkpoints.foreign.case import AGAIN, Case, Look, looked_at, n_prompts_for
from mechinterp.checkpoints.foreign.choices import DOUBTED, REFINED_NAMES, near_values
from mechinterp.checkpoints.foreign.options import option
from mechinterp.checkpoints.foreign.readings import MARGIN, Reading, below, ranked

MAX_READINGS = 64
MOST_REFINED = 24
"""Number of best readings whose refinements are tried.

Raised from 8 after files of trained test models had been read, whose correct reading ranked lower
without its refinement. No other file confirms 24. A larger number only costs time.
"""
N_REFINED = 512
"""Number of prompts for the first comparison of refinements.

Set after trained test models had been read: with 256 one of eight files was not understood. More prompts only cost time.
"""
ROUNDS = 3
"""Most steps from a refined reading, each of which changes one choice for the better; more steps
only cost time."""
MOST_NEAR = 4
"""Number of readings of each score and mask in the second comparison.

Set after readings of trained test models had been seen, to limit the time. A larger number only
costs time.
"""
MUCH_BETTER = 1.5
"""The most common mask is chosen unless the other's loss is lower by more than this factor.

Set after seven files of causal models had been read: without their mask the loss was 0.89 to 1.4
times as large. A larger value keeps the common mask more often.
"""
REFINED_MARGIN = 0.01
"""A refinement is taken only if its loss is lower by more than this part: a trained model that is turned or run again by
mistake gets worse, but a wrong task can make it better by a little."""


@dataclass(frozen=True, eq=False)
class Tried:
    """The chosen reading of a file, and the readings that it was compared with."""

    case: Case
    readings: tuple[Reading, ...]
    """All compared readings, the chosen one first; empty if only one is possible and it predicts.
    """
    names: tuple[str, ...]
    """Names of the choices in which the readings differ."""
    understood: bool
    """True if the chosen reading predicts clearly better than 0."""


def tried(cases: Sequence[Case]) -> Tried:
    """The case that predicts best, and the readings that it was compared with.

    Where none predicts, what is settled by convention is doubted: those that predict without it come behind.

    Raises:
        ValueError: If too much is left open, or both orientations predict for another d_x.
    """
    open_ones = open_choices(cases)
    if len(cases) > MAX_READINGS:
        rule = f"at most {MAX_READINGS} readings are tried, got {len(cases)}"
        raise ValueError(f"{rule}; state some of {', '.join(map(option, open_ones))}.")
    better: list[Case] = []
    look = looked_at(cases, n_prompts_for(cases, 1))
    (order,) = look.groups().values()
    if refined := [each for i in order[:MOST_REFINED] for each in look.cases[i].refined()]:
        every = [*look.cases, *refined]
        look = looked_at(every, min(N_REFINED, n_prompts_for(every, 1)))
    every = list(look.cases)
    for start in _starts(look):
        if look.losses[start] < 1 - MARGIN:
            better += _improved(look.cases[start], every, look.count)
    look = looked_at([*every, *better], look.count) if better else look
    names = [*open_ones, *(n for n in open_choices(look.cases) if n not in open_ones)]
    readings = _ranked(look, names)
    rest: list[Reading] = []
    hopeful = any(each.loss < 1 - MARGIN for each in readings)
    if hopeful and (len(look.cases) > 1 or not readings[0].predicts):
        near = _near_the_best(look, cases)
        rest = [each for each in readings if each.build not in {case.shown for case in near}]
        near += look.best.refined()
        look = looked_at(_usual_first(near, cases), n_prompts_for(near, AGAIN))
    look, other = _of_usual_mask(look, cases)
    look = _without_idle_refinements(look, cases)
    readings = _ranked(look, names)
    first = next(case for case in look.cases if case.shown == readings[0].build)
    if any(each.predicts for each in readings):
        _require_one_size(look.cases, readings)
        understood = readings[0].predicts
        rest = [replace(each, stands=False, ties=False) for each in rest]
        if other.cases:
            rival = _ranked(other, names)[0]
            readings.append(replace(rival, stands=False, ties=rival.predicts))
        several = len(cases) > 1 or len(readings) > 1 or not understood
        return Tried(first, (*readings, *rest) if several else (), tuple(names), understood)
    doubts = looked_at([first, *_doubts(cases, names)], look.count)
    names += [n for n in DOUBTED if n in open_choices(doubts.cases) and n not in names]
    if working := [each for each in _ranked(doubts, names) if each.predicts][:4]:
        told = {n: first.told(n) for n in names}
        readings = [replace(readings[0], stands=True, said=told), *working]
    return Tried(first, (*readings, *rest), tuple(names), understood=False)


def _starts(look: Look) -> list[int]:
    """Rows to improve: for each mask the best reading and the best one with softmax.

    At first the latter can be worse than a reading with linear scores.
    """
    best = {rows[0] for rows in look.groups("context_only").values()}
    by_score = [rows[0] for rows in look.groups("score", "context_only").values()]
    return sorted(best | {i for i in by_score if look.cases[i].said.get("score") == "softmax"})


def _improved(case: Case, cases: Sequence[Case], count: int) -> list[Case]:
    """Better readings found from a case by refinements and changes of one choice at a time.

    The norm or activation that predicts best can depend on a refinement, and one refinement on another.
    """
    kept = ("rotary", "positions", "context_only")
    names = [n for n in open_choices(cases) if n in case.said and not n.startswith(kept)]
    values = {n: dict.fromkeys(c.said[n] for c in cases if n in c.said) for n in names}
    better: list[Case] = []
    for _ in range(ROUNDS):
        more = near_values(case.said, case.parts, case.source.closed)
        tries = {n: dict.fromkeys((*values.get(n, ()), *more.get(n, ()))) for n in values | more}
        changes = [{n: v} for n, vs in tries.items() for v in vs if v != case.said[n]]
        # A less usual value can need another value of a second choice.
        less = [(n, v) for n, vs in more.items() for v in vs]
        changes += [{n: v, **other} for n, v in less for other in changes if n not in other]
        look = looked_at([case, *case.refined(), *case.changed(changes)], count)
        if look.best is case:
            break
        case = look.best
        better.append(case)
    return better


def _near_the_best(look: Look, cases: Sequence[Case]) -> list[Case]:
    """For each score and mask, the cases that may be its best with more prompts; also the best
    unrefined case."""
    plain = {id(case) for case in cases}
    near: set[int] = set()
    for rows in look.groups("context_only").values():
        near |= {*[i for i in rows if id(look.cases[i]) in plain][:1]}
    for rows in look.groups("score", "context_only").values():
        best = look.errors[rows[0]][0]
        near |= {*[i for i in rows if not below(best, look.errors[i][0], 0.0)][:MOST_NEAR]}
    return [look.cases[i] for i in sorted(near)]


def _usual_first(near: Sequence[Case], cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of their choices, so that of tied refinements the most common comes
    first."""
    values = {n: list(dict.fromkeys(case.said[n] for case in cases)) for n in cases[0].said}

    def rank(case: Case) -> list[int]:
        orders = ((case.said.get(name), order) for name, order in values.items())
        return [order.index(v) if v in order else len(order) for v, order in orders]

    return sorted(near, key=rank)


def _without_idle_refinements(look: Look, cases: Sequence[Case]) -> Look:
    """The cases without refinements, unless one predicts better than every unrefined case.

    Then that refinement and those that predict as well are kept.
    """
    unrefined = {name: {case.said.get(name) for case in cases} for name in REFINED_NAMES}
    plain = [all(c.said.get(n) in unrefined[n] for n in REFINED_NAMES) for c in look.cases]
    rows = sorted(range(len(plain)), key=look.losses.__getitem__)
    best = look.errors[next(i for i in rows if plain[i])][0]
    better = [i for i in rows if not plain[i] and below(*look.errors[i])]
    better = [i for i in better if below(look.errors[i][0], best, REFINED_MARGIN)][:1]
    kept = [
        i
        for i, (error, zero) in enumerate(look.errors)
        if plain[i]
        or (better and below(error, zero) and not below(look.errors[better[0]][0], error, 0.0))
    ]
    return look.of(_of_the_best_base(look, kept))


def _of_the_best_base(look: Look, rows: Sequence[int]) -> list[int]:
    """Rows without those that differ from a better one in the base of rotary positions only: near
    bases predict almost alike, so that no base is named as open."""
    best: dict[object, int] = {}
    for row in sorted(rows, key=look.losses.__getitem__):
        case = look.cases[row]
        rest = frozenset((n, v) for n, v in case.said.items() if n != "rotary_base")
        best.setdefault((id(case.parts), rest), row)
    return sorted(best.values())


def _of_usual_mask(look: Look, cases: Sequence[Case]) -> tuple[Look, Look]:
    """Cases with the most common mask, and cases with the other mask.

    If the other mask predicts much better: all cases, and none. A causal model that is read without
    its mask can have a lower loss than with it, so a small advantage does not count.
    """
    usual = cases[0].said.get("context_only")
    groups = look.groups("context_only")
    own = groups.pop((usual,), [])
    other = [i for rows in groups.values() for i in rows]
    if not own or not other:
        return look, look.of([])
    own_loss, other_loss = (min(look.losses[i] for i in rows) for rows in (own, other))
    if own_loss > min(1 - MARGIN, MUCH_BETTER * other_loss):
        return look, look.of([])
    return look.of(sorted(own)), look.of(sorted(other))


def open_choices(cases: Sequence[Case]) -> list[str]:
    """Choices in which the cases differ."""
    return [n for n in cases[0].said if len({case.said.get(n) for case in cases}) > 1]


def _ranked(look: Look, names: Sequence[str]) -> list[Reading]:
    """Readings, ranked, with the choices in which they may differ."""
    said = [({n: case.told(n) for n in names}, case.shown) for case in look.cases]
    return ranked(said, look.errors)


def _doubts(cases: Sequence[Case], compared: Sequence[str]) -> list[Case]:
    """Cases that differ from the format's code in one choice, for choices that are neither stated
    nor among those that were compared."""
    doubts: list[Case] = []
    source = cases[0].source
    # A format's mask is not doubted.
    closed = {*compared, *source.given, *({"attend_to_self"} & source.form.settled.keys())}
    for case, (name, values) in product(cases, DOUBTED.items()):
        is_open = name not in closed and case.said.get(name) is not None
        if is_open and _is_possible(case, name):
            doubts += case.changed({name: v} for v in values if v != case.said[name])
    return doubts if len(doubts) <= MAX_READINGS else doubts[: len(doubts) // len(cases)]


def _is_possible(case: Case, name: str) -> bool:
    """True if another value is possible: tokens in turn need a read-in, and have no order of
    columns."""
    if name == "columns":
        return case.said.get("layout") != "in_turn"
    return name != "layout" or case.parts.has("read_in.weight")


def _require_one_size(cases: Sequence[Case], readings: Sequence[Reading]) -> None:
    """Refuse one layer of attention for which both orientations predict, with different d_x."""
    if not all(case.parts.alone for case in cases):
        return
    tasks = {case.shown: case.task for case in cases}
    sizes = {tasks[each.build].d_x for each in readings if each.predicts}
    if len(sizes) > 1:
        listed = " or ".join(f"d_x = {d_x}" for d_x in sorted(sizes))
        raise ValueError(
            f"the file does not state the orientation of its matrices, and {listed} both predict; give --d-x (d_x=) or "
            "--orientation (orientation=)."
        )
