"""Proof of a reading: which of the readings that the options allow give the predictions that the owner recorded."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from math import prod
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.foreign.assemble import Tried
from mechinterp.checkpoints.foreign.candidates import BASES, FINER_BASES, Case
from mechinterp.checkpoints.foreign.options import COLUMNS, SIGNS, stated_option
from mechinterp.checkpoints.foreign.recorded import Recording
from mechinterp.checkpoints.io.files import NotUnderstoodError
from mechinterp.config.model import ACTIVATIONS, LAYOUTS, MLP_NORM, NORMS
from mechinterp.display import counted
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.run import general
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights

_SCORES = ("softmax", "linear/L", "linear")
"""Scores that are tried; others must be stated."""
N_FEW = 16
"""Number of prompts for the first comparison of readings."""
MOST_TRIED = 512
"""Up to this number all combinations of choices are tried; otherwise the search goes on from the nearest readings, one or
two choices at a time. A larger number only costs time."""
STARTS, _ROUNDS = 12, 4
"""Readings from which the search goes on, and most steps from each."""
N_PAIRED = 3
"""Number of nearest readings of which two choices at a time are changed."""
SAME = 1e-4
"""Largest relative difference of predictions of two readings that are one model; larger values merge more."""
_ROUNDED = 1e-5
"""Differences below this, in standard deviations, count as rounding: the more usual reading comes first."""
FACTORS = np.geomspace(0.01, 100, 81)
"""Factors that are tried before the best one is refined."""
N_FACTORED = 6
"""Number of readings, the nearest up to a factor on the output, for which a factor is sought."""
MOST_LAYERS = 3
"""Number of layers up to which a model may run through them several times; larger values try more readings."""
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
        """One clause on the proof."""
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
        raise NotUnderstoodError(f"{file}: {_nearest(search)}")
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


Groups = list[list[Tried]]
"""Choices that belong together, with their possible values, the most usual first."""


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

    def possible(self, case: Case) -> Groups:
        """Values of a reading's choices that are open."""
        return possible(case, self.recordings[0], self.closed)

    def neighbours(self, case: Case, most: int = 1) -> list[Case]:
        """Readings that differ in up to `most` groups of choices."""
        groups = self.possible(case)
        changes: list[Tried] = []
        for count in range(1, most + 1):
            for chosen in combinations(groups, count):
                changes += _merged(product(*chosen))
        return case.changed(changes)

    def go(self) -> None:
        """Try all combinations, or go on from the nearest of the usual ones.

        Raises:
            ValueError: If no reading has finite predictions.
        """
        self.add(self.starts)
        if sum(prod(map(len, each)) for each in self.groups.values()) > MOST_TRIED:
            self._climb()
        else:
            for key, case in self.firsts.items():
                self.add(case.changed(_usual_first(self.groups[key])), self.most)
        if not any(np.isfinite(each) for each in self.misfits.values()):
            raise self.fault or ValueError(
                "no reading has finite predictions for the recorded prompts."
            )

    def _climb(self) -> None:
        """Go on from the nearest readings, one and then two choices at a time."""
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
            key = (id(case.parts), *sorted(case.tried.items(), key=lambda item: item[0]))
            if key in self.known:
                continue
            if most is not None and len(self.known) >= most:
                return
            self.known.add(key)
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


def predictions_of(weights: Weights, recording: Recording) -> Float[Tensor, "batch row d_y"]:
    """Predictions of a model for recorded prompts, in double precision.

    Raises:
        ValueError: If the model has no predictions at every x, or the prompts do not fit it.
    """
    if recording.at_every_x:
        if weights.model.layout != "in_turn":
            raise ValueError(
                "predictions at every x need tokens x and y in turn; joined tokens (x, y) see their own y: record those at the query alone."
            )
        return general.predict_at_every(weights, recording.prompts.to(weights.dtype)).double()
    return _at_query(weights, recording.prompts)[:, None]


def _at_query(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Predictions in double precision; one layer of attention also runs in it."""
    if weights.model.one_attention:
        weights = weights.to(torch.float64)
    return predictor_of(weights).predict(prompts.to(weights.dtype)).double()


def _as_shown(cases: Sequence[Case], shown: Sequence[Tried]) -> list[Case]:
    """The readings with the settings that a module shows, each once."""
    own: dict[object, Case] = {}
    for case in cases:
        extra = ("norm_eps",) if case.tried.get("norm") else ()
        known = {*case.tried, "rotary_base", "rotary_adjacent_pairs", *extra}
        for changed in case.changed(
            {n: v for n, v in each.items() if n in known} for each in shown
        ):
            key = (id(changed.parts), *sorted(changed.tried.items(), key=lambda item: item[0]))
            own.setdefault(key, changed)
    return list(own.values())


def possible(case: Case, recording: Recording, closed: Collection[str] = ()) -> Groups:
    """Values of a reading's choices that neither the file nor the user states.

    Args:
        closed: Names of further choices that are not varied.
    """
    tried, parts = case.tried, case.parts
    fixed = {**case.source.given, **{name: tried[name] for name in closed if name in tried}}
    plain: dict[str, Sequence] = {
        "columns": COLUMNS if tried.get("layout") != "in_turn" else (tried["columns"],),
        "sign": SIGNS,
        "attend_to_self": (True, False),
        "output_column": case.source.choices.get("output_column", ()),
        # In one layer that runs once only the query's keys count; `_passes` has the other cases.
        "context_keys": (False, True) if len(parts.layers) > 1 or "passes" in closed else (),
        "layout": LAYOUTS if parts.has("W_in") else (),
        "activation": ACTIVATIONS
        if len(case.source.choices.get("activation", ())) > 1
        or "activation" in case.source.form.assumed
        else (),
        "residual": case.source.choices.get("residual", ()),
    }
    groups: Groups = []
    for name, values in plain.items():
        if name in tried and name not in fixed:
            every = dict.fromkeys((tried[name], *values))
            groups.append([{name: value} for value in every])
    every_group = [*groups, _passes(case), _scores(case, recording), _norms(case), _positions(case)]
    kept = [[each for each in values if _fits(each, fixed, case)] for values in every_group]
    return [values for values in kept if len(values) > 1]


def _fits(change: Tried, fixed: Mapping[str, object], case: Case) -> bool:
    """False if a change contradicts what is stated or shown."""
    return all(
        fixed.get(name, value) == value for name, value in change.items() if name in case.tried
    )


def _passes(case: Case) -> list[Tried]:
    """Numbers of runs through the layers; for one layer also which keys a second run reads."""
    tried, n_layers = case.tried, len(case.parts.layers)
    if "passes" not in tried or "passes" in case.source.given or n_layers > MOST_LAYERS:
        return []
    names = ("passes", "context_keys") if n_layers == 1 else ("passes",)
    own: Tried = {name: tried[name] for name in names}
    rows = [(1, False), *product((2, 3, 4), (False, True))]
    changes = [own, *(dict(zip(names, row, strict=False)) for row in rows)]
    return [each for i, each in enumerate(changes) if each not in changes[:i]]


def _scores(case: Case, recording: Recording) -> list[Tried]:
    """Scores with their factors; linear ones also with a fixed factor 1/L in place of the number of keys."""
    parts, tried = case.parts, case.tried
    scales = dict.fromkeys((tried["scale"], None, 1.0, 1 / parts.d_head, parts.width**-0.5))
    changes: list[Tried] = []
    for score in dict.fromkeys((tried["score"], *_SCORES)):
        changes += [{"score": score, "scale": scale} for scale in scales]
    if tried["score"] == "linear/L":
        factor, keys = case.scale, recording.length + (tried["attend_to_self"] is True)
        changes.append({"score": "linear", "scale": factor / keys})
    return changes


def _norms(case: Case) -> list[Tried]:
    """Places and kinds of norms."""
    parts, tried = case.parts, case.tried
    if "norm" not in tried:
        return []
    of_mlps = parts.has("ln2.w") and not parts.has("ln1.w")
    places: tuple[str | None, ...] = (MLP_NORM,) if of_mlps else NORMS
    if of_mlps or parts.has("ln1.w"):
        kinds = (False, True) if parts.bare_norms else (False,)
        rest: list[Tried] = []
    else:
        kinds = (False, True)
        rest = [{"norm": None, "rms_norm": False}]
    own: Tried = {"norm": tried["norm"], "rms_norm": tried["rms_norm"]}
    changes: list[Tried] = [
        own,
        *rest,
        *({"norm": p, "rms_norm": k} for p, k in product(places, kinds)),
    ]
    return [each for i, each in enumerate(changes) if each not in changes[:i]]


def _positions(case: Case) -> list[Tried]:
    """Kinds of positions that leave no trace in a file."""
    parts, tried = case.parts, case.tried
    names = ("positions", "rotary_base", "rotary_adjacent_pairs")
    own: Tried = {name: tried[name] for name in names if name in tried}
    changes: list[Tried] = [own, {"positions": "none"}] if own["positions"] != "none" else [own]
    if parts.has("pos_embed.W_pos"):
        return changes
    if parts.has("W_in"):
        changes += [{"positions": "sinusoidal"}, {"positions": "sinusoidal_halves"}]
    if case.source.form.turns and not parts.merged and parts.d_head % 2 == 0:
        finer = FINER_BASES if own["positions"] == "rotary" else BASES
        bases = [own["rotary_base"]] if "rotary_base" in case.source.given else finer
        changes += [
            {"positions": "rotary", "rotary_base": base, "rotary_adjacent_pairs": adjacent}
            for base in bases
            for adjacent in (False, True)
        ]
    return changes


def _usual_first(groups: Groups) -> list[Tried]:
    """All combinations of choices, those with the fewest unusual values first."""
    rows = product(*(list(enumerate(values)) for values in groups))
    ordered = sorted(rows, key=lambda row: sum(number > 0 for number, _ in row))
    return list(_merged(tuple(value for _, value in row) for row in ordered))


def _merged(rows: Iterator[tuple[Tried, ...]]) -> Iterator[Tried]:
    for row in rows:
        yield {name: value for each in row for name, value in each.items()}


def _is_one_model(case: Case, other: Case, recording: Recording) -> bool:
    """True if two readings predict the same at other lengths, too."""
    own, longest = recording.length, case.model.longest_context
    for length in {max(1, own // 2), 2 * own if longest is None else min(2 * own, longest)} - {own}:
        task = replace(case.task, context_length=length)
        prompts = draw_prompts(task, ELSEWHERE, seed=0, dtype=torch.float64)
        try:
            one = _at_query(case.weights(), prompts)
            two = _at_query(other.weights(), prompts)
        except ValueError:
            continue
        if not (one - two).abs().max() <= SAME * one.abs().max():
            return False
    return True


def _nearest(search: _Search) -> str:
    """Message that no reading gives the recorded predictions: the nearest one, and a factor that explains the difference."""
    nearest = search.ordered[0]
    names = [
        n for n, v in nearest.tried.items() if n not in nearest.source.closed and v is not None
    ]
    stated = " ".join(stated_option(n, nearest.value_of(n)) for n in names if n != "score_slope")
    recording = search.recordings[0]
    what = (
        f"no reading gives the recorded predictions ({len(search.misfits)} tried); the nearest ({stated or 'as its format states'}) has "
        f"R² = {_r2(predictions_of(nearest.weights(), recording), recording):.4f}"
    )
    shapes = search.shapes
    for case in sorted(shapes, key=shapes.__getitem__)[:N_FACTORED]:
        if found := _one_factor(case, recording):
            name, factor = found
            options = {
                "output": f"--output-scale {factor * (case.source.hints.output_scale or 1):.6g}",
                "scores": f"--scale {factor * case.scale:.6g}",
                "x": "multiply x by it before the prompts are recorded",
            }
            other = "" if case is nearest else f", where {_differing(case, nearest)},"
            return f"{what}; a factor {factor:.4g} on the {name}{other} explains the difference, also on other prompts: {options[name]}."
    return f"{what}; no single factor on the output, the scores or x explains the difference; hook the module in memory (mechinterp.hook_module)."


def _differing(case: Case, nearest: Case) -> str:
    changed = [n for n, v in case.tried.items() if nearest.tried.get(n) != v]
    return " ".join(stated_option(n, case.value_of(n)) for n in changed)


def _r2(predicted: Tensor, recording: Recording) -> float:
    rest = (predicted - recording.prediction).square().sum()
    around = recording.prediction - recording.prediction.mean(0)
    return float(1 - rest / around.square().sum())


def _one_factor(case: Case, recording: Recording) -> tuple[str, float] | None:
    """The factor on the output, the scores or x that makes a reading agree: found on one half of the prompts, and
    confirmed on the other."""
    half = len(recording.prediction) // 2
    fit, other = recording.rows(slice(half)), recording.rows(slice(half, None))
    weights = case.weights()
    ways: dict[str, Callable[..., Tensor]] = {
        "output": lambda factor, each: factor * predictions_of(weights, each),
        "scores": lambda factor, each: predictions_of(_scaled(case, factor), each),
        "x": lambda factor, each: predictions_of(weights, _with_x(each, factor)),
    }
    for name, predict in ways.items():
        factor = _fitted(partial(predict, each=fit), fit.prediction)
        if other.difference(predict(factor, other)) <= other.tolerance:
            return name, factor
    return None


def _fitted(predict: Callable[[float], Tensor], wanted: Tensor) -> float:
    """Factor with the least mean squared difference."""
    from scipy.optimize import minimize_scalar  # slow to import

    def loss(log: float) -> float:
        rest = predict(float(np.exp(log))) - wanted
        return float(rest.square().mean().nan_to_num(1e30, 1e30))

    logs = np.log(FACTORS)
    first = int(np.argmin([loss(log) for log in logs]))
    low, high = logs[max(first - 1, 0)], logs[min(first + 1, len(logs) - 1)]
    best = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return float(np.exp(best.x))


def _scaled(case: Case, factor: float) -> Weights:
    return replace(case, tried={**case.tried, "scale": factor * case.scale}).weights()


def _with_x(recording: Recording, factor: float) -> Recording:
    prompts = recording.prompts
    scaled = replace(prompts, x=factor * prompts.x, x_query=factor * prompts.x_query)
    return replace(recording, prompts=scaled)
