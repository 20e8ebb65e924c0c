"""Algorithms whose read-out has one more factor, and the rest that each leaves of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.fits import FitScores, FitTrial
from mechinterp.analysis.multi_layer.naming_prompts import NOISES, SCORED_PROMPTS, Predict
from mechinterp.analysis.multi_layer.rests import REST_ROUNDING, reflected, rest_of
from mechinterp.icl.algorithm import Algorithm, PromptMoments, Scalar, fixed
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

    factor = Scalar("factor", fixed(1.0), where="once", lower=-torch.inf)
    return Algorithm(
        scaled_name(learner),
        None,
        (*learner.scalars, factor),
        partial(_times_last, learner.run),
        has_path=learner.has_path,
    )


def times(learner: Algorithm, factor: float) -> Algorithm:
    """An algorithm whose predictions are multiplied by a fixed factor.

    On tasks that drift the best estimate of the next task vector is rho times that of the last.

    Example:
        >>> from mechinterp.icl.along_pairs import ALONG_PAIRS
        >>> times(ALONG_PAIRS[1], 0.9).factor
        0.9
    """

    return replace(learner, run=partial(_times, factor, learner.run), factor=factor)


def _times_last(
    run: Callable[..., Tensor], moments: PromptMoments, n_layers: int, *scalars: Tensor
) -> Tensor:
    return scalars[-1] * run(moments, n_layers, *scalars[:-1])


def _times(
    factor: float,
    run: Callable[..., Tensor],
    moments: PromptMoments,
    n_layers: int,
    *scalars: Tensor,
) -> Tensor:
    return factor * run(moments, n_layers, *scalars)


def read_out_of(
    learner: Algorithm,
    trial: FitTrial,
    start: Float[np.ndarray, " _"] | None,
    *,
    most: float,
    share: float,
) -> Algorithm:
    """An algorithm along the pairs with the factor of its read-out; other algorithms as they are.

    The factor is 1, or rho on tasks that drift if that clearly fits better. Near these it is fitted, so that the scalars
    need not make up for it.

    Args:
        most: Largest distance of the fitted factor from 1 or rho, relative to it.
        share: Fraction of the rest that the fitted factor must explain.
    """
    if not learner.along_pairs:
        return learner
    scalars, error = trial.fit_and_error(learner, start)
    chosen, drift = learner, trial.task.drift
    if drift != 1:
        other = times(learner, drift)
        other_scalars, other_error = trial.fit_and_error(other, start)
        if other_error < (1 - CLEARLY) * error:
            chosen, scalars, error = other, other_scalars, other_error
    if error <= REST_ROUNDING * float(trial.target[-1].square().mean()):
        return chosen
    free, free_error = trial.fit_and_error(scaled(chosen), np.append(scalars, 1.0))
    factor = float(free[-1])
    if abs(factor - 1) > most or free_error > (1 - share) * error:
        return chosen
    return times(learner, chosen.factor * factor)


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
