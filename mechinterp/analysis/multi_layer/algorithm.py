"""Which algorithm the layers of a model carry out, with the evidence.

Each member of `icl.algorithms` with a label is fitted to the model's predictions on one half of the
prompts and scored on the other half: at half, once and twice the length of the context, for a
covariance with a wide spread, and after every layer. Before that come two questions that no scalar
can change: is the prediction linear in the responses, and does a rotation of x leave it as it is?
"""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float

from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_labels import (
    LARGER,
    SMALLER,
    AlgorithmLimits,
    answer,
    verdict,
)
from mechinterp.analysis.multi_layer.algorithm_paths import Path, mixture_gain, path_of
from mechinterp.analysis.multi_layer.algorithm_scores import candidates_of, scores_of
from mechinterp.analysis.multi_layer.algorithm_tests import (
    Setting,
    identity_tests,
    predicted,
    relative_risk,
    settings_of,
)
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Predictor, Source, predictor_of
from mechinterp.models.run.task import task_for

MOMENTUM = next(algorithm for algorithm in ALGORITHMS if algorithm.name == "momentum")
LEAST_PROMPTS = 8
N_RANDOM = 19
"""Models with weights in random order; one that none of them reaches has a p-value of .05."""
NULL_PROMPTS = 64
LOOSE = AlgorithmLimits(explained=0.95, path=0.95)
"""Limits under which a member may get the label, so that it is held against mixtures."""


def name_algorithm(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskConfig | None = None,
    n_prompts: int = 256,
    seed: int = 0,
    limits: AlgorithmLimits | None = None,
) -> AlgorithmEvidence:
    """The algorithm that the layers of a model carry out.

    A setting in which the model's excess risk comes near to that of predicting 0, or in which no
    member has an R^2 of .5, is not answered: the model may have left what it was trained for.

    Args:
        prompts: Of the model's own length; None: `n_prompts` of its task. All others are drawn
            from the task, by `seed`.
        task: Law of the prompts; None: the model's own.
    Raises:
        ValueError: If there is no task, there are fewer than 8 prompts, or they do not fit the model.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> name_algorithm(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128).label
        'gradient_descent'
    """
    predictor = predictor_of(source)
    task = task_for(predictor, task, "name_algorithm")
    n_prompts = n_prompts if prompts is None else len(prompts)
    if n_prompts < LEAST_PROMPTS:
        raise ValueError(f"name_algorithm needs >= {LEAST_PROMPTS} prompts, got {n_prompts}.")
    prompts = evaluation_prompts(task, prompts, n_prompts=n_prompts, seed=seed)
    found = _measured(predictor, prompts.to(torch.float64), task, seed)
    return labelled(found, AlgorithmLimits() if limits is None else limits)


def labelled(found: AlgorithmEvidence, limits: AlgorithmLimits) -> AlgorithmEvidence:
    """The same evidence with the answers and the label that it earns under some limits."""
    label, candidates, reason = verdict(found, limits)
    return replace(
        found,
        label=label,
        candidates=candidates,
        reason=reason,
        test_answer=tuple(answer(r2, limits) for r2 in found.test_r2),
    )


def _measured(
    predictor: Predictor, prompts: Prompts, task: TaskConfig, seed: int
) -> AlgorithmEvidence:
    """The numbers, without a label."""
    settings = settings_of(predictor, prompts, task, seed)
    members, n_layers = candidates_of(task), predictor.n_layers
    tests = identity_tests(predictor, prompts, task, seed)
    scores = scores_of(members, settings, task, n_layers)
    path = path_of(members, predictor, settings["own length"], task)
    found = AlgorithmEvidence(
        label="",
        reason="",
        candidates=(),
        members=tuple(str(member.label) for member in members),
        linear_in_y=np.array([member.linear_in_y for member in members]),
        equivariant=np.array([member.equivariant for member in members]),
        has_path=np.array([member.has_path for member in members]),
        n_scalars=np.array([len(member.names(n_layers)) for member in members]),
        scalars=scores.scalars,
        path_scalars=path.scores.scalars,
        settings=tuple(settings),
        context_length=np.array([s.prompts.x.shape[1] for s in settings.values()]),
        answered=scores.answered,
        relative_risk=np.array([s.relative_risk for s in settings.values()]),
        null_risk=_null_risk(predictor, prompts[:NULL_PROMPTS], seed),
        r2=scores.r2,
        r2_sem=scores.r2_sem,
        difference=scores.difference,
        difference_sem=scores.difference_sem,
        path_answered=path.answered,
        path_r2=path.scores.r2,
        path_r2_sem=path.scores.r2_sem,
        path_difference=path.scores.difference,
        path_difference_sem=path.scores.difference_sem,
        readout_r2=path.readout_r2,
        others=(*(str(member.label) for member in members), MOMENTUM.name),
        mixture_gain=np.full((len(members), len(members) + 1), np.nan),
        tests=tuple(tests),
        test_answer=(),
        test_r2=np.array([test.r2 for test in tests.values()]),
        test_r2_sem=np.array([test.r2_sem for test in tests.values()]),
        n_prompts=len(prompts),
    )
    gains = _mixture_gains(found, predictor, settings["own length"], path, task)
    return replace(found, mixture_gain=gains)


def _null_risk(predictor: Predictor, prompts: Prompts, seed: int) -> Float[np.ndarray, " model"]:
    """Relative risks of models with the entries of each tensor in random order; none of a model
    whose weights are not known. Tensors go by name, since files have them in orders of their own."""
    weights = predictor.weights
    if weights is None:
        return np.empty(0)
    generator, found = generator_for(seed, "init", 1), []
    for _ in range(N_RANDOM):
        shuffled = {
            name: tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(
                tensor.shape
            )
            for name, tensor in sorted(weights.tensors.items())
        }
        random = predictor_of(replace(weights, tensors=shuffled))
        found.append(relative_risk(predicted(random, prompts), prompts.y_query_clean))
    return np.nan_to_num(np.array(found), nan=np.inf)


def _mixture_gains(
    found: AlgorithmEvidence, predictor: Predictor, own: Setting, path: Path, task: TaskConfig
) -> Float[np.ndarray, "member other"]:
    """Of the members that a label may fall on, each with members that do not contain it, and with
    momentum."""
    members, n_layers = candidates_of(task), predictor.n_layers
    moments = (PromptMoments(own.prompts[::2], task), PromptMoments(own.prompts[1::2], task))
    others = (*members, MOMENTUM)
    gains = np.full((len(members), len(others)), np.nan)
    chosen = {label for limits in (LOOSE, AlgorithmLimits()) for label in verdict(found, limits)[1]}
    for m, member in enumerate(members):
        walks = member.has_path and path.read is not None
        if member.label not in chosen or (member.has_path and not walks):
            continue
        target = path.read if walks and path.read is not None else own.known
        ours = found.path_scalars[m] if walks else found.scalars[m]
        for o, other in enumerate(others):
            if o == m or (member.label == SMALLER and other.label in LARGER):
                continue
            theirs = np.array([]) if o == len(members) else found.scalars[o]
            gains[m, o] = mixture_gain(
                member, other, (ours, theirs), target, moments, n_layers=n_layers
            )
    return gains
