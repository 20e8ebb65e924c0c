"""Rules that keep algorithms from being the label of a model, and the limit of each.

An algorithm is out if (1) it explains too little, (2) it has a symmetry that the model lacks, (3) its read-out has
another size, (4) it fails with other noise or drift, (5) another learner explains more, (6) the rest is another learner and not
noise, (7) the model makes no progress along some direction of the task vector, or (8) the measured forgetting contradicts it. `decide` applies them: if one algorithm is left for the layers, it is
the label. Otherwise the label is the learner without steps (ridge, posterior mean) that alone is left for the last prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.multi_layer.directions import LeastProgress
from mechinterp.analysis.multi_layer.fits import FitScores
from mechinterp.analysis.multi_layer.identities import Identity, satisfies
from mechinterp.analysis.multi_layer.naming_prompts import (
    LAST_PREDICTION,
    NOISES,
    OTHER_DRIFT,
    USELESS,
)
from mechinterp.analysis.multi_layer.scaled import scaled_name
from mechinterp.analysis.one_layer.descent import DESCENDS
from mechinterp.analysis.response.gate import Gate
from mechinterp.analysis.response.reading import CLEAR_ERRORS, FORGETS
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.algorithms import ALGORITHMS

UNDETERMINED = "undetermined"
UNSTRUCTURED = "unstructured"
CONTAINED = {each.label: each.contains for each in ALGORITHMS if each.contains}
"""Smaller algorithm that each larger one contains: if both explain a model, the smaller is its name."""
ALIKE = {"gd_plus_plus", "newton", "ridge_like"}
"""If only these algorithms tie with ridge for the last prediction, it is called ridge_like."""
SEE_LEARNERS = "mechinterp compare-learners shows which learner is nearest at each context length"
SEE_TABLE = "to_frame() has what each learner explains"
SEE_WEIGHTS = "mechinterp response shows the weight of each pair by its age"
FAR = "R² {r2} ({where}), limit {limit:g}"
REASONS = {
    "far": (FAR, SEE_LEARNERS),
    "noise": (FAR, "mechinterp compare-learners with prompts of that noise (--task)"),
    "elsewhere": (FAR, "mechinterp compare-learners with such prompts (--task)"),
    "layers": (FAR, "mechinterp probe shows where the prediction is held after each layer"),
    "identity": ("the model breaks '{where}': mismatch {value:.4f}, limit {limit:g}", SEE_LEARNERS),
    "rival": ("{rival} is nearer: R² {rival_r2} against {r2} ({where})", SEE_TABLE),
    "rest": (
        "its rest is another learner and no noise: reflections of x keep {value:.0%} of it ({where}), limit {limit:.0%}",
        SEE_TABLE,
    ),
    "rest, no symmetry": (
        "its rest is more than rounding, and the task has no symmetry that tells noise from a learner",
        "",
    ),
    "factor": (
        "its read-out is {value:.3f} times that of the algorithm, limit 1 ± {limit:g} ({where})",
        SEE_LEARNERS,
    ),
    "ascends": (
        "along some direction of the task vector the model makes {value:.2f} of its progress ({where}), limit {limit:g}",
        "mechinterp response shows how the model weighs directions",
    ),
    "contains": ("{rival}, which it contains, explains as much", ""),
    "forgets": (
        "by the alpha of {rival} and its error, weights fall by up to {value:.0%} from the newest pair to the oldest, limit {limit:.0%}",
        SEE_WEIGHTS,
    ),
    "remembers": (
        "its alpha with three standard errors is {value:.4f}, limit {limit:g}: forgetting is not shown",
        SEE_WEIGHTS,
    ),
    "tie": (
        "ties with {rival}",
        "compare the settings in to_frame(), or ask at another length (--context-length)",
    ),
    "no path": (
        "the prediction after each layer is not known: {where}",
        "give a function of prompts that predicts after every layer, or probe the layers (mechinterp probe)",
    ),
    "no steps": ("says nothing about the layers", ""),
    "readings": ("another reading of the file has another label", ""),
    "frequency": (
        "{value:.0%} of resampled prompts give this label, limit {limit:.0%}",
        "ask on more prompts (n_prompts, --n-prompts)",
    ),
}
"""Text of each rule that keeps a learner from being the label, and what to run next if the label is undetermined."""


@dataclass(frozen=True)
class Limits:
    """Limits of the rules; analyses/algorithms/calibration.py moves each and counts wrong labels of known learners."""

    explained: float = 0.98
    """Least R² at the model's own length: of the last prediction, or after every layer."""
    tie: float = 0.005
    """Least lead in R² that makes a learner better, and largest mismatch of an identity."""
    rest: float = 0.9
    """Largest fraction of another learner in the rest of a model."""
    rest_of_function: float = 0.5
    """Limit `rest` of a function of prompts, which has no noise of weights."""
    frequency: float = 0.9
    """Least fraction of resamples with the label."""
    noise: float = 0.95
    """Least R² of a model with a hundredth of the noise; a function needs `explained` there. Models that were trained at
    one noise level leave their algorithm a little."""
    progress: float = DESCENDS
    """Least progress along any direction of the task vector, relative to the algorithm's: the limit of one layer's steps."""
    read_out: float = 0.05
    """Largest distance from 1 of the factor of an algorithm's read-out."""
    of_rest: float = 0.25
    """A factor counts if it explains at least this fraction of what the algorithm leaves unexplained; a smaller gain
    leaves the factor open, since other step sizes take its place."""

    def rest_of(self, is_function: bool) -> float:
        """Limit `rest` of a model or of a function."""
        return self.rest_of_function if is_function else self.rest


@dataclass(frozen=True)
class WhyNot:
    """Reason why a learner is not the label."""

    rule: str
    where: str = ""
    """Layer, setting or identity that decided."""
    value: float = float("nan")
    limit: float = float("nan")
    """Limit of the value, or R² of the rival."""
    rival: str = ""

    def __str__(self) -> str:
        r2, rival_r2 = (f"{v:.4f}" if v > -1 else "below -1" for v in (self.value, self.limit))
        return REASONS[self.rule][0].format(**vars(self), r2=r2, rival_r2=rival_r2)


@dataclass(frozen=True, eq=False)
class Scale:
    """Effect of a factor on the predictions of a model that does not do its task."""

    factor: float
    """Best factor."""
    risk: float
    """Relative risk at the best factor."""
    ridge: float
    """Relative risk of ridge regression on the same prompts."""
    two_values: tuple[float, ...] = ()
    """The two values that all responses have; empty if there are more. The output is then a logit, perhaps."""

    @property
    def helps(self) -> bool:
        """True if the factor takes the risk at least half of the way from predicting 0 to ridge regression."""
        return self.risk < (1 + self.ridge) / 2


@dataclass(frozen=True, eq=False)
class Measured:
    """All numbers behind a label."""

    relative_risk: float
    """Excess risk of the model over that of predicting 0."""
    scale: Scale
    last: FitScores
    """Scores on the last prediction: algorithms, then scaled read-outs; empty if the model does not do its task."""
    tests: Mapping[str, Identity] = field(default_factory=dict)
    own_tests: Mapping[str, Mapping[str, Identity]] = field(default_factory=dict)
    """Identities of near algorithms that break some, by label."""
    path: FitScores | None = None
    """Scores on the prediction after each layer; None if that is unknown."""
    path_how: str = "not asked"
    relative_risk_sem: float = float("nan")
    """Standard error of `relative_risk` over prompts."""
    is_function: bool = False
    sems: Mapping[str, Float[np.ndarray, " _"]] = field(default_factory=dict)
    """Standard errors over prompts of the scalars of near learners without steps, by label."""
    gate: Gate | None = None
    """Reading of the response, which decides which algorithms are fitted; None if another order of the pairs changes nothing, or too few
    prompts were given."""

    @property
    def useful(self) -> bool:
        """True if the model does its task."""
        return self.relative_risk < USELESS

    @property
    def without_targets(self) -> bool:
        """True if the targets are 0 on all prompts, so that no risk is defined relative to predicting 0."""
        return not np.isfinite(self.scale.ridge)


@dataclass(frozen=True)
class Named:
    """A label, with the reason against each algorithm."""

    label: str
    function: str
    """Learner of the last prediction."""
    mechanism: str
    """Algorithm of the layers."""
    why_not: Mapping[str, WhyNot | None]
    """Reason against each algorithm, by label; None for the label itself."""


def decide(
    measured: Measured, limits: Limits, counts: Float[np.ndarray, " prompt"] | None = None
) -> Named:
    """The label that the numbers earn, with each scored prompt taken `counts` times."""
    if not measured.useful:
        scale = measured.scale
        unclear = scale.helps or scale.two_values or measured.without_targets
        label = UNDETERMINED if unclear else UNSTRUCTURED
        return Named(label, UNDETERMINED, UNDETERMINED, {})
    last = _judged(measured, limits, counts, by_layer=False)
    path = _judged(measured, limits, counts, by_layer=True)
    function, mechanism = _only(last), _only(path)
    pathless = {each.label for each in measured.last.learners if each.label and not each.has_path}
    label = function if mechanism == UNDETERMINED and function in pathless else mechanism
    why_not = {**last, **path}
    for name in (name for name, reason in why_not.items() if reason is None and name != label):
        no_path = WhyNot("no path", measured.path_how)
        why_not[name] = WhyNot("no steps") if name in pathless else no_path
    return Named(label, function, mechanism, why_not)


def _only(judged: Mapping[str, WhyNot | None]) -> str:
    """The only algorithm that no rule excludes; "undetermined" if there is none or several."""
    left = [name for name, reason in judged.items() if reason is None]
    return left[0] if len(left) == 1 else UNDETERMINED


def _judged(
    measured: Measured, limits: Limits, counts: np.ndarray | None, *, by_layer: bool
) -> dict[str, WhyNot | None]:
    """Reason against each algorithm, for the last prediction or for all layers; None if there is none."""
    scores = measured.path if by_layer else measured.last
    if scores is None:
        return {}
    judged: dict[str, WhyNot | None] = {}
    r2 = scores.r2(counts)
    for m, learner in enumerate(scores.learners):
        if learner.label is None:
            continue
        own = np.nan_to_num(r2[m, : scores.n_own], nan=-np.inf)
        at = int(own.argmin())
        if own[at] < limits.explained:
            rule = "layers" if by_layer else "far"
            judged[learner.label] = WhyNot(rule, scores.columns[at], own[at], limits.explained)
            continue
        judged[learner.label] = (
            _broken(learner, measured, limits, counts)
            or _factor(m, scores, r2, limits)
            or _noise(
                r2[m], scores.columns, limits.explained if measured.is_function else limits.noise
            )
            or _elsewhere(m, scores, r2, measured, limits)
            or _rival(m, scores, r2, limits)
            or _left(learner, scores, measured, limits, counts)
            or _ascends(scores.progress.get(learner.label), limits)
            or _against_forgetting(learner, measured)
        )
    return _settled(judged, by_layer)


def _broken(
    learner: Algorithm, measured: Measured, limits: Limits, counts: np.ndarray | None
) -> WhyNot | None:
    """An identity that the algorithm satisfies and the model breaks, or that it breaks by another amount."""
    worst, own = WhyNot("", value=limits.tie), measured.own_tests.get(str(learner.label), {})
    for name, test in measured.tests.items():
        mismatch = test.mismatch(counts)
        if not satisfies(learner, name):
            mismatch = abs(own[name].mismatch(counts) - mismatch) if name in own else 0.0
        if mismatch > worst.value:
            worst = WhyNot("identity", name, mismatch, limits.tie)
    return worst if worst.rule else None


def _factor(m: int, scores: FitScores, r2: np.ndarray, limits: Limits) -> WhyNot | None:
    """A scaled read-out that explains part of the rest: the model is the algorithm times another number than 1."""
    name = scaled_name(scores.learners[m])
    if name not in scores.names:
        return None
    row = scores.names.index(name)
    factor = float(scores.scalars[row][-1])
    plain, with_factor = (r2[n, : scores.n_own].min() for n in (m, row))
    explains = with_factor - plain >= limits.of_rest * (1 - plain)
    # Factors are compared after rounding, so that 1.05 is within 1 ± 0.05.
    off = round(abs(factor - 1), 3) > limits.read_out
    where = LAST_PREDICTION if scores.n_own == 1 else "after every layer"
    return WhyNot("factor", where, factor, limits.read_out) if off and explains else None


def _noise(r2: np.ndarray, columns: Sequence[str], limit: float) -> WhyNot | None:
    """The setting of other noise in which the learner explains least, if that is too little: there it is another one."""
    found = {name: r2[n] for n, name in enumerate(columns) if name in NOISES}
    where = min(found, key=found.__getitem__, default="")
    if not found or found[where] >= limit:
        return None
    return WhyNot("noise", where, float(found[where]), limit)


def _elsewhere(
    m: int, scores: FitScores, r2: np.ndarray, measured: Measured, limits: Limits
) -> WhyNot | None:
    """The setting in which an algorithm explains too little: other drift, for learners along the pairs; for an
    algorithm along the pairs and a function, any setting."""
    others = range(scores.n_own, len(scores.columns))
    every = measured.is_function and scores.learners[m].along_pairs
    asked = [n for n in others if every or scores.columns[n] == OTHER_DRIFT]
    limit = limits.explained if measured.is_function else limits.noise
    where = min(asked, key=lambda n: r2[m, n], default=None)
    if where is None or r2[m, where] >= limit:
        return None
    return WhyNot("elsewhere", scores.columns[where], float(r2[m, where]), limit)


def _rival(m: int, scores: FitScores, r2: np.ndarray, limits: Limits) -> WhyNot | None:
    """The best of the learners that explain more than row m in some column, and less in none.

    Other settings count if the better one is near there. Scaled read-outs with more scalars do not count there: a factor
    that fits noise of weights at one length says nothing at others.
    """
    n_scalars = np.array([len(each) for each in scores.scalars])
    member = np.array([each.label is not None for each in scores.learners])
    speaks = (member | (n_scalars <= n_scalars[m]))[:, None]
    with np.errstate(invalid="ignore"):
        lead = r2 - r2[m]
        better, worse = lead > limits.tie, -lead > limits.tie
    elsewhere = np.arange(r2.shape[1]) >= scores.n_own
    other_noise = np.array([name in NOISES for name in scores.columns])
    better, worse = better & ~other_noise, worse & ~other_noise
    better &= ~elsewhere | (speaks & (r2 >= limits.explained))
    worse &= ~elsewhere | (speaks & (r2[m] >= limits.explained))
    leads = np.where(better & ~worse.any(1, keepdims=True), lead, -np.inf)
    row, column = np.unravel_index(int(leads.argmax()), leads.shape)
    if not np.isfinite(leads[row, column]):
        return None
    where, rival = scores.columns[column], scores.names[row]
    return WhyNot("rival", where, float(r2[m, column]), float(r2[row, column]), rival)


def _left(
    learner: Algorithm,
    scores: FitScores,
    measured: Measured,
    limits: Limits,
    counts: np.ndarray | None,
) -> WhyNot | None:
    """A rest that is another learner: of a model after every layer, since later layers of a trained model stray from the
    algorithm in the same way for all prompts; of a function after any layer."""
    rest = scores.rests.get(str(learner.label))
    if rest is None:
        return None
    share, where = rest.share(counts, most=measured.is_function)
    limit = limits.rest_of(measured.is_function)
    rule = "rest" if rest.noise else "rest, no symmetry"
    return WhyNot(rule, where, share, limit) if share > limit else None


def _ascends(progress: LeastProgress | None, limits: Limits) -> WhyNot | None:
    """A direction of the task vector along which the model makes too little progress, relative to the algorithm."""
    if progress is None or progress.least >= limits.progress:
        return None
    return WhyNot("ascends", progress.where, progress.least, limits.progress)


def _against_forgetting(learner: Algorithm, measured: Measured) -> WhyNot | None:
    """A reason by the alpha of a learner along the pairs, against the learner that it contains if forgetting is not excluded,
    and against itself if alpha 1 is not excluded.

    R² cannot decide between the two: weights that fall by a half may change few predictions.
    """
    gate = measured.gate
    if gate is None or not gate.along:
        return None
    for larger, scalars in zip(measured.last.learners, measured.last.scalars, strict=True):
        name = str(larger.label)
        if not larger.along_pairs or not larger.contains or name not in measured.sems:
            continue
        place = [scalar.name for scalar in larger.scalars].index("alpha")
        alpha, sem = (float(each[place]) for each in (scalars, measured.sems[name]))
        fall, most = gate.largest_fall(alpha, sem), alpha + CLEAR_ERRORS * sem
        if learner.label == larger.contains and fall > FORGETS:
            return WhyNot("forgets", value=fall, limit=FORGETS, rival=name)
        if learner.label == name and most >= 1:
            return WhyNot("remembers", value=most, limit=1.0)
    return None


def _settled(judged: dict[str, WhyNot | None], by_layer: bool) -> dict[str, WhyNot | None]:
    """Reasons after ties: of nested algorithms the smaller one stays, and for the last prediction ridge; other ties exclude all."""
    left = [name for name, reason in judged.items() if reason is None]
    within = {name: CONTAINED[name] for name in left if CONTAINED.get(name) in left}
    if within:
        nested = {name: WhyNot("contains", rival=smaller) for name, smaller in within.items()}
        judged, left = {**judged, **nested}, [name for name in left if name not in nested]
    if len(left) > 1:
        stays = (
            "ridge_like" if not by_layer and "ridge_like" in left and ALIKE.issuperset(left) else ""
        )
        for name in left:
            if name != stays:
                others = stays or " and ".join(other for other in left if other != name)
                judged[name] = WhyNot("tie", rival=others)
    return judged
