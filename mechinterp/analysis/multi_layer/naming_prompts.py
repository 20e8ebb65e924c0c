"""Model or function whose algorithm is to be named, and the prompts on which it runs.

Even prompts of the model's own length are for fits, odd ones for scores. Other lengths, a wide spread of x, other noise and
other drift are for scores alone. The thousandth of the prompts on which the model errs most is left out.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.multi_layer.directions import law_of
from mechinterp.analysis.stats import ratio_and_sem, without_worst
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.given import no_law
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts, generator_for
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.n_prompts import require_few_numbers
from mechinterp.models.run.predictor import (
    Learner,
    Source,
    after_layers,
    is_learner,
    output_of,
    predictor_of,
)
from mechinterp.models.run.ways import Predictor

USELESS = 0.95
"""From this excess risk on, relative to that of predicting 0, a model does not do its task."""
LAST_PREDICTION = "last prediction"
OTHER_DRIFT = "other drift"
NOISES = {"less noise": 0.01, "more noise": 10.0, "much noise": 100.0}
"""Factors on the noise variance of the law, by setting: a learner that estimates the noise changes with it. Trained
models leave their algorithm with more noise than in training, so that they are tested with less noise only."""
NO_NOISE = 0.01
"""Noise variance that is varied if the law has none, relative to the variance of x·beta."""
CONDITION = 30.0
"""Largest over smallest eigenvalue of the covariance with a wide spread."""
DRIFT = 0.9
"""Drift of the prompts on which algorithms along the pairs are tested, if the task does not drift."""
FITTED_PROMPTS = slice(None, None, 2)
"""Prompts of the model's own length that learners are fitted to: the even ones."""
SCORED_PROMPTS = slice(1, None, 2)
"""Prompts of the model's own length that scores are taken on: the odd ones."""
FIT_PROMPTS = 256
"""Largest number of prompts of a fit."""
VARIED = 18
"""Step of the random stream from which prompts of several noise levels are drawn."""
DRIFTING = 19
"""Step of the random stream from which prompts with another drift are drawn."""
DEPTH = 4
"""Number of layers of the algorithms that are fitted to a function without a path."""
Predict = Callable[[Prompts], Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """Model or function of prompts whose algorithm is to be named."""

    source: Predictor | Learner
    task: TaskConfig
    n_layers: int
    has_path: bool = False
    """True for a function that gives a prediction after every layer."""

    @classmethod
    def of(cls, source: Source | Learner, task: TaskConfig) -> "Subject":
        """The subject of a source.

        Raises:
            ValueError: If a function gives something else than predictions.
        """
        if not is_learner(source):
            predictor = predictor_of(cast("Source", source))
            return cls(predictor, task, predictor.n_layers)
        function, few = cast("Learner", source), evaluation_prompts(task, n_prompts=8)[:2]
        path = cls(function, task, DEPTH).outputs(few)
        has_path = np.ndim(output_of(function, few)) == 3
        return cls(function, task, len(path) if has_path else DEPTH, has_path)

    @property
    def is_function(self) -> bool:
        return not isinstance(self.source, Predictor)

    def predict(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """Last prediction, in float64."""
        return self.outputs(prompts)[-1]

    def outputs(self, prompts: Prompts) -> Float[Tensor, "layer batch d_y"]:
        """Predictions of a function after every layer that it gives; of a model the last prediction."""
        with torch.no_grad():
            if isinstance(self.source, Predictor):
                return self.source.predict(prompts).detach().cpu().double()[None]
            return after_layers(self.source, prompts).detach().cpu().double()


@dataclass(frozen=True, eq=False)
class NamingSetting:
    """Prompts and the model's predictions for them, without the thousandth of the prompts with the largest errors."""

    prompts: Prompts
    predictions: Float[Tensor, "prompt d_y"]
    scale: float = 1.0
    """Number of pairs, relative to the model's own length."""

    @classmethod
    def of(cls, prompts: Prompts, predictions: Tensor, scale: float = 1.0) -> "NamingSetting":
        stay = torch.from_numpy(np.flatnonzero(kept(predictions, prompts.y_query_clean)))
        return cls(prompts[stay], predictions[stay], scale)

    @property
    def relative_risk(self) -> float:
        """Excess risk of the model over that of predicting 0."""
        return relative_risk(self.predictions, self.prompts.y_query_clean)

    @property
    def relative_risk_sem(self) -> float:
        """Standard error of `relative_risk` over prompts."""
        target = self.prompts.y_query_clean
        return float(ratio_and_sem(squares(self.predictions - target), squares(target))[1])

    @property
    def useful(self) -> bool:
        """True if the model does its task."""
        return self.relative_risk < USELESS


def kept(predictions: Tensor, target: Tensor) -> Bool[np.ndarray, " prompt"]:
    """False for the thousandth of the prompts with the largest errors."""
    return without_worst((predictions - target).square().mean(1).numpy())


def relative_risk(predictions: Tensor, target: Tensor) -> float:
    """Mean squared difference from the target over that of predicting 0."""
    return ((predictions - target).square().mean() / target.square().mean()).item()


def squares(difference: Float[Tensor, "*axes prompt d_y"]) -> np.ndarray:
    """Mean squares over responses; numbers that are not finite become large ones."""
    return difference.square().mean(-1).nan_to_num(nan=torch.inf).clamp(max=1e12).numpy()


def isotropic(task: TaskConfig) -> bool:
    """True if the covariance of x is a multiple of the identity."""
    Sigma = covariance_matrix(task.covariance, task.d_x)
    return bool((Sigma == Sigma[0, 0] * np.eye(task.d_x)).all())


def candidates_of(task: TaskConfig) -> tuple[Algorithm, ...]:
    """Algorithms with a label. Preconditioned descent is descent if x is isotropic, and needs correlated x; the
    posterior mean needs a pool."""
    out = {"preconditioned_descent"} if isotropic(task) else set()
    out |= {"posterior_mean"} if task.n_tasks is None else set()
    return tuple(each for each in ALGORITHMS if each.label not in out)


def drawn_at(task: TaskConfig, n_prompts: int, length: int, *, seed: int, step: int) -> Prompts:
    """Prompts of a step of the random stream of evaluation."""
    require_few_numbers(task, n_prompts, length)
    generator, double = generator_for(seed, "eval", step), torch.float64
    return draw_prompts(task, n_prompts, generator=generator, context_length=length, dtype=double)


def other_settings(subject: Subject, own: NamingSetting, seed: int) -> dict[str, NamingSetting]:
    """Settings of half and twice the length, with a wide spread of x, and with less and more noise, that the model takes,
    on half as many prompts.

    Given prompts without a law can only be shortened.
    """
    predict, task = subject.predict, subject.task
    n, half = own.prompts.x.shape[1], len(own.prompts) // 2
    drawn = half + half // 999  # the worst thousandth is left out
    if no_law(task):
        short = own.prompts[:drawn].shortened(max(1, n // 2))
        return {"half length": NamingSetting.of(short, predict(short), short.x.shape[1] / n)}
    law = law_of(task)
    laws = {"half length": (law, max(1, n // 2)), "double length": (law, 2 * n)}
    if task.d_x > 1:
        values = np.geomspace(1, CONDITION, task.d_x)
        spread = tuple((values / values.mean()).tolist())
        wide = CovarianceConfig(kind="eigenvalues", eigenvalues=spread)
        laws["wide spread"] = (replace(law, covariance=wide), n)
    noise_var = law.noise_variance or NO_NOISE * law.signal_var
    for name in NOISES if subject.is_function else ("less noise",):
        laws[name] = (replace(law, noise_var=NOISES[name] * noise_var), n)
    settings = {}
    for step, (name, (each, length)) in enumerate(laws.items(), start=1):
        prompts = drawn_at(each, drawn, length, seed=seed, step=step)
        with suppress(ValueError):  # the model may have no room for such prompts
            settings[name] = NamingSetting.of(prompts, predict(prompts), length / n)
    return settings


def other_drift(subject: Subject, own: NamingSetting, seed: int) -> dict[str, NamingSetting]:
    """Prompts of the task with a drift, where forgetting shows; of a fixed task if the task drifts itself.

    None of them for prompts without a law, and for a law that has no drift.
    """
    if no_law(subject.task):
        return {}
    law, n_pairs = law_of(subject.task), own.prompts.x.shape[1]
    half = len(own.prompts) // 2
    try:
        other = replace(law, drift=DRIFT if law.drift == 1 else 1.0)
    except (
        ValueError
    ):  # a pool, a sparsity, supports, one task vector for all responses, several noise levels
        return {}
    prompts = drawn_at(other, half + half // 999, n_pairs, seed=seed, step=DRIFTING)
    setting = NamingSetting.of(prompts, subject.predict(prompts))
    return {OTHER_DRIFT: setting} if setting.useful else {}


def varied_noise(subject: Subject, own: NamingSetting, seed: int) -> NamingSetting | None:
    """Prompts of the task's noise level and of those of `NOISES`, equally many of each; None for prompts without a law, for a law
    of several levels, and for one that can have no other.
    """
    if no_law(subject.task) or len(subject.task.noise_levels) > 1:
        return None
    law = law_of(subject.task)
    variance = law.noise_variance or NO_NOISE * law.signal_var
    factors = (1.0, *NOISES.values())
    levels = tuple((factor * variance, 1 / len(factors)) for factor in factors)
    try:
        other = replace(law, noise_var=levels)
    except ValueError:  # a pool or a drift
        return None
    prompts = drawn_at(other, FIT_PROMPTS, own.prompts.x.shape[1], seed=seed, step=VARIED)
    return NamingSetting.of(prompts, subject.predict(prompts))
