"""Algorithms whose read-out has one more factor, and the rest that each leaves of a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.fits import FitScores, FitTrial
from mechinterp.analysis.multi_layer.naming_prompts import NOISES, SCORED_PROMPTS, Predict
from mechinterp.analysis.multi_layer.rests import reflected, rest_of
from mechinterp.icl.algorithm import Algorithm, PromptMoments, Scalar
from mechinterp.icl.algorithm_fits import CLEARLY

FINE = 1e-8
"""A fit of a scaled read-out ends if a step lowers the mean square by less than this fraction."""


def scaled_name(learner: Algorithm) -> str:
    """Name of an algorithm with a scaled read-out."""
    return f"{learner.label or learner.name} with a scaled read-out"


def scaled(learner: Algorithm) -> Algorithm:
    """An algorithm whose predictions are multiplied by one more scalar.

    Example:
        >>> from mechinterp.icl.algorithms import ALGORITHMS
        >>> scaled(ALGORITHMS[0]).name
        'gradient_descent with a scaled read-out'
    """

    def run(moments: PromptMoments, n_layers: int, *scalars: Tensor) -> Tensor:
        return scalars[-1] * learner.run(moments, n_layers, *scalars[:-1])

    factor = Scalar("factor", lambda moments: 1.0, where="once", lower=-torch.inf)
    return Algorithm(
        scaled_name(learner), None, (*learner.scalars, factor), run, has_path=learner.has_path
    )


def for_next_pair(learner: Algorithm, drift: float) -> Algorithm:
    """An algorithm along the pairs that multiplies its estimate by rho: the best estimate of the next task vector is rho
    times that of the last.

    Example:
        >>> from mechinterp.icl.along_pairs import ALONG_PAIRS
        >>> for_next_pair(ALONG_PAIRS[1], 0.9).factor
        0.9
    """

    def run(moments: PromptMoments, n_layers: int, *scalars: Tensor) -> Tensor:
        return drift * learner.run(moments, n_layers, *scalars)

    return replace(learner, run=run, factor=drift)


def read_out_of(
    learner: Algorithm, trial: FitTrial, start: Float[np.ndarray, " _"] | None
) -> Algorithm:
    """The algorithm, or on tasks that drift the one that predicts with the next task vector if it clearly fits better."""
    drift = trial.task.drift
    if drift == 1 or not learner.along_pairs:
        return learner
    other = for_next_pair(learner, drift)
    own_error, other_error = (trial.fit_error(each, start) for each in (learner, other))
    return other if other_error < (1 - CLEARLY) * own_error else learner


@dataclass(frozen=True, eq=False)
class ReflectedPrompts:
    """Predictions of a model on prompts and on their reflections, with the moments that learners need there."""

    columns: tuple[str, ...]
    targets: tuple[Float[Tensor, "column prompt d_y"], ...]
    """Predictions for the prompts, then for each reflection."""
    moments: tuple[PromptMoments, ...]

    def rests(
        self, learner: Algorithm, scalars: list[float], n_layers: int
    ) -> list[Float[Tensor, "column prompt d_y"]]:
        """The model minus the learner, for the prompts and for each reflection."""
        return [
            target - learner.predictions(moments, scalars, n_layers)[-len(self.columns) :]
            for target, moments in zip(self.targets, self.moments, strict=True)
        ]


def reflected_prompts(
    trial: FitTrial, read: Predict, columns: Sequence[str], seed: int
) -> list[ReflectedPrompts]:
    """The prompts of the scores at the own length, and those with other noise."""
    places = []
    for n, (name, setting) in enumerate(trial.settings.items()):
        if n > 0 and name not in NOISES:
            continue
        prompts = setting.prompts if n > 0 else setting.prompts[SCORED_PROMPTS]
        own = trial.target[:, SCORED_PROMPTS] if n == 0 else setting.predictions[None]
        others = reflected(prompts, trial.task, seed)
        seen = own, *(read(each)[-len(own) :] for each in others)
        moments = trial.moments(name), *(PromptMoments(each, trial.task) for each in others)
        places.append(
            ReflectedPrompts(tuple(columns[: trial.n_own]) if n == 0 else (name,), seen, moments)
        )
    return places


def with_scaled(
    scores: FitScores, trial: FitTrial, read: Predict, near: float, seed: int, *, rests: bool
) -> FitScores:
    """Scores with scaled read-outs of the algorithms that are near, and with the rest that each of these leaves.

    Args:
        read: Function of prompts that gives predictions, one for each column at the own length.
        near: Least R² of an algorithm that is near.
        rests: False: the rests are not needed.
    """
    least, found = scores.r2()[:, : trial.n_own].min(1), {}
    rows = [m for m, each in enumerate(scores.learners) if each.label and least[m] >= near]
    places = reflected_prompts(trial, read, scores.columns, seed) if rows and rests else []
    for m in rows:
        learner = scaled(scores.learners[m])
        start = np.append(scores.scalars[m], 1.0)
        fit = trial.scores([learner], {learner.name: start}, tolerance=FINE)
        if places:
            values, size = fit.scalars[0].tolist(), fit.size[trial.n_own - 1]
            parts = [each.rests(learner, values, trial.n_layers) for each in places]
            own, *changed = (torch.cat(part) for part in zip(*parts, strict=True))
            columns = tuple(name for each in places for name in each.columns)
            label = str(scores.learners[m].label)
            found[label] = rest_of(own, changed, size, 1 / trial.task.d_x, columns)
        scores = scores.joined(fit)
    return replace(scores, rests=found)
