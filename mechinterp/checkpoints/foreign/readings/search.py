"""Readings of a file that leaves settings open, and which of them predict on prompts of the task.

The loss decides on the scale, the columns and how parts are combined, as training has adapted to
them. It does not decide on the score: a model trained with softmax scores can predict better with
linear ones. So the best reading of every score is kept, unless it predicts nothing."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from mechinterp.checkpoints.foreign.options import flag_of
from mechinterp.checkpoints.foreign.readings.case import Case
from mechinterp.checkpoints.foreign.readings.choices import DOUBTED, REFINED_NAMES, near_values
from mechinterp.checkpoints.foreign.readings.losses import (
    AGAIN,
    MARGIN,
    ComparedCases,
    Reading,
    below,
    compare_cases,
    n_prompts_for,
    ranked,
)

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
_ROUNDS = 3
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
MOST_PACKED, N_PACKED = 16, 256
"""Numbers of readings of each packing, and of prompts, that decide on the packing of a qkv matrix."""


def try_cases(cases: Sequence[Case]) -> tuple[Case, tuple[Reading, ...], list[str]]:
    """The case that predicts best, the readings, and the names of the choices in which they differ.

    The chosen reading comes first. There are no readings if only one is possible and it predicts.
    If none predicts, readings that predict against a convention of the format follow.

    Raises:
        ValueError: If too much is left open, or both orientations predict for another d_x.
    """
    open_ones = open_choices(cases)
    if len(cases) > MAX_READINGS:
        rule = f"at most {MAX_READINGS} readings are tried, got {len(cases)}"
        raise ValueError(f"{rule}; state some of {', '.join(map(flag_of, open_ones))}.")
    compared = _with_less_usual(cases)
    names = [*open_ones, *(n for n in open_choices(compared.cases) if n not in open_ones)]
    readings, rest = _ranked(compared, names), []
    hopeful = any(each.loss < 1 - MARGIN for each in readings)
    if hopeful and (len(compared.cases) > 1 or not readings[0].predicts):
        near = _near_the_best(compared, cases)
        rest = [each for each in readings if each.build not in {case.weights for case in near}]
        near += compared.best.refined()
        compared = compare_cases(_usual_first(near, cases), n_prompts_for(near, AGAIN))
    compared, other = _of_usual_mask(compared, cases)
    compared = _without_idle_refinements(compared, cases)
    readings = _ranked(compared, names)
    first = next(case for case in compared.cases if case.weights == readings[0].build)
    if not any(each.predicts for each in readings):
        readings, names = _against_convention(first, readings, cases, names, compared.count)
        return first, (*readings, *rest), names
    _require_one_size(compared.cases, readings)
    rest = [replace(each, stands=False, ties=False) for each in rest]
    if other.cases:
        rival = _ranked(other, names)[0]
        readings.append(replace(rival, stands=False, ties=rival.predicts))
    several = len(cases) > 1 or len(readings) > 1 or not readings[0].predicts
    return first, (*readings, *rest) if several else (), names


def _with_less_usual(cases: Sequence[Case]) -> ComparedCases:
    """The cases, refinements of the best of them, and better ones found from the best of all."""
    compared = compare_cases(cases, n_prompts_for(cases, 1))
    (order,) = compared.groups().values()
    if refined := [each for i in order[:MOST_REFINED] for each in compared.cases[i].refined()]:
        every = [*compared.cases, *refined]
        compared = compare_cases(every, min(N_REFINED, n_prompts_for(every, 1)))
    better: list[Case] = []
    for start in _starts(compared):
        if compared.losses[start] < 1 - MARGIN:
            better += _improved(compared.cases[start], compared.cases, compared.count)
    return compare_cases([*compared.cases, *better], compared.count) if better else compared


def _against_convention(
    first: Case, readings: list[Reading], cases: Sequence[Case], names: list[str], count: int
) -> tuple[list[Reading], list[str]]:
    """Readings and choices to compare if no reading predicts: those that predict against a convention of the format follow."""
    doubts = compare_cases([first, *_doubts(cases, names)], count)
    names = names + [n for n in DOUBTED if n in open_choices(doubts.cases) and n not in names]
    if working := [each for each in _ranked(doubts, names) if each.predicts][:4]:
        choices = {n: first.value_of(n) for n in names}
        readings = [replace(readings[0], stands=True, tried=choices), *working]
    return readings, names


def _starts(compared: ComparedCases) -> list[int]:
    """Rows to improve: for each mask the best reading and the best one with softmax.

    At first the latter can be worse than a reading with linear scores.
    """
    best = {rows[0] for rows in compared.groups("context_keys").values()}
    by_score = [rows[0] for rows in compared.groups("score", "context_keys").values()]
    return sorted(best | {i for i in by_score if compared.cases[i].tried.get("score") == "softmax"})


def _improved(case: Case, cases: Sequence[Case], count: int) -> list[Case]:
    """Better readings found from a case by refinements and changes of one choice at a time.

    The norm or activation that predicts best can depend on a refinement, and one refinement on another.
    """
    kept = ("rotary", "positions", "context_keys")
    names = [n for n in open_choices(cases) if n in case.tried and not n.startswith(kept)]
    values = {n: dict.fromkeys(c.tried[n] for c in cases if n in c.tried) for n in names}
    better: list[Case] = []
    for _ in range(_ROUNDS):
        more = near_values(case.tried, case.parts, case.source.closed)
        tries = {n: dict.fromkeys((*values.get(n, ()), *more.get(n, ()))) for n in values | more}
        changes = [{n: v} for n, vs in tries.items() for v in vs if v != case.tried[n]]
        # A less usual value can need another value of a second choice.
        less = [(n, v) for n, vs in more.items() for v in vs]
        changes += [{n: v, **other} for n, v in less for other in changes if n not in other]
        compared = compare_cases([case, *case.refined(), *case.changed(changes)], count)
        if compared.best is case:
            break
        case = compared.best
        better.append(case)
    return better


def _near_the_best(compared: ComparedCases, cases: Sequence[Case]) -> list[Case]:
    """For each score and mask, the cases that may be its best with more prompts; also the best
    unrefined case."""
    plain = {id(case) for case in cases}
    near: set[int] = set()
    for rows in compared.groups("context_keys").values():
        near |= {*[i for i in rows if id(compared.cases[i]) in plain][:1]}
    for rows in compared.groups("score", "context_keys").values():
        best = compared.errors[rows[0]][0]
        near |= {*[i for i in rows if not below(best, compared.errors[i][0], 0.0)][:MOST_NEAR]}
    return [compared.cases[i] for i in sorted(near)]


def _usual_first(near: Sequence[Case], cases: Sequence[Case]) -> list[Case]:
    """The cases in the order of their choices, so that of tied refinements the most common comes
    first."""
    values = {n: list(dict.fromkeys(case.tried[n] for case in cases)) for n in cases[0].tried}

    def rank(case: Case) -> list[int]:
        orders = ((case.tried.get(name), order) for name, order in values.items())
        return [order.index(v) if v in order else len(order) for v, order in orders]

    return sorted(near, key=rank)


def _without_idle_refinements(compared: ComparedCases, cases: Sequence[Case]) -> ComparedCases:
    """The cases without refinements, unless one predicts better than every unrefined case.

    Then that refinement and those that predict as well are kept.
    """
    unrefined = {name: {case.tried.get(name) for case in cases} for name in REFINED_NAMES}
    plain = [all(c.tried.get(n) in unrefined[n] for n in REFINED_NAMES) for c in compared.cases]
    rows = sorted(range(len(plain)), key=compared.losses.__getitem__)
    best = compared.errors[next(i for i in rows if plain[i])][0]
    better = [i for i in rows if not plain[i] and below(*compared.errors[i])]
    better = [i for i in better if below(compared.errors[i][0], best, REFINED_MARGIN)][:1]
    kept = [
        i
        for i, (error, zero) in enumerate(compared.errors)
        if plain[i]
        or (better and below(error, zero) and not below(compared.errors[better[0]][0], error, 0.0))
    ]
    return compared.of(_of_the_best_base(compared, kept))


def _of_the_best_base(compared: ComparedCases, rows: Sequence[int]) -> list[int]:
    """Rows without those that differ from a better one in the base of rotary positions only: near
    bases predict almost alike, so that no base is named as open."""
    best: dict[object, int] = {}
    for row in sorted(rows, key=compared.losses.__getitem__):
        case = compared.cases[row]
        rest = frozenset((n, v) for n, v in case.tried.items() if n != "rotary_base")
        best.setdefault((id(case.parts), rest), row)
    return sorted(best.values())


def _of_usual_mask(
    compared: ComparedCases, cases: Sequence[Case]
) -> tuple[ComparedCases, ComparedCases]:
    """Cases with the most common mask, and cases with the other mask.

    If the other mask predicts much better: all cases, and none. A causal model that is read without
    its mask can have a lower loss than with it, so a small advantage does not count.
    """
    usual = cases[0].tried.get("context_keys")
    groups = compared.groups("context_keys")
    own = groups.pop((usual,), [])
    other = [i for rows in groups.values() for i in rows]
    if not own or not other:
        return compared, compared.of([])
    own_loss, other_loss = (min(compared.losses[i] for i in rows) for rows in (own, other))
    if own_loss > min(1 - MARGIN, MUCH_BETTER * other_loss):
        return compared, compared.of([])
    return compared.of(sorted(own)), compared.of(sorted(other))


def better_packing(groups: Sequence[list[Case]]) -> list[Case]:
    """Readings of the packing that predicts better; of the usual one unless another predicts clearly better."""
    if len(groups) == 1:
        return groups[0]
    packings = [compare_cases(cases[:MOST_PACKED], N_PACKED) for cases in groups]
    errors = [each.errors[each.best_row] for each in packings]
    chosen = 0
    for row, (error, zero) in enumerate(errors):
        if below(error, zero) and below(error, errors[chosen][0]):
            chosen = row
    return groups[chosen]


def open_choices(cases: Sequence[Case]) -> list[str]:
    """Choices in which the cases differ."""
    return [n for n in cases[0].tried if len({case.tried.get(n) for case in cases}) > 1]


def _ranked(compared: ComparedCases, names: Sequence[str]) -> list[Reading]:
    """Readings, ranked, with the choices in which they may differ."""
    tried = [({n: case.value_of(n) for n in names}, case.weights) for case in compared.cases]
    return ranked(tried, compared.errors)


def _doubts(cases: Sequence[Case], compared: Sequence[str]) -> list[Case]:
    """Cases that differ from the format's code in one choice, for choices that are neither stated
    nor among those that were compared."""
    doubts: list[Case] = []
    source = cases[0].source
    # A format's mask is not doubted.
    closed = {*compared, *source.given, *({"attend_to_self"} & source.form.fixed.keys())}
    for case, (name, values) in product(cases, DOUBTED.items()):
        is_open = name not in closed and case.tried.get(name) is not None
        # Tokens in turn need a read-in, and have no order of columns.
        fits = {
            "columns": case.tried.get("layout") != "in_turn",
            "layout": case.parts.has("W_in"),
        }
        if is_open and fits.get(name, True):
            doubts += case.changed({name: v} for v in values if v != case.tried[name])
    return doubts if len(doubts) <= MAX_READINGS else doubts[: len(doubts) // len(cases)]


def _require_one_size(cases: Sequence[Case], readings: Sequence[Reading]) -> None:
    """Refuse one layer of attention for which both orientations predict, with different d_x."""
    if not all(case.parts.alone for case in cases):
        return
    tasks = {case.weights: case.task for case in cases}
    sizes = {tasks[each.build].d_x for each in readings if each.predicts}
    if len(sizes) > 1:
        listed = " or ".join(f"d_x = {d_x}" for d_x in sorted(sizes))
        raise ValueError(
            f"the file does not state the orientation of its matrices, and {listed} both predict; give --d-x (d_x=) or "
            "--orientation (orientation=)."
        )
