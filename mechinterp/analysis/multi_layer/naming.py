"""Name of the algorithm that the layers of a model carry out.

Each algorithm of `icl.algorithms` is fitted to the prediction after every layer, and to the last prediction. `measure`
collects the numbers (naming_prompts, fits, identities, scaled, stream), `decide` applies the rules (naming_rules), `labelled`
resamples the prompts, since a label must stand on them, and `Naming` is the answer (naming_result).
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from mechinterp.analysis.multi_layer.directions import directions_of, law_of, progress_of
from mechinterp.analysis.multi_layer.fits import (
    ADAPTIVE,
    LOOSE,
    N_STARTS,
    FitScores,
    FitTrial,
    predict_by,
)
from mechinterp.analysis.multi_layer.identities import (
    PAIR_ORDER,
    TIMES,
    Identity,
    identities,
    satisfies_all,
)
from mechinterp.analysis.multi_layer.naming_prompts import (
    NamingSetting,
    Predict,
    Subject,
    candidates_of,
    other_drift,
    other_settings,
    relative_risk,
    varied_noise,
)
from mechinterp.analysis.multi_layer.naming_result import OWN_COLUMN, Naming
from mechinterp.analysis.multi_layer.naming_rules import (
    UNDETERMINED,
    Limits,
    Measured,
    Named,
    Scale,
    WhyNot,
    decide,
)
from mechinterp.analysis.multi_layer.rests import REST_ROUNDING, reflected
from mechinterp.analysis.multi_layer.scaled import read_out_of, with_scaled
from mechinterp.analysis.multi_layer.stream import path_of, step_effects
from mechinterp.analysis.response.gate import Gate, gate_of
from mechinterp.analysis.response.projection import FewPromptsError
from mechinterp.analysis.response.response import kind_frames
from mechinterp.analysis.stats import RESAMPLES, best_factor, resampled
from mechinterp.checkpoints.foreign.readings.agreed import over_readings
from mechinterp.checkpoints.modules.weights import by_weights
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.given import PromptsTask, no_law
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, task_for
from mechinterp.models.run.n_prompts import most_prompts, require_number
from mechinterp.models.run.predictor import Learner, Source
from mechinterp.models.run.ways import Predictor

GROWTH = (4, 16)
"""Further numbers of prompts in turn, in units of `n_prompts`, until all resamples agree."""
REFERENCE = 0
"""Fixed seed of the last prompts, so that the label does not depend on `seed`."""
NEARLY = 0.01
"""An algorithm whose R² misses the limit by less than this gets a scaled read-out and a rest, too."""
TRIMS = (0.0, 0.05, 0.2)
"""Fractions of the prompts, those with the largest x, that the response leaves out in turn until enough are effective."""
WITHOUT_LAW = (
    "Left out, as the law of the prompts is not known: twice the length, a wide spread of x, other noise, and identities other "
    "than the order of pairs; task= (--task) states the law."
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

    If a file or module leaves settings open, every reading with a low enough loss is named. If the labels differ, the answer
    is "undetermined", and its reason has the readings and the option that decides.

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

    def named(each: Source | Learner) -> Naming:
        return _on_enough(Subject.of(each, law), n_prompts, seed)

    return over_readings(source, named, (law.d_x, law.d_y))


def _on_enough(subject: Subject, n_prompts: int, seed: int) -> Naming:
    """The algorithm of one reading, on as many prompts as the label needs to stand."""
    given = subject.task.prompts if isinstance(subject.task, PromptsTask) else None
    n_prompts = n_prompts if given is None else len(given)
    members = candidates_of(subject.task)
    scalars = max(len(each.names(subject.n_layers)) for each in members)
    require_number(n_prompts, scalars, what="n_prompts" if given is None else "distinct prompts")
    length = subject.task.context_length

    def on(growth: int, drawn_by: int) -> Naming:
        drawn = evaluation_prompts(subject.task, n_prompts=growth * n_prompts, seed=drawn_by)
        return _named(subject, drawn.to(torch.float64), drawn_by)

    answer = on(1, seed)
    for growth in GROWTH if given is None else ():
        if _stands(answer) or growth * n_prompts > most_prompts(subject.task, length):
            break
        answer = on(growth, REFERENCE if growth == GROWTH[-1] else seed)
    return answer


def _stands(answer: Naming) -> bool:
    """True if no more prompts are needed: all resamples agree, and there is no doubt between a learner without steps (the
    label) and an algorithm that explains every layer, which a better fit may make the label."""
    path = answer.measured.path
    by_layer = [] if path is None else [answer.why_not.get(name) for name in path.names]
    explained = any(each is not None and each.rule != "layers" for each in by_layer)
    fallback = answer.label == answer.function != answer.mechanism
    return answer.measured.useful and len(answer.frequency) == 1 and not (fallback and explained)


def _named(subject: Subject, prompts: Prompts, seed: int) -> Naming:
    own = NamingSetting.of(prompts, subject.predict(prompts))
    limits = Limits()
    settings = {"own length": own, **other_settings(subject, own, seed)}
    measured = measure(subject, settings, seed, limits)
    decision, frequency = labelled(measured, limits)
    followed, steps = _followed(subject, own, measured, decision.label)
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


def _followed(
    subject: Subject, own: NamingSetting, measured: Measured, label: str
) -> tuple[str, pd.DataFrame | None]:
    """Algorithm whose steps are put into the stream, the label if it is near after every layer, else the nearest; and the
    effects. Empty and None if no algorithm is near, or the source is a function."""
    scores = measured.path
    if scores is None or not isinstance(subject.source, Predictor):
        return "", None
    least = np.nan_to_num(scores.r2()[:, : subject.n_layers].min(1), nan=-np.inf)
    rows = [m for m, each in enumerate(scores.learners) if each.label and least[m] >= LOOSE]
    if not rows:
        return "", None
    m = min(rows, key=lambda m: (scores.names[m] != label, -least[m]))
    fit = scores.learners[m], scores.scalars[m]
    return scores.names[m], step_effects(subject.source, *fit, own.prompts, subject.task)


def labelled(measured: Measured, limits: Limits) -> tuple[Named, dict[str, float]]:
    """The label, which enough resamples of the scored prompts must have, and the fraction of resamples of each label."""
    decision = decide(measured, limits)
    n = measured.last.size.shape[1]
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
    subject: Subject, settings: Mapping[str, NamingSetting], seed: int, limits: Limits
) -> Measured:
    """The numbers, without a label."""
    task = subject.task
    own = settings["own length"]
    asked = {name: each for name, each in settings.items() if each is own or each.useful}
    trial = FitTrial(asked, task, subject.n_layers, own.predictions[None])
    scale, sem = _scale(own, task), own.relative_risk_sem
    measured = Measured(own.relative_risk, scale, trial.scores(()), relative_risk_sem=sem)
    if not measured.useful:
        return measured
    tests = identities(subject.predict, own, task, seed)
    gate = _gate(subject, own, tests)
    members = _asked(subject, gate, tests)
    if any(each.label == ADAPTIVE for each in members):
        trial = replace(trial, varied=varied_noise(subject, own, seed))
    if gate is not None and gate.along:
        trial = replace(trial, settings={**asked, **other_drift(subject, own, seed)})
    read, how = path_of(subject, own, seed)
    near = limits.explained - NEARLY
    path = None
    starts = {}
    if read is not None:
        by_layer = replace(trial, target=read(own.prompts))
        path = by_layer.scores([each for each in members if each.has_path])
        starts = dict(zip(path.names, path.scalars, strict=True))
        rests = subject.is_function or bool(reflected(own.prompts[:1], task, seed))
        path = with_scaled(path, by_layer, read, near, seed, rests=rests)
        path = _with_progress(path, subject, own, read, limits, seed)
    if gate is not None:
        starts = {**gate.first_scalars(members, trial.moments("fit")), **starts}
    near_one = {"most": limits.read_out, "share": limits.of_rest}
    members = tuple(
        read_out_of(each, trial, starts.get(str(each.label)), **near_one) for each in members
    )
    last = trial.scores(members, starts, n_starts=N_STARTS)
    own_tests = {}
    for m, each in enumerate(members):
        if last.r2()[m, OWN_COLUMN] >= LOOSE and not satisfies_all(each):
            predict = predict_by(each, last.scalars[m], task, subject.n_layers)
            alone = NamingSetting(own.prompts, predict(own.prompts))
            own_tests[str(each.label)] = identities(predict, alone, task, seed)
    sems = {
        str(each.label): trial.scalar_sems(each, last.scalars[m])
        for m, each in enumerate(members)
        if not each.has_path and each.scalars and last.r2()[m, OWN_COLUMN] >= limits.explained
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
    """Algorithms that are fitted. The response decides whether these are learners along the pairs or the others; all are fitted to
    a function that depends on the order of the pairs although its response shows no learner along the pairs.

    Adaptive ridge is fitted for a task of several noise levels, and for a function whose predictions do not scale with y.
    """
    members = candidates_of(subject.task)
    a_set = PAIR_ORDER in tests and tests[PAIR_ORDER].mismatch() <= REST_ROUNDING
    if gate is not None and (gate.along or not subject.is_function):
        members = gate.asked(members)
    elif a_set or not subject.is_function:
        members = tuple(each for each in members if not each.along_pairs)
    scaled_y = [test.mismatch() for name, test in tests.items() if name.startswith(TIMES)]
    adapts = subject.is_function and max(scaled_y, default=0.0) > REST_ROUNDING
    if adapts or len(subject.task.noise_levels) > 1:
        return members
    return tuple(each for each in members if each.label != ADAPTIVE)


def _gate(subject: Subject, own: NamingSetting, tests: Mapping[str, Identity]) -> Gate | None:
    """Reading of the response on the prompts of the model's own length; on more prompts, if these are too few."""
    if PAIR_ORDER in tests and tests[PAIR_ORDER].mismatch() <= REST_ROUNDING:
        return None
    unknown = no_law(subject.task)
    law = "unknown" if unknown else law_of(subject.task)
    for prompts in (own.prompts,) if unknown else (own.prompts, None):
        for trim in TRIMS:
            with suppress(FewPromptsError):
                return gate_of(kind_frames(subject.source, prompts, task=law, trim=trim))
    return None


def _with_progress(
    scores: FitScores,
    subject: Subject,
    own: NamingSetting,
    read: Predict,
    limits: Limits,
    seed: int,
) -> FitScores:
    """Scores with the model's progress relative to each algorithm that explains enough to give the label."""
    r2 = scores.r2()[:, : scores.n_own].min(1)
    found = {}
    rows = [m for m, each in enumerate(scores.learners) if each.label and r2[m] >= limits.explained]
    directions = directions_of(subject.task, own.prompts.x.shape[1], seed) if rows else None
    if directions is None:
        return scores
    columns = scores.columns[: scores.n_own]
    for m in rows:
        fit = scores.learners[m], scores.scalars[m]
        found[str(fit[0].label)] = progress_of(directions, read, *fit, subject.n_layers, columns)
    return replace(scores, progress=found)


def _scale(own: NamingSetting, task: TaskConfig) -> Scale:
    target = own.prompts.y_query_clean
    with np.errstate(invalid="ignore", over="ignore"):
        factor, _ = best_factor(own.predictions, target)
    best = ridge(own.prompts, penalty=task.posterior_penalty)
    risk, ridge_risk = (relative_risk(each, target) for each in (factor * own.predictions, best))
    values = own.prompts.y.unique().tolist()
    two_values = tuple(values) if len(values) == 2 else ()
    return Scale(factor, risk, ridge_risk, two_values)
