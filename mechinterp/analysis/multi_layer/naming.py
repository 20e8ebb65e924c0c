"""Name of the algorithm that the layers of a model carry out, and what keeps every other algorithm from being it.

Each algorithm of `icl.algorithms` is fitted to the prediction after every layer, and to the last prediction. It is out if
(1) it explains too little, (2) it has a symmetry that the model has not, (3) another learner explains more, (4) the rest
is another learner and not noise, or (5) the model does not go with it along some direction of the task vector. If one
algorithm is left for the layers, it is the label. Otherwise the label is the learner without steps (ridge, posterior mean) that alone is left for the last prediction. The label must
stand on resampled prompts. `to_frame()` has a row for each learner, with the cell `why_not`.

Reading order: `measure` collects the numbers, `decide` applies the rules (`_judged` and the functions below it),
`labelled` resamples the prompts, `Naming` is the answer.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.multi_layer.directions import Progress, directions_of, law_of, progress_of
from mechinterp.analysis.multi_layer.naming_scores import (
    ADAPTIVE,
    LAST,
    LOOSE,
    NOISES,
    ORDER,
    OTHER_DRIFT,
    ROUNDING,
    TIMES,
    USELESS,
    FitScores,
    Identity,
    Predict,
    Setting,
    Subject,
    Trial,
    candidates_of,
    identities,
    other_drift,
    other_settings,
    path_of,
    predict_by,
    reflected,
    relative_risk,
    satisfies,
    satisfies_all,
    scaled_name,
    step_effects,
    varied_noise,
    with_scaled,
)
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.one_layer.descent import DESCENDS
from mechinterp.analysis.response.gate import Gate, gate_of
from mechinterp.analysis.response.projection import FewPromptsError
from mechinterp.analysis.response.response import response
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import RESAMPLES, best_factor, ratio_and_sem, resampled
from mechinterp.checkpoints.module_weights import by_weights
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.display import Result
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import PromptsTask, no_law, ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import (
    evaluation_prompts,
    most_prompts,
    require_number,
    task_for,
)
from mechinterp.models.run.predictor import Learner, Predictor, Source

UNDETERMINED, UNSTRUCTURED = "undetermined", "unstructured"
GROWTH = (1, 4, 16)
"""Numbers of prompts in turn, in units of `n_prompts`, until all resamples agree."""
REFERENCE = 0
"""Fixed seed of the last prompts, so that the label does not depend on `seed`."""
CONTAINED = {each.label: each.contains for each in ALGORITHMS if each.contains}
"""Smaller algorithm that each larger one contains: if both explain a model, the smaller is its name."""
ALIKE = {"gd_plus_plus", "newton", "ridge_like"}
"""Algorithms that are called ridge_like if they tie with ridge for the last prediction."""
TRIMS = (0.0, 0.05, 0.2)
"""Fractions of the prompts, those with the largest x, that the response leaves out in turn until enough are effective."""
OWN = 0
"""Column of the last prediction at the model's own length."""
WITHOUT_LAW = (
    "Left out, as the law of the prompts is not known: twice the length, a wide spread of x, other noise, and identities other "
    "than the order of pairs; task= (--task) states the law."
)
FIT, TABLE = (
    "mechinterp compare-learners shows which learner is nearest at each context length",
    "to_frame() has what each learner explains",
)
FAR = "R² {r2} ({where}), limit {limit:g}"
RULES = {
    "far": (FAR, FIT),
    "noise": (FAR, "mechinterp compare-learners with prompts of that noise (--task)"),
    "elsewhere": (FAR, "mechinterp compare-learners with such prompts (--task)"),
    "layers": (FAR, "mechinterp probe shows where the prediction is held after each layer"),
    "identity": ("the model breaks '{where}': mismatch {value:.4f}, limit {limit:g}", FIT),
    "rival": ("{rival} is nearer: R² {rival_r2} against {r2} ({where})", TABLE),
    "rest": (
        "its rest is another learner and no noise: reflections of x keep {value:.0%} of it ({where}), limit {limit:.0%}",
        TABLE,
    ),
    "rest, no symmetry": (
        "its rest is more than rounding, and the task has no symmetry that tells noise from a learner",
        "",
    ),
    "factor": (
        "its read-out is {value:.3f} times that of the algorithm, limit 1 ± {limit:g} ({where})",
        FIT,
    ),
    "ascends": (
        "along some direction of the task vector the model makes {value:.2f} of its progress ({where}), limit {limit:g}",
        "mechinterp response shows how the model weighs directions",
    ),
    "contains": ("{rival}, which it contains, explains as much", ""),
    "tie": (
        "ties with {rival}",
        "compare the settings in to_frame(), or ask at another length (--context-length)",
    ),
    "no path": (
        "the prediction after each layer is not known: {where}",
        "give a function of prompts that predicts after every layer, or probe the layers (mechinterp probe)",
    ),
    "no steps": ("says nothing about the layers", ""),
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
    """The same for a function of prompts, which has no noise of weights."""
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
        return RULES[self.rule][0].format(**vars(self), r2=r2, rival_r2=rival_r2)


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
    is_function: bool = False
    sems: Mapping[str, Float[np.ndarray, " _"]] = field(default_factory=dict)
    """Standard errors over prompts of the scalars of near learners without steps, by label."""
    gate: Gate | None = None
    """Reading of the response, which decides what is asked; None if another order of the pairs changes nothing, or too few
    prompts were given."""

    @property
    def useful(self) -> bool:
        """True if the model does its task."""
        return self.relative_risk < USELESS


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
        label = UNDETERMINED if scale.helps or scale.two_values else UNSTRUCTURED
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
    """The one algorithm that nothing speaks against."""
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
    where = LAST if scores.n_own == 1 else "after every layer"
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
    """The setting in which an algorithm along the pairs explains least, if that is too little: any of a function, other
    drift of a model."""
    if not scores.learners[m].along_pairs:
        return None
    others = range(scores.n_own, len(scores.columns))
    asked = [n for n in others if measured.is_function or scores.columns[n] == OTHER_DRIFT]
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
    limit = limits.rest_of_function if measured.is_function else limits.rest
    rule = "rest" if rest.noise else "rest, no symmetry"
    return WhyNot(rule, where, share, limit) if share > limit else None


def _ascends(progress: Progress | None, limits: Limits) -> WhyNot | None:
    """A direction of the task vector in which the model does not go with the algorithm."""
    if progress is None or progress.least >= limits.progress:
        return None
    return WhyNot("ascends", progress.where, progress.least, limits.progress)


def _settled(judged: dict[str, WhyNot | None], by_layer: bool) -> dict[str, WhyNot | None]:
    """With ties: the smaller of nested algorithms stays, and ridge for the last prediction; else none."""
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


@dataclass(frozen=True, eq=False, repr=False)
class Naming(Named, Result):
    """Name of a model's algorithm, with a row for each learner.

    `label` is the mechanism, else the function if it is a learner without steps; a label of `icl.algorithms`,
    "undetermined" or "unstructured". Function and mechanism are "undetermined" if several algorithms are left, or none.
    """

    frequency: Mapping[str, float]
    """Fraction of resamples of the scored prompts with each label, largest first."""
    measured: Measured
    risks: Mapping[str, tuple[int, float]]
    """Number of pairs, and excess risk of the model over that of predicting 0, by setting. Settings from 0.95 on are not
    evidence."""
    n_layers: int
    n_prompts: int
    followed: str = ""
    """Algorithm whose steps are put in."""
    steps: pd.DataFrame | None = None
    """Effects of its steps; None if they were not put in."""
    scalar_sems: Float[np.ndarray, " _"] = field(default_factory=lambda: np.zeros(0))
    """Standard errors over prompts of the scalars of a label without steps; empty for other labels."""
    left_out: str = ""
    """Parts that need the law of given prompts, if it is not known."""

    COLUMNS: ClassVar = {
        "learner": "Algorithm by its label, or algorithm with a scaled read-out, which gives no label.",
        "scalars": "Fitted numbers, layer by layer: of all layers if the prediction after each is known.",
        "r2": "1 - mean (model - learner)^2 / mean model^2 for the last prediction; fitted and scored on different prompts.",
        **{
            f"layer_{n}_r2": f"R² after layer {n}, relative to the last prediction."
            for n in range(99)
        },
        "half_length_r2": "R² at half the model's own length; empty if the learner is not near at its own.",
        "double_length_r2": "R² at twice the model's own length.",
        "wide_spread_r2": "R² with eigenvalues of the covariance of x from 1 to 30.",
        "less_noise_r2": "R² with a hundredth of the noise variance.",
        "more_noise_r2": "R² with ten times the noise variance; for functions of prompts.",
        "much_noise_r2": "R² with a hundred times the noise variance; for functions of prompts.",
        "other_drift_r2": "R² on prompts of a task that drifts (rho 0.9), or of a fixed one if the task drifts; for algorithms along the pairs.",
        "steps_r2": "Least R² over layers of the prediction with the learner's step in place of what the layer adds at the query.",
        "exchanged_r2": "Least R² over layers of the change of the prediction if the learner's prediction so far is exchanged with that of another prompt.",
        "why_not": "What keeps the learner from being the label; empty for the label.",
        "test": "Identity that some algorithms satisfy.",
        "mismatch": "Least fraction of the model that breaks the identity.",
    }

    def __repr__(self) -> str:
        return f"Naming({self.label}: {self.reason})"

    @property
    def members(self) -> list[str]:
        """Labels of the algorithms that were fitted; none for a model that does not do its task."""
        return [each.label for each in self.measured.last.learners if each.label]

    def _row(self, learner: str) -> tuple[FitScores, int]:
        """Scores of a learner and its row there: for all layers if the prediction after each is known."""
        path = self.measured.path
        scores = path if path is not None and learner in path.names else self.measured.last
        return scores, scores.names.index(learner)

    def scalars(self, learner: str) -> Float[np.ndarray, " _"]:
        """Fitted numbers of a learner, in the order of `Algorithm.names`."""
        scores, row = self._row(learner)
        return scores.scalars[row]

    def explained(self, learner: str) -> tuple[float, float]:
        """R² of an algorithm for the last prediction, and its standard error."""
        r2, sem = self.table.loc[learner, ["r2", "r2_sem"]]
        return float(r2), float(sem)

    def lead(self, first: str, second: str) -> tuple[float, float]:
        """R² of a learner minus that of another for the last prediction, and its standard error, paired.

        The error is that for these two: that another learner may be nearest on other prompts, and the fits, are left out.
        """
        last = self.measured.last
        near, far = (last.error[last.names.index(name), OWN] for name in (first, second))
        lead, sem = ratio_and_sem(far - near, last.size[OWN])
        return float(lead), float(sem)

    @property
    def order(self) -> list[str]:
        """Algorithms by R² of the last prediction, largest first."""
        return [name for name in self._by_r2().index if name in self.members]

    def _by_r2(self) -> pd.DataFrame:
        """The table with the largest R² first; equal to rounding, in the order of the algorithms."""
        return self.table.sort_values(
            "r2", key=lambda c: c.round(6), ascending=False, kind="stable"
        )

    @property
    def nearest(self) -> str:
        """The label, or a label that changes with the prompts; else the learner of the last prediction, else the algorithm
        of the largest R²; "" if none was fitted."""
        unsure = [name for name, each in self.why_not.items() if each and each.rule == "frequency"]
        known = (self.label, *unsure, self.function, *self.order, "")
        return next(name for name in known if name in (*self.members, ""))

    @property
    def why(self) -> str:
        """Rule that decided."""
        if not self.measured.useful:
            scale = self.measured.scale
            return "logit" if scale.two_values else "scale" if scale.helps else "useless"
        reason = self.why_not[self.nearest]
        if reason is None:
            return "mechanism" if self.mechanism == self.label else "function"
        return reason.rule

    @property
    def reason(self) -> str:
        """One sentence: what decided, with its number, and for "undetermined" what to run next."""
        if not self.measured.useful:
            return self._useless()
        name, reason = self.nearest, self.why_not[self.nearest]
        r2, sem = self.explained(name)
        text = f"{name} at R² {r2:.4f} ± {sem:.1g}"
        if reason is not None:
            same = reason.rule == "far" and math.isclose(reason.value, r2)
            text = f"nearest: {text}, limit {reason.limit:g}" if same else f"nearest: {text}, but {reason}"  # fmt: skip
        elif self.mechanism != self.label:
            how = f" ({self.measured.path_how})" if self.measured.path is None else ""
            text += f", path not identified{how}"
        else:
            scores, row = self._row(name)
            r2s, sems = scores.r2()[row, : scores.n_own], scores.r2_sem()[row, : scores.n_own]
            at = int(r2s.argmin())
            text += f", after every layer {with_error(r2s[at], sems[at])} or more"
            if self.steps is not None:
                text += f", with its steps put in {self.steps.steps_r2.min():.2f}"
        parts = [text]
        if self.why != "frequency":
            share = self.frequency.get(self.label, 0.0)
            parts.append(f"{self.label} in {share:.0%} of resamples")
        if self.function not in (UNDETERMINED, self.label, name):
            parts.append(f"as a function {self.function}")
        after = RULES[reason.rule][1] if reason is not None else ""
        if self.label == UNDETERMINED and after:
            parts.append(f"next: {after}")
        return "; ".join(parts)

    def _useless(self) -> str:
        scale = self.measured.scale
        text = f"the model's excess risk is {self.measured.relative_risk:.3g} times that of predicting 0"
        best = f"(ridge regression {scale.ridge:.3g})"
        if scale.two_values:
            low, high = scale.two_values
            return (
                f"{text} {best}, but the responses are {low:g} or {high:g}: if the output is a logit, squared error is the "
                f"wrong loss for it; next: give a function that turns the logit z into the expected response, "
                f"{low:g} + {high - low:g} sigmoid(z)"
            )
        if not scale.helps:
            return f"{text} {best}, and no factor on its predictions takes it half of the way to ridge regression"
        return (
            f"{text}; with its predictions times {scale.factor:.3g} it is {scale.risk:.3g} times {best}: "
            "is the output scaled? (`read=`)"
        )

    @cached_property
    def table(self) -> pd.DataFrame:
        """Scalars, R² with its standard error in each column, effects of the steps, and `why_not`, by learner.

        Standard errors are over the scored half of the prompts. They leave out the fit of the scalars on the other half.
        At the own length, and after each layer, the fit adds little. In other settings the spread over seeds may be two to
        four times the error (docs/trust.md).
        """
        last, path = self.measured.last.table(), self.measured.path
        known = [last] if path is None else [path.table(), last]
        frame = pd.concat(known)
        frame = frame[~frame.index.duplicated()].assign(**last[["r2", "r2_sem"]])
        frame = frame[["scalars", "r2", "r2_sem", *frame.columns.drop(["scalars", "r2", "r2_sem"])]]
        if self.steps is not None:
            frame = frame.join(self.steps.min().to_frame(self.followed).T)
        reasons = {name: reason or "" for name, reason in self.why_not.items()}
        frame["why_not"] = [str(reasons.get(name, "gives no label")) for name in frame.index]
        return frame.rename_axis("learner")

    def to_frame(self) -> pd.DataFrame:
        """One row per learner, the label first, then the nearest."""
        if not self.measured.useful:
            nothing = {"learner": "predicting 0", "scalars": "", "r2": np.nan, "r2_sem": np.nan}
            return pd.DataFrame([nothing | {"why_not": "the model does not do its task"}])
        return (
            self._by_r2().sort_values("why_not", key=lambda c: c != "", kind="stable").reset_index()
        )

    def test_frame(self) -> pd.DataFrame:
        """One row per identity that was asked."""
        mismatch = {name: each.mismatch() for name, each in self.measured.tests.items()}
        return pd.DataFrame({"test": list(mismatch), "mismatch": list(mismatch.values())})

    def sentences(self) -> list[str]:
        """The label with its reason, and parts that were left out."""
        numbers = (
            zip(self._scalar_names, self.scalars(self.label), self.scalar_sems, strict=True)
            if len(self.scalar_sems)
            else ()
        )
        listed = ", ".join(f"{name} {with_error(value, sem)}" for name, value, sem in numbers)
        texts = [f"Its numbers: {listed}." if listed else "", self.left_out]
        return [f"The label is {self.label}: {self.reason}.", *filter(None, texts)]

    @property
    def _scalar_names(self) -> tuple[str, ...]:
        """Names of the label's scalars."""
        learner = next(each for each in self.measured.last.learners if each.label == self.label)
        return learner.names(self.n_layers)

    def scalar_frame(self) -> pd.DataFrame:
        """Scalars of a label without steps with their standard errors, one row each; empty for other labels."""
        if not len(self.scalar_sems):
            return pd.DataFrame(columns=["scalar", "value", "sem"])
        columns = {"value": self.scalars(self.label), "sem": self.scalar_sems}
        return pd.DataFrame({"scalar": self._scalar_names, **columns})

    def tables(self) -> dict[str, Table]:
        """Learners; and identities, if any were asked."""
        frame, title = self.to_frame(), "Learners, and what keeps each from being the label"
        quiet = tuple(column for column in frame if column.endswith("_sem"))
        tables = {"algorithms": Table(frame, title, quiet=quiet)}
        if self.measured.tests:
            tables["identities"] = Table(self.test_frame(), "Identities")
        return tables

    def figures(self) -> dict[str, go.Figure]:
        """The paths, if there are any."""
        return {"algorithm_path": self.plot()} if len(self.path) else {}

    def evidence(self) -> dict:
        """Numbers behind the label, for the JSON document."""
        evidence: dict[str, object] = {
            "function": self.function,
            "mechanism": self.mechanism,
            "frequency": dict(self.frequency),
            "relative_risk": self.measured.relative_risk,
        }
        if self.nearest:
            r2, sem = self.explained(self.nearest)
            evidence |= {"algorithm": self.nearest, "r2": r2, "r2_sem": sem}
            evidence |= {"scalars": self.scalars(self.nearest)}
        if len(self.scalar_sems):
            evidence |= {"scalar_sems": self.scalar_sems}
        tables = {"algorithms": self.to_frame(), "tests": self.test_frame()}
        return evidence | {name: records(frame) for name, frame in tables.items()}

    @property
    def path(self) -> pd.DataFrame:
        """R² after each layer of the algorithms whose path is nearer to the model's than 0 is, one row each."""
        r2 = self.table.reindex(self.members)[self._by_layer]
        return r2[(r2 >= 0).all(axis=1) & bool(r2.size)]

    @property
    def _by_layer(self) -> list[str]:
        """Columns with the R² after each layer; of a single layer that is the last prediction."""
        if self.measured.path is None:
            return []
        return ["r2"] if self.n_layers == 1 else [f"layer_{n}_r2" for n in range(self.n_layers)]

    def plot(self) -> go.Figure:
        """R² of each algorithm after each layer."""
        sems = self.table[[f"{name}_sem" for name in self._by_layer]]
        return figures.lines(
            np.arange(self.n_layers),
            {name: (r2.to_numpy(), sems.loc[name].to_numpy()) for name, r2 in self.path.iterrows()},
            title="R² of each algorithm with the model's prediction after each layer",
            x_title="after layer (the first is 0)",
            y_title="R²",
        )


@torch.inference_mode(False)  # algorithms are fitted by gradients, which may be off
def name_algorithm(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int = 256,
    seed: int = 0,
) -> Naming:
    """The algorithm that the layers of a model carry out, and the learner of its last prediction.

    Args:
        source: Model; or function from prompts to predictions [batch, d_y], or [layer, batch, d_y] after every layer,
            which needs a task.
        prompts: Given prompts, of the model's own length; no others are drawn at that length. None: drawn from the task.
        task: Law of the prompts; None: the law stated with the model. "unknown": given prompts have no known law, and
            `left_out` names the parts that need it.
        n_prompts: First number of prompts. If resamples disagree, four times and then sixteen times as many are drawn,
            unless the prompts are too long for so many (`most_prompts`); the last are the same for every seed.
    Raises:
        ValueError: If there is no task, there are fewer than 8 prompts or than twice the scalars of an algorithm, they do
            not fit the model, or a function gives something else than predictions.
    Source:
        Derived here; the algorithms are those of `mechinterp.icl.algorithms`.
    See also:
        `classify`, `compare_learners`, `probe`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> name_algorithm(gradient_descent_model([0.5, 0.3], d_x=2), n_prompts=16).label
        'gradient_descent'
        >>> from mechinterp.config import TaskConfig
        >>> name_algorithm(lambda prompts: ridge(prompts, penalty=0.5), task=TaskConfig(d_x=4)).label
        'ridge_like'
    """
    source = by_weights(source)
    law = task_for(source, task, "name_algorithm", prompts)
    given = law.prompts if isinstance(law, PromptsTask) else None
    subject, n_prompts = Subject.of(source, law), n_prompts if given is None else len(given)
    members = candidates_of(subject.task)
    scalars = max(len(each.names(subject.n_layers)) for each in members)
    require_number(n_prompts, scalars, what="n_prompts" if given is None else "distinct prompts")
    length = subject.task.context_length
    for growth in GROWTH if given is None else (1,):
        if growth > 1 and growth * n_prompts > most_prompts(subject.task, length):
            break
        drawn_by = REFERENCE if growth == GROWTH[-1] else seed
        drawn = evaluation_prompts(subject.task, n_prompts=growth * n_prompts, seed=drawn_by)
        answer = _named(subject, drawn.to(torch.float64), drawn_by)
        if _stands(answer):
            break
    return answer


def _stands(answer: Naming) -> bool:
    """True if more prompts are not needed: all resamples agree, and the label is no learner without steps while an
    algorithm explains every layer, which another fit may make the label."""
    path = answer.measured.path
    by_layer = [] if path is None else [answer.why_not.get(name) for name in path.names]
    explained = any(each is not None and each.rule != "layers" for each in by_layer)
    fallback = answer.label == answer.function != answer.mechanism
    return answer.measured.useful and len(answer.frequency) == 1 and not (fallback and explained)


def _named(subject: Subject, prompts: Prompts, seed: int) -> Naming:
    own, limits = Setting.of(prompts, subject.predict(prompts)), Limits()
    settings = {"own length": own, **other_settings(subject, own, seed)}
    measured = measure(subject, settings, seed, limits)
    decision, frequency = labelled(measured, limits)
    followed, steps = "", None
    if measured.path is not None and isinstance(subject.source, Predictor):
        scores = measured.path
        least = np.nan_to_num(scores.r2()[:, : subject.n_layers].min(1), nan=-np.inf)
        rows = [m for m, each in enumerate(scores.learners) if each.label and least[m] >= LOOSE]
        for m in sorted(rows, key=lambda m: (scores.names[m] != decision.label, -least[m]))[:1]:
            followed, fit = scores.names[m], (scores.learners[m], scores.scalars[m])
            steps = step_effects(subject.source, *fit, own.prompts, subject.task)
    return Naming(
        **vars(decision),
        frequency=frequency,
        measured=measured,
        risks={
            name: (each.prompts.x.shape[1], each.relative_risk) for name, each in settings.items()
        },
        n_layers=subject.n_layers,
        n_prompts=len(prompts),
        followed=followed,
        steps=steps,
        scalar_sems=measured.sems.get(decision.label, np.zeros(0)),
        left_out=WITHOUT_LAW if no_law(subject.task) else "",
    )


def labelled(measured: Measured, limits: Limits) -> tuple[Named, dict[str, float]]:
    """The label, which enough resamples of the scored prompts must have, and the fraction of resamples of each label."""
    decision, n = decide(measured, limits), measured.last.size.shape[1]
    if not measured.useful:
        return decision, {decision.label: 1.0}
    labels = Counter(decide(measured, limits, n * share).label for share in resampled(n))
    by_count = sorted(labels.items(), key=lambda label: (-label[1], label[0]))
    frequency = {name: count / RESAMPLES for name, count in by_count}
    share = frequency.get(decision.label, 0.0)
    if decision.label != UNDETERMINED and share < limits.frequency:
        unsure = WhyNot("frequency", value=share, limit=limits.frequency)
        why_not = {**decision.why_not, decision.label: unsure}
        decision = Named(UNDETERMINED, decision.function, UNDETERMINED, why_not)
    return decision, frequency


def measure(
    subject: Subject, settings: Mapping[str, Setting], seed: int, limits: Limits
) -> Measured:
    """The numbers, without a label."""
    own, task = settings["own length"], subject.task
    asked = {name: each for name, each in settings.items() if each is own or each.useful}
    trial = Trial(asked, task, subject.n_layers, own.predictions[None])
    measured = Measured(own.relative_risk, _scale(own, task), trial.scores(()))
    if not measured.useful:
        return measured
    tests = identities(subject.predict, own, task, seed)
    gate = _gate(subject, own, tests)
    members = _asked(subject, gate, tests)
    if any(each.label == ADAPTIVE for each in members):
        trial = replace(trial, varied=varied_noise(subject, own, seed))
    if gate is not None and gate.along:
        trial = replace(trial, settings={**asked, **other_drift(subject, own, seed)})
    (read, how), near = path_of(subject, own, seed), limits.explained - 0.01
    path, starts = None, {}
    if read is not None:
        by_layer = replace(trial, target=read(own.prompts))
        path = by_layer.scores([each for each in members if each.has_path])
        starts = dict(zip(path.names, path.scalars, strict=True))
        rests = subject.is_function or bool(reflected(own.prompts[:1], task, seed))
        path = with_scaled(path, by_layer, read, near, seed, rests=rests)
        path = _with_progress(path, subject, own, read, limits, seed)
    if gate is not None:
        starts = {**gate.first_scalars(members, trial.moments("fit")), **starts}
    last, own_tests = trial.scores(members, starts, n_starts=2), {}
    for m, each in enumerate(members):
        if last.r2()[m, OWN] >= LOOSE and not satisfies_all(each):
            predict = predict_by(each, last.scalars[m], task, subject.n_layers)
            alone = Setting(own.prompts, predict(own.prompts))
            own_tests[str(each.label)] = identities(predict, alone, task, seed)
    sems = {
        str(each.label): trial.scalar_sems(each, last.scalars[m])
        for m, each in enumerate(members)
        if not each.has_path and each.scalars and last.r2()[m, OWN] >= limits.explained
    }
    predicted = lambda each: subject.predict(each)[None]  # noqa: E731
    last = with_scaled(last, trial, predicted, near, seed, rests=subject.is_function)
    return replace(
        measured,
        last=_with_progress(last, subject, own, predicted, limits, seed),
        tests=tests,
        own_tests=own_tests,
        path=path,
        path_how=how,
        is_function=subject.is_function,
        sems=sems,
        gate=gate,
    )


def _asked(
    subject: Subject, gate: Gate | None, tests: Mapping[str, Identity]
) -> tuple[Algorithm, ...]:
    """Algorithms that are fitted: along the pairs or not, as the response says; all, for a function that another order changes
    but whose response is none along the pairs.

    Adaptive ridge is asked for a task of several noise levels, and for a function whose predictions do not scale with y.
    """
    members = candidates_of(subject.task)
    a_set = ORDER in tests and tests[ORDER].mismatch() <= ROUNDING
    if gate is not None and (gate.along or not subject.is_function):
        members = gate.asked(members)
    elif a_set or not subject.is_function:
        members = tuple(each for each in members if not each.along_pairs)
    scaled_y = [test.mismatch() for name, test in tests.items() if name.startswith(TIMES)]
    adapts = subject.is_function and max(scaled_y, default=0.0) > ROUNDING
    if adapts or len(subject.task.noise_levels) > 1:
        return members
    return tuple(each for each in members if each.label != ADAPTIVE)


def _gate(subject: Subject, own: Setting, tests: Mapping[str, Identity]) -> Gate | None:
    """Reading of the response on the prompts of the model's own length."""
    if ORDER in tests and tests[ORDER].mismatch() <= ROUNDING:
        return None
    law = "unknown" if no_law(subject.task) else law_of(subject.task)
    for trim in TRIMS:
        with suppress(FewPromptsError):
            return gate_of(response(subject.source, own.prompts, task=law, trim=trim))
    return None


def _with_progress(
    scores: FitScores, subject: Subject, own: Setting, read: Predict, limits: Limits, seed: int
) -> FitScores:
    """Scores with the model's progress relative to each algorithm that explains enough to give the label."""
    r2, found = scores.r2()[:, : scores.n_own].min(1), {}
    rows = [m for m, each in enumerate(scores.learners) if each.label and r2[m] >= limits.explained]
    directions = directions_of(subject.task, own.prompts.x.shape[1], seed) if rows else None
    if directions is None:
        return scores
    columns = scores.columns[: scores.n_own]
    for m in rows:
        fit = scores.learners[m], scores.scalars[m]
        found[str(fit[0].label)] = progress_of(directions, read, *fit, subject.n_layers, columns)
    return replace(scores, progress=found)


def _scale(own: Setting, task: TaskConfig) -> Scale:
    target = own.prompts.y_query_clean
    with np.errstate(invalid="ignore", over="ignore"):
        factor, _ = best_factor(own.predictions, target)
    best = ridge(own.prompts, penalty=task.posterior_penalty)
    risk, ridge_risk = (relative_risk(each, target) for each in (factor * own.predictions, best))
    values = own.prompts.y.unique().tolist()
    two_values = tuple(values) if len(values) == 2 else ()
    return Scale(factor, risk, ridge_risk, two_values)
