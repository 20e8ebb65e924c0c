"""Which algorithm the layers of a model carry out, with the evidence.

Each member of `icl.algorithms` is fitted to half of the prompts at the model's own length, to the last
prediction and to the prediction after every layer, and scored on the other half; half and twice the
length and a covariance with a wide spread only speak against members. Controls that come nearer keep a
label away. The label is decided on resampled prompts too, and on more of them until it stands.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_labels import (
    OWN,
    UNDETERMINED,
    AlgorithmLimits,
    Decision,
    Measured,
    Scale,
    broken_by,
    broken_share,
    decide,
    does_nothing,
)
from mechinterp.analysis.multi_layer.algorithm_leftover import ROUNDING, reflected, with_leftovers
from mechinterp.analysis.multi_layer.algorithm_null import null_risk
from mechinterp.analysis.multi_layer.algorithm_paths import Path, claims_r2, path_of
from mechinterp.analysis.multi_layer.algorithm_reasons import reason_of
from mechinterp.analysis.multi_layer.algorithm_scores import (
    LOOSE,
    Room,
    Scores,
    candidates_of,
    free_preconditioner,
)
from mechinterp.analysis.multi_layer.algorithm_source import AlgorithmSource, algorithm_source
from mechinterp.analysis.multi_layer.algorithm_tests import (
    ORDER,
    Predict,
    Setting,
    identity_tests,
    other_settings,
    relative_risk,
    scaled_risk,
    setting_of,
)
from mechinterp.config import TaskConfig, TaskLike
from mechinterp.icl.algorithm import Algorithm, at_depth
from mechinterp.icl.algorithm_controls import CONTROLS, OF_ANY_DEPTH, ONLINE
from mechinterp.icl.given import PromptsTask, no_law
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, require_number
from mechinterp.models.run.predictor import (
    Learner,
    Source,
    is_learner,
)

GROWTH = (1, 4, 16)
"""Prompts in turn, in units of those asked for, until the label stands."""
CLEAR = 0.99
"""Share of resamples of one label from which on no more prompts are drawn."""
MARGIN = 0.5
"""Share by which the limits are moved for the same."""
REFERENCE = 0
"""Seed of the prompts that decide where fewer do not: the same for every seed, so that the label is, too."""
RESAMPLES = 200
DEPTHS = (1, 2, 3, 5, 6)
"""Layers, beside those of the algorithms, that a function without a path may have."""
SPREAD = 3.0
"""Standard errors that hardly a resample goes beyond."""
LEFT_OUT = (
    "Left out, as the law of the prompts is not known: twice the length, a wide spread of x, and identities other "
    "than the order of pairs; task= (--task) states the law."
)
HALF = 0.5
"""Most of a learner in what an algorithm leaves of a function."""


@torch.inference_mode(False)  # algorithms are fitted by gradients, which may be off
def name_algorithm(
    source: Source | Learner,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    n_prompts: int = 256,
    seed: int = 0,
) -> AlgorithmEvidence:
    """The algorithm that the layers of a model carry out, and which learner its predictions are.

    Args:
        source: A model; or a function from prompts to predictions [batch, d_y], or [layer, batch, d_y] after every
            layer, which needs a task.
        prompts: Given prompts, of the model's own length: no more than these are used. None: drawn from the task.
        task: Law of the prompts; None: the model's own. The law of given prompts is then not known, and `left_out`
            says which parts need it.
        n_prompts: The model is asked on as many to begin with; where these do not decide, on four times as many, then
            on sixteen times. The last are the same for every seed, and so is what they say of a model at the edge of
            a limit.
    Raises:
        ValueError: If there is no task, there are fewer than 8 prompts or twice the scalars of an algorithm, they do
            not fit the model, or a function gives something else than predictions.
    Source:
        von Oswald et al. 2023, arXiv 2212.07677, and Ahn et al. 2023, arXiv 2306.00297, for the
        descents; Fu et al. 2023, arXiv 2310.17086, for Newton's iteration; the limits are
        calibrated here.
    See also:
        `classify`, `fit_learners`, `intervene_on_steps`, `probe_layers`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> name_algorithm(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128).label
        'gradient_descent'
        >>> from mechinterp.icl.predictors import ridge
        >>> name_algorithm(lambda prompts: ridge(prompts, penalty=0.5), task=TaskConfig(d_x=4)).label
        'ridge_like'
    """
    model = algorithm_source(source, prompts, task)
    limits = limits_for(source, AlgorithmLimits())
    n_scalars = max(len(each.names(model.n_layers)) for each in candidates_of(model.task))
    if isinstance(model.task, PromptsTask):
        n_prompts = len(model.task.prompts)
    require_number(n_prompts, n_scalars)
    for growth in (1,) if isinstance(model.task, PromptsTask) else GROWTH:
        drawn_by = REFERENCE if growth == GROWTH[-1] else seed
        drawn = evaluation_prompts(model.task, n_prompts=growth * n_prompts, seed=drawn_by)
        evidence = _evidence(model, drawn.to(torch.float64), drawn_by, limits)
        if _is_clear(evidence, limits):
            break
    return evidence


def limits_for(source: Source | Learner, limits: AlgorithmLimits) -> AlgorithmLimits:
    """Those of a model, or of a function of prompts: no stream tells more of it, so that as much of a learner as of
    noise in what is left is too much."""
    return replace(limits, rest=min(limits.rest, HALF)) if is_learner(source) else limits


def _is_clear(evidence: AlgorithmEvidence, limits: AlgorithmLimits) -> bool:
    """Whether nearly all resamples have one label, and other limits would give it, too.

    A few prompts can carry the mean by which a model is useless, so that this is never clear from the first ones.
    """
    if does_nothing(evidence.measured):
        return False
    moved = {decide(evidence.measured, limits.moved(by)).label for by in (-MARGIN, MARGIN)}
    return bool(evidence.frequency[0] >= CLEAR) and moved == {evidence.label}


def labelled(
    measured: Measured, limits: AlgorithmLimits
) -> tuple[Decision, tuple[str, ...], Float[np.ndarray, " resampled"]]:
    """The label that the numbers earn under some limits, and those of resamples with their shares."""
    decision = decide(measured, limits)
    n = measured.function.size.shape[1]
    generator, even = np.random.default_rng(0), np.full(n, 1 / n)
    labels = [
        decide(measured, limits, generator.multinomial(n, even).astype(float)).label
        for _ in range(RESAMPLES)
    ]
    counts = {label: labels.count(label) / RESAMPLES for label in dict.fromkeys(labels)}
    names = tuple(sorted(counts, key=lambda label: -counts[label]))
    frequency = np.array([counts[name] for name in names])
    if counts.get(decision.label, 0.0) < limits.frequency:
        candidates = tuple(name for name in names if name != UNDETERMINED)
        undecided = (UNDETERMINED, decision.function, UNDETERMINED, candidates, "frequency")
        value, limit = float(frequency[0]), limits.frequency
        decision = Decision(*undecided, value=value, limit=limit, member=decision.member)
    return decision, names, frequency


def _evidence(
    model: AlgorithmSource, prompts: Prompts, seed: int, limits: AlgorithmLimits
) -> AlgorithmEvidence:
    own = setting_of(prompts, model.predicted(prompts))
    settings = {"own length": own}
    settings |= other_settings(model.predicted, own.prompts, model.task, seed)
    answered = np.array([own.useful and setting.useful for setting in settings.values()])
    measured = _measured(model, settings, answered, seed, limits)
    decision, labels, frequency = labelled(measured, limits)
    broken = {test for test, _ in broken_by(measured, limits).values()}
    return AlgorithmEvidence(
        label=decision.label,
        function=decision.function,
        mechanism=decision.mechanism,
        reason=reason_of(measured, decision, labels, frequency),
        why=decision.why,
        candidates=decision.candidates,
        resampled=labels,
        frequency=frequency,
        measured=measured,
        test_answer=tuple(
            "not answered" if np.isnan(test.size).any() else "no" if name in broken else "yes"
            for name, test in measured.tests.items()
        ),
        context_length=np.array([s.prompts.x.shape[1] for s in settings.values()]),
        relative_risk=np.array([s.relative_risk for s in settings.values()]),
        answered=answered,
        n_layers=model.n_layers,
        n_prompts=len(prompts),
        left_out=LEFT_OUT if no_law(model.task) else "",
    )


def _measured(
    model: AlgorithmSource,
    settings: dict[str, Setting],
    answered: Bool[np.ndarray, " setting"],
    seed: int,
    limits: AlgorithmLimits,
) -> Measured:
    """The numbers, without a label."""
    own, members = settings["own length"], candidates_of(model.task)
    null, null_scaled = null_risk(model.predictor, own.prompts, seed)
    last = Room(settings, answered.tolist(), model.task, model.n_layers)
    measured = Measured(
        members=members,
        relative_risk=own.relative_risk,
        null_risk=null,
        scale=_scale(own, model.task, null_scaled),
        tests=identity_tests(model.predicted, own, model.task, seed),
        function=last.unasked(members),
        path=None,
        path_how="not asked",
    )
    if does_nothing(measured):
        return measured
    path = path_of(model, own, seed)
    steps = None if path.read is None else replace(last, path=path.read)
    limit = limits if model.predictor is not None else None
    walks = None if steps is None else _path_scores(steps, measured, limit)
    function = _function_scores(last, measured, walks, limits)
    measured = replace(measured, function=function, path=walks, path_how=path.how)
    measured = _with_member_tests(model, measured, own, seed)
    measured = _with_claims(model, measured, own, path, seed, limits)
    near = limits.moved(MARGIN).explained
    # Of functions, the last prediction has to be told from other learners too: no stream speaks for it.
    if model.predictor is None:
        function, left = with_leftovers(measured.function, last, model, path, near, seed)
        measured = replace(measured, function=function, left_of_function=left)
    judged = model.predictor is None or bool(reflected(own.prompts[:1], model.task, seed)[0])
    if measured.path is not None and steps is not None and judged:
        walks, left = with_leftovers(measured.path, steps, model, path, near, seed)
        measured = replace(measured, path=walks, left_of_path=left)
    return measured


def _scale(own: Setting, task: TaskConfig, null_risk: Float[np.ndarray, " model"]) -> Scale:
    target = own.prompts.y_query_clean
    risk, factor, sem = scaled_risk(own.known, target)
    best = relative_risk(ridge(own.prompts, penalty=task.posterior_penalty), target)
    return Scale(factor=factor, factor_sem=sem, risk=risk, ridge=best, null_risk=null_risk)


def _controls(measured: Measured) -> tuple[Algorithm, ...]:
    """Those of all pairs; where the order of the pairs matters at all, online learners too."""
    return (*CONTROLS, *ONLINE) if broken_share(measured.tests[ORDER]) > ROUNDING else CONTROLS


def _path_scores(room: Room, measured: Measured, limits: AlgorithmLimits | None) -> Scores:
    """Members that predict after every layer; and controls, with limits only if a member may be near enough for a label."""
    scores = room.scores([member for member in measured.members if member.has_path])
    if limits is not None and not _may_explain(scores, room.n_own, limits).any():
        return scores
    controls = [control for control in _controls(measured) if control.has_path]
    free = free_preconditioner(room, measured.members[0])
    return scores.joined(room.scores(controls if free is None else [*controls, free]))


def _may_explain(scores: Scores, n_own: int, limits: AlgorithmLimits) -> Bool[np.ndarray, " row"]:
    """Whether a row explains enough of the model at its own length, be it of resampled prompts or under limits moved."""
    r2, sem = scores.r2()[:, :n_own], scores.r2_sem()[:, :n_own]
    moved = limits.moved(MARGIN).explained
    return np.all((r2 >= moved) | (r2 + SPREAD * sem >= limits.explained), axis=1)


def _function_scores(
    room: Room, measured: Measured, walks: Scores | None, limits: AlgorithmLimits
) -> Scores:
    """Members; and controls where there is no path, no member explains the model, or a learner without a path may."""
    starts = {}
    if walks is not None:
        starts = dict(zip(walks.names, walks.scalars, strict=True))
    scores = room.scores(measured.members, starts=starts, n_starts=2)
    pathless = [not member.has_path for member in measured.members]
    far = not (scores.r2()[:, OWN] >= limits.explained).any()
    if walks is None or far or _may_explain(scores, room.n_own, limits)[pathless].any():
        controls = list(_controls(measured))
        if walks is None:
            controls += [at_depth(each, depth) for each in OF_ANY_DEPTH for depth in DEPTHS]
        scores = scores.joined(room.scores(controls, starts=starts))
    return scores


def _with_member_tests(
    model: AlgorithmSource, measured: Measured, own: Setting, seed: int
) -> Measured:
    """With the identities of members that come near and are not linear, or not the same for rotated x."""
    tests = {}
    for row, member in enumerate(measured.members):
        if measured.function.r2()[row, OWN] < LOOSE or (member.linear_in_y and member.equivariant):
            continue
        path = partial(model.predictions_of, member, measured.function.scalars[row])
        predict = partial(_last, path)
        setting = Setting(own.prompts, predict(own.prompts))
        tests[str(member.label)] = identity_tests(predict, setting, model.task, seed)
    return replace(measured, member_tests=tests)


def _last(path: Predict, prompts: Prompts) -> Tensor:
    return path(prompts)[-1]


def _with_claims(
    model: AlgorithmSource,
    measured: Measured,
    own: Setting,
    path: Path,
    seed: int,
    limits: AlgorithmLimits,
) -> Measured:
    """With what the stream bears out of members that change x and come near to the path."""
    if measured.path is None:
        return measured
    held, replaced = {}, {}
    near = _may_explain(measured.path, model.n_layers, limits)
    for member in measured.members:
        label = str(member.label)
        if member.covariates is None or not near[measured.path.names.index(label)]:
            continue
        scalars = measured.path.scalars[measured.path.names.index(label)]
        held[label], replaced[label] = claims_r2(model, member, scalars, own, path, seed)
    return replace(measured, covariates_r2=held, replaced_r2=replaced)
