"""From the evidence to a label: which numbers decide, and where the limits lie.

There are two answers: the function (which learner the last prediction is) and the mechanism (which
algorithm the layers carry out). The label is the mechanism where it is shown, else the function where
it is a learner without a path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.multi_layer.algorithm_leftover import Leftover
from mechinterp.analysis.multi_layer.algorithm_scores import LARGER, SMALLER, Scores
from mechinterp.analysis.multi_layer.algorithm_tests import USELESS, IdentityTest, satisfies
from mechinterp.icl.algorithm import Algorithm

ALIKE = {"gd_plus_plus", "newton", "ridge_like"}
"""Members whose tie as functions is called ridge_like."""
OWN = 0
"""The setting of the model's own length."""
CLEAR_FACTOR = 3.0
"""Standard errors from 0 of a best factor that counts: on few prompts some factor always lowers the risk."""
UNDETERMINED, UNSTRUCTURED = "undetermined", "unstructured"


@dataclass(frozen=True)
class AlgorithmLimits:
    """Limits between labels.

    analyses/algorithms/calibration.py moves each of them, and counts wrong labels of known learners.
    """

    explained: float = 0.98
    """Least R^2 of the member that gives the label: of the function at the model's own length, of the mechanism after
    every layer. In other settings only what reaches it speaks against others."""
    tie: float = 0.005
    """R^2 by which something must lead to be better; what breaks an identity by as much is not linear in y, ..."""
    rest: float = 0.9
    """Most of a learner in what a member leaves unexplained, on a scale from 0, noise of weights, to 1."""
    held: float = 0.5
    """Least R^2 of x as an algorithm changes it, read from the stream."""
    followed: float = 0.9
    """Least R^2 of the prediction with the algorithm's steps in place of all layers, of algorithms that change x."""
    frequency: float = 0.9
    """Least share of resamples that a label is found in."""

    def moved(self, by: float) -> "AlgorithmLimits":
        """With the limits of single numbers moved together by a share, towards more labels if it is positive."""
        return replace(
            self,
            explained=self.explained - by * (1 - self.explained),
            tie=self.tie * (1 + by),
            rest=min(self.rest + by * (1 - self.rest), 1.0),
            held=self.held * (1 - by),
            followed=self.followed - by * (1 - self.followed),
        )


@dataclass(frozen=True, eq=False)
class Scale:
    """What a factor on the predictions does to the risk."""

    factor: float
    """Best factor on the predictions."""
    factor_sem: float
    risk: float
    """Relative risk at the best factor."""
    ridge: float
    """Relative risk of ridge regression on the same prompts."""
    null_risk: Float[np.ndarray, " model"]
    """Relative risks of models of random weights, each at its best factor."""

    @property
    def helps(self) -> bool:
        """Whether the scaled predictions do the task, better than those of all random weights, by a factor that is not
        0 within its errors."""
        clear = abs(self.factor) > CLEAR_FACTOR * self.factor_sem
        return clear and is_useful(self.risk, self.null_risk)


@dataclass(frozen=True, eq=False)
class Measured:
    """All numbers of a model that the label rests on."""

    members: tuple[Algorithm, ...]
    relative_risk: float
    null_risk: Float[np.ndarray, " model"]
    scale: Scale
    tests: Mapping[str, IdentityTest]
    function: Scores
    """Of the last prediction: members first, then controls."""
    path: Scores | None
    """Of the prediction after each layer: members with a path first; None where it is not known."""
    path_how: str
    covariates_r2: Mapping[str, float] = field(default_factory=dict)
    """Of the members that change x and come near to the path; NaN where there is no stream."""
    member_tests: Mapping[str, Mapping[str, IdentityTest]] = field(default_factory=dict)
    """The same identities of members that come near and do not satisfy all of them, with their fitted scalars."""
    replaced_r2: Mapping[str, float] = field(default_factory=dict)
    """Of the same: with their steps in place of all layers; NaN where the stream cannot be set."""
    left_of_path: Mapping[str, Leftover] = field(default_factory=dict)
    """By member that comes near: what it leaves of the prediction after each layer."""
    left_of_function: Mapping[str, Leftover] = field(default_factory=dict)
    """The same of the last prediction of a function of prompts, for which no stream speaks."""


@dataclass(frozen=True)
class Decision:
    """A label, with the number that decided."""

    label: str
    function: str
    mechanism: str
    candidates: tuple[str, ...]
    why: str
    """Which rule decided; `algorithm_reasons` has its sentence."""
    where: str = ""
    """The setting, layer or identity that decided."""
    value: float = float("nan")
    limit: float = float("nan")
    member: str = ""
    """The member that it is about."""
    rival: str = ""
    """What explains more."""


def decide(
    measured: Measured, limits: AlgorithmLimits, counts: Float[np.ndarray, " prompt"] | None = None
) -> Decision:
    """The label that the numbers earn.

    Args:
        counts: How often each scored prompt is drawn; None: once.
    """
    if does_nothing(measured):
        why = "null" if measured.relative_risk < USELESS else "useless"
        limit = float(measured.null_risk.min()) if why == "null" else USELESS
        if measured.scale.helps:
            why, limit = "scale", USELESS
        label = UNDETERMINED if measured.scale.helps else UNSTRUCTURED
        nothing = (label, UNDETERMINED, UNDETERMINED, ())
        return Decision(*nothing, why, value=measured.relative_risk, limit=limit)
    broken = broken_by(measured, limits, counts)
    members = {member.label or "": member for member in measured.members}
    function, near, blocked = _function(measured, limits, counts, broken)
    if measured.path is None:
        return _by_function(measured, function, near, blocked, broken, why="no path", limits=limits)
    return _by_path(measured, limits, counts, broken, members, (function, near, blocked))


def does_nothing(measured: Measured) -> bool:
    """Whether the predictions, as they are, do the task no better than 0 or than the best of random weights."""
    return not is_useful(measured.relative_risk, measured.null_risk)


def is_useful(risk: float, null_risk: Float[np.ndarray, " model"]) -> bool:
    """Whether a relative risk is below that of predicting 0 and below those of all random weights."""
    return bool(risk < min(USELESS, null_risk.min(initial=np.inf)))


def broken_by(
    measured: Measured, limits: AlgorithmLimits, counts: np.ndarray | None = None
) -> dict[str, tuple[str, float]]:
    """Of each member that an identity rules out: the identity, and the share of the model that speaks against it.

    Whatever satisfies an identity misses about half of the mean square between its two sides: of a
    function plus something that changes, both sides hold an independent part. So does what breaks
    an identity more than the model does, or less.
    """
    broken: dict[str, tuple[str, float]] = {}
    for member in measured.members:
        label = member.label or ""
        for name, test in measured.tests.items():
            share = broken_share(test, counts)
            if not satisfies(member, name):
                own = measured.member_tests.get(label, {}).get(name)
                share = 0.0 if own is None else abs(broken_share(own, counts) - share)
            if share > max(limits.tie, broken.get(label, ("", 0.0))[1]):
                broken[label] = (name, share)
    return broken


def identity_r2(test: IdentityTest, counts: np.ndarray | None = None) -> float:
    """R^2 between the two sides; NaN if it is not answered."""
    counts = np.ones(len(test.size)) if counts is None else counts
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(1 - (test.error @ counts) / (test.size @ counts))


def broken_share(test: IdentityTest, counts: np.ndarray | None = None) -> float:
    """The part of the model that breaks an identity, at least; NaN if it is not answered."""
    return (1 - identity_r2(test, counts)) / 2


def _function(
    measured: Measured,
    limits: AlgorithmLimits,
    counts: np.ndarray | None,
    broken: Mapping[str, object],
) -> tuple[str, list[str], list[Decision]]:
    """Which learner the last prediction is, the members near to it, and those that something else explains better."""
    scores, n = measured.function, len(measured.members)
    r2 = scores.r2(counts)
    near = [m for m in range(n) if r2[m, OWN] >= limits.explained]
    near = [m for m in near if scores.names[m] not in broken]
    kept, blocked = _undominated(near, scores, r2, limits, own=1, members=n)
    kept, blocked = _without_learners(
        kept, blocked, scores, measured.left_of_function, limits, counts
    )
    names = [scores.names[m] for m in kept]
    tied = {*names, *(b.member for b in blocked if b.rival in ALIKE)}
    if "ridge_like" in names and tied <= ALIKE:
        return "ridge_like", [scores.names[m] for m in near], blocked
    smaller = _smaller(names)
    answer = smaller[0] if len(smaller) == 1 else UNDETERMINED
    return answer, smaller or [scores.names[m] for m in near], blocked


def _by_path(
    measured: Measured,
    limits: AlgorithmLimits,
    counts: np.ndarray | None,
    broken: Mapping[str, tuple[str, float]],
    members: Mapping[str, Algorithm],
    function: tuple[str, list[str], list[Decision]],
) -> Decision:
    scores = measured.path
    assert scores is not None
    r2 = scores.r2(counts)
    n_layers = sum(column.startswith("layer") for column in scores.columns)
    rows = [m for m, name in enumerate(scores.names) if name in members]
    least = r2[:, :n_layers].min(1)
    walked = [m for m in rows if least[m] >= limits.explained and scores.names[m] not in broken]
    kept, blocked = _undominated(walked, scores, r2, limits, own=n_layers, members=len(rows))
    kept, blocked = _without_learners(kept, blocked, scores, measured.left_of_path, limits, counts)
    names = _smaller([scores.names[m] for m in kept])
    shown = [name for name in names if _holds_covariates(measured, limits, members[name])]
    answer, near, blocked_function = function
    undecided = (UNDETERMINED, answer, UNDETERMINED)
    if len(names) == 1 and shown:
        return Decision(names[0], answer, names[0], (names[0],), why="mechanism", member=names[0])
    if names and not shown:
        name = names[0]
        value = measured.covariates_r2.get(name, np.nan)
        why, limit = "covariates", limits.held
        if value >= limits.held:
            why, value, limit = "steps", measured.replaced_r2.get(name, np.nan), limits.followed
        if np.isnan(value):
            why = "predictions only"
        return Decision(*undecided, tuple(names), why, value=value, limit=limit, member=name)
    if len(names) > 1:
        return Decision(*undecided, tuple(names), "tie", member=names[0])
    if blocked:
        return replace(
            blocked[0], function=answer, candidates=tuple(scores.names[m] for m in walked)
        )
    decision = _by_function(
        measured, answer, near, blocked_function, broken, why="path", limits=limits
    )
    if decision.why == "path":
        name = decision.member
        row = scores.names.index(name) if name in scores.names else int(least[rows].argmax())
        layer = int(r2[row, :n_layers].argmin())
        value, where = float(r2[row, layer]), f"layer {layer}"
        return replace(decision, where=where, value=value, limit=limits.explained)
    return decision


def _by_function(
    measured: Measured,
    answer: str,
    near: Sequence[str],
    blocked: Sequence[Decision],
    broken: Mapping[str, tuple[str, float]],
    *,
    why: str,
    limits: AlgorithmLimits,
) -> Decision:
    """The label where no mechanism is shown: that of a learner without a path, or none."""
    pathless = {m.label for m in measured.members if not m.has_path}
    undecided = (UNDETERMINED, answer, UNDETERMINED)
    if answer in pathless:
        return Decision(answer, answer, UNDETERMINED, (answer,), "function", member=answer)
    if answer != UNDETERMINED:
        return Decision(*undecided, (answer,), why, member=answer)
    if blocked and not (set(near) - {b.member for b in blocked}):
        return replace(blocked[0], function=answer, candidates=tuple(near))
    if len(near) > 1:
        return Decision(*undecided, tuple(near), "tie", member=near[0])
    r2 = measured.function.r2()[: len(measured.members), OWN]
    best = int(np.nan_to_num(r2, nan=-np.inf).argmax())
    name = measured.function.names[best]
    if name in broken and r2[best] >= limits.explained:
        test, share = broken[name]
        return Decision(*undecided, (), "identity", test, share, limits.tie, name)
    where, value = measured.function.columns[OWN], float(r2[best])
    return Decision(*undecided, (), "far", where, value, limits.explained, name)


def _blocked(
    member: str, why: str, where: str, value: float, limit: float, rival: str = ""
) -> Decision:
    """Of a member that a rival is better than, or that leaves another learner."""
    nothing = (UNDETERMINED, UNDETERMINED, UNDETERMINED, ())
    return Decision(*nothing, why, where, value, limit, member, rival)


def _holds_covariates(measured: Measured, limits: AlgorithmLimits, member: Algorithm) -> bool:
    """Whether the stream holds x as the member changes it, and the prediction follows its steps."""
    if member.covariates is None:
        return True
    label = member.label or ""
    replaced = measured.replaced_r2.get(label, np.nan)
    held = measured.covariates_r2.get(label, np.nan) >= limits.held
    return bool(held and (np.isnan(replaced) or replaced >= limits.followed))


def _smaller(names: Sequence[str]) -> list[str]:
    """Without those that contain another that ties with them."""
    return [name for name in names if not (SMALLER in names and name in LARGER)]


def _without_learners(
    kept: Sequence[int],
    blocked: list[Decision],
    scores: Scores,
    left: Mapping[str, Leftover],
    limits: AlgorithmLimits,
    counts: np.ndarray | None,
) -> tuple[list[int], list[Decision]]:
    """Without those of which a learner and no noise is left."""
    stay, more = [], []
    for m in kept:
        name = scores.names[m]
        share, column = left[name].share(counts) if name in left else (0.0, 0)
        if share <= limits.rest:
            stay.append(m)
        else:
            where = scores.columns[column]
            more.append(_blocked(name, "learner", where, share, limits.rest))
    return stay, [*more, *blocked]


def _undominated(
    chosen: Sequence[int],
    scores: Scores,
    r2: Float[np.ndarray, "row column"],
    limits: AlgorithmLimits,
    *,
    own: int,
    members: int = 0,
) -> tuple[list[int], list[Decision]]:
    """Without those that another row is better than in some column, and worse in none; and by what.

    Args:
        own: Columns at the model's own length.
        members: Rows that may speak at other lengths with more fitted numbers.
    """
    kept, blocked = [], []
    for m in sorted(chosen, key=lambda m: -r2[m, :own].min()):
        nearer, further = _nearer(m, scores, r2, limits, own, members)
        rivals = np.flatnonzero(nearer.any(1) & ~further.any(1))
        if not len(rivals):
            kept.append(m)
            continue
        leads = np.where(nearer[rivals], r2[rivals] - r2[m], -np.inf)
        near = leads.max(1) >= leads.max() - limits.tie
        counts = np.array(scores.n_scalars)[rivals]
        best = int(np.lexsort((-leads.max(1), np.where(near, counts, np.inf)))[0])
        row, column = rivals[best], int(leads[best].argmax())
        value, limit = float(r2[row, column]), float(r2[m, column])
        where, rival = scores.columns[column], scores.names[row]
        blocked.append(_blocked(scores.names[m], "rival", where, value, limit, rival))
    return kept, blocked


def _nearer(
    m: int, scores: Scores, r2: np.ndarray, limits: AlgorithmLimits, own: int, members: int
) -> tuple[np.ndarray, np.ndarray]:
    """In which columns each row is nearer to the model than row m, and m than each row [row, column]."""
    n, rows = np.array(scores.n_scalars), np.arange(len(r2))
    with np.errstate(invalid="ignore"):
        lead = r2 - r2[m]
        nearer, further = lead > limits.tie, -lead > limits.tie
        nearer[:, own:] &= r2[:, own:] >= limits.explained
        further[:, own:] &= r2[m, own:] >= limits.explained
    # What fits the noise of weights at one length has nothing to say at others, nor have others of it.
    nearer[(n > n[m]) & (rows >= members), own:] = False
    further[(n > n[m]) & (rows >= members), own:] = False
    return nearer, further
