"""Numbers behind the name of an algorithm: fits to the predictions of a model, scores, symmetries, and interventions.

Learners are scored on prompts that nothing was fitted to.
Even prompts of the model's own length are for fits, odd ones for scores. Other lengths and a wide spread of x are for
scores alone. The thousandth of the prompts on which the model errs most is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.analysis.multi_layer.directions import Progress, law_of
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.stats import r2_and_sem, ratio_and_sem, without_worst
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import (
    Algorithm,
    PromptMoments,
    Scalar,
    fit_algorithm,
    scalar_errors,
)
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import no_law
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts, generator_for
from mechinterp.models.hooked.masks import Hooks
from mechinterp.models.hooked.runner import HookedPredictor, NoStreamError, query_positions
from mechinterp.models.run.evaluation import evaluation_prompts, require_few_numbers
from mechinterp.models.run.predictor import Learner, Predictor, Source, is_learner, predictor_of

USELESS = 0.95
"""From this excess risk on, relative to that of predicting 0, a model does not do its task."""
LOOSE = 0.95
"""Algorithms of this R² at the model's own length are near: they are scored in other settings, too."""
CONDITION = 30.0
"""Largest over smallest eigenvalue of the covariance with a wide spread."""
NOISES = {"less noise": 0.01, "more noise": 10.0, "much noise": 100.0}
"""Factors on the noise variance of the law, by setting: a learner that estimates the noise changes with it. Trained
models leave their algorithm with more noise than in training, so that they are asked with less noise alone."""
NO_NOISE = 0.01
"""Noise variance that is varied if the law has none, relative to the variance of x·beta."""
ELSEWHERE = 1e-4
"""A rest below this fraction of the model's mean square counts as an inexact fit in settings that nothing was fitted to."""
FIT_PROMPTS = 256
"""Largest number of prompts of a fit."""
COARSE, FINE = 1e-4, 1e-8
"""A fit ends if a step lowers the mean square by less than this fraction: of algorithms, and of scaled read-outs."""
ROUNDING = 1e-8
"""A rest below this fraction of the model's mean square is rounding of the model or of the fit."""
MISSED = 0.02
"""Largest fraction of the prediction that a read-out of the last stream may miss."""
PER_FEATURE = 8
"""Prompts for a fitted read-out, per entry of the stream."""
PENALTY = 1e-9
"""Ridge penalty of a fitted read-out, relative to the mean square of an entry of the stream."""
VARIED = 18
"""Step of the random stream from which prompts of several noise levels are drawn."""
DRIFTING = 19
"""Step of the random stream from which prompts with another drift are drawn."""
READING = 20
"""Step of the random stream from which the prompts of a read-out are drawn."""
STEP_PROMPTS = 512
"""Largest number of prompts on which steps are put into the stream."""
ROOT = 0.5**0.5
"""Factor that keeps the variance of a sum of two independent values."""
DEPTH = 4
"""Number of layers of the algorithms that are fitted to a function without a path."""
LAST = "last prediction"
ORDER = "same if the pairs change places"
TIMES = "linear in y: times"
ADAPTIVE = "adaptive_ridge"
"""Label whose noise levels show on prompts of several levels only."""
OTHER_DRIFT = "other drift"
DRIFT = 0.9
"""Drift of the prompts that algorithms along the pairs are asked on; 1 if the task drifts itself."""
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
        has_path = function(few).ndim == 3
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
            return _checked(self.source(prompts), prompts)


def _checked(predictions: object, prompts: Prompts) -> Float[Tensor, "layer batch d_y"]:
    """Predictions of a function, with an axis for layers.

    Raises:
        ValueError: If they have another shape than [batch, d_y] or [layer, batch, d_y].
    """
    shape, got = tuple(prompts.y_query.shape), type(predictions)
    if isinstance(predictions, Tensor):
        path = predictions.detach().cpu().double()
        if path.shape[-2:] == shape and path.ndim in (2, 3):
            return path[None] if path.ndim == 2 else path
        got = list(path.shape)  # type: ignore[assignment]
    raise ValueError(
        f"A function of prompts must give predictions {list(shape)} or [layer, {shape[0]}, {shape[1]}], got {got}."
    )


@dataclass(frozen=True, eq=False)
class Setting:
    """Prompts and the model's predictions for them, without the thousandth of the prompts with the largest errors."""

    prompts: Prompts
    predictions: Float[Tensor, "prompt d_y"]
    scale: float = 1.0
    """Number of pairs, relative to the model's own length."""

    @classmethod
    def of(cls, prompts: Prompts, predictions: Tensor, scale: float = 1.0) -> "Setting":
        stay = torch.from_numpy(np.flatnonzero(_stay(predictions, prompts.y_query_clean)))
        return cls(prompts[stay], predictions[stay], scale)

    @property
    def relative_risk(self) -> float:
        """Excess risk of the model over that of predicting 0."""
        return relative_risk(self.predictions, self.prompts.y_query_clean)

    @property
    def useful(self) -> bool:
        """True if the model does its task."""
        return self.relative_risk < USELESS


def _stay(predictions: Tensor, target: Tensor) -> Bool[np.ndarray, " prompt"]:
    return without_worst((predictions - target).square().mean(1).numpy())


def relative_risk(predictions: Tensor, target: Tensor) -> float:
    """Mean squared difference from the target over that of predicting 0."""
    return ((predictions - target).square().mean() / target.square().mean()).item()


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


def _drawn(task: TaskConfig, n_prompts: int, length: int, *, seed: int, step: int) -> Prompts:
    """Prompts of a step of the random stream of evaluation."""
    require_few_numbers(task, n_prompts, length)
    generator, double = generator_for(seed, "eval", step), torch.float64
    return draw_prompts(task, n_prompts, generator=generator, context_length=length, dtype=double)


def other_settings(subject: Subject, own: Setting, seed: int) -> dict[str, Setting]:
    """Settings of half and twice the length, with a wide spread of x, and with less and more noise, that the model takes,
    on half as many prompts.

    Given prompts without a law can only be shortened.
    """
    predict, task = subject.predict, subject.task
    n, half = own.prompts.x.shape[1], len(own.prompts) // 2
    drawn = half + half // 999  # the worst thousandth is left out
    if no_law(task):
        short = own.prompts[:drawn].shortened(max(1, n // 2))
        return {"half length": Setting.of(short, predict(short), short.x.shape[1] / n)}
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
        prompts = _drawn(each, drawn, length, seed=seed, step=step)
        with suppress(ValueError):  # the model may have no room for such prompts
            settings[name] = Setting.of(prompts, predict(prompts), length / n)
    return settings


def other_drift(subject: Subject, own: Setting, seed: int) -> dict[str, Setting]:
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
    prompts = _drawn(other, half + half // 999, n_pairs, seed=seed, step=DRIFTING)
    setting = Setting.of(prompts, subject.predict(prompts))
    return {OTHER_DRIFT: setting} if setting.useful else {}


def varied_noise(subject: Subject, own: Setting, seed: int) -> Setting | None:
    """Prompts of the task's noise level and of those of `NOISES`, each as often; None for prompts without a law, for a law
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
    prompts = _drawn(other, FIT_PROMPTS, own.prompts.x.shape[1], seed=seed, step=VARIED)
    return Setting.of(prompts, subject.predict(prompts))


@dataclass(frozen=True, eq=False)
class Identity:
    """Squared differences between the two sides of an identity, per prompt."""

    error: Float[np.ndarray, " prompt"]
    size: Float[np.ndarray, " prompt"]

    def mismatch(self, counts: Float[np.ndarray, " prompt"] | None = None) -> float:
        """Least fraction of the model that breaks the identity: half of the difference, since both sides hold an
        independent part of what changes."""
        counts = np.ones(len(self.size)) if counts is None else counts
        return float((self.error @ counts) / (self.size @ counts) / 2)


def satisfies(learner: Algorithm, identity: str) -> bool:
    """True if an algorithm satisfies an identity; all are linear in x_query."""
    if identity == ORDER:
        return not learner.along_pairs
    if identity.startswith("linear in y"):
        return learner.linear_in_y
    return learner.equivariant if identity == "same if x is rotated" else True


def satisfies_all(learner: Algorithm) -> bool:
    """True if an algorithm satisfies every identity."""
    return learner.linear_in_y and learner.equivariant and not learner.along_pairs


def identities(predict: Predict, own: Setting, task: TaskConfig, seed: int) -> dict[str, Identity]:
    """Identities of predictions, on the prompts of the scores.

    An identity is asked only if the law of the task makes the changed prompts as likely as the given ones, and the model
    does its task on them. The sum of two sparse task vectors is not sparse, and entries of fixed size have no other scale.
    """
    prompts, known = own.prompts[1::2], own.predictions[1::2]
    generator = generator_for(seed, "init", 2)
    order = torch.randperm(prompts.x.shape[1], generator=generator, device="cpu")
    made = {ORDER: (replace(prompts, x=prompts.x[:, order], y=prompts.y[:, order]), known)}
    if not no_law(task):
        beta = prompts.task_vectors_at_every_x("an identity")[:, -1]
        x = prompts.x_query.roll(1, 0)
        changed = {"x_query": x, "y_query_clean": _times(x, beta)}
        made["linear in x_query"] = _added(predict, prompts, known, changed)
        if task.nonzeros != "signs" and task.n_tasks is None:
            for factor in (0.5, 2.0):
                sides = {n: factor * getattr(prompts, n) for n in ("y", "y_query_clean")}
                made[f"{TIMES} {factor:g}"] = replace(prompts, **sides), factor * known
        if task.sparsity is None and task.n_tasks is None:
            other = prompts.with_next_task("an identity")
            changed = {name: getattr(other, name) for name in ("y", "y_query_clean")}
            made["linear in y: sum"] = _added(predict, prompts, known, changed)
            if task.supports is None and isotropic(task):
                made["same if x is rotated"] = _rotated(prompts, seed), known
    tests = {}
    for name, (prompts, expected) in made.items():
        predictions, target = predict(prompts), prompts.y_query_clean
        stay = _stay(predictions, target)
        if relative_risk(predictions[stay], target[stay]) < USELESS:
            both = (predictions - expected, expected)
            tests[name] = Identity(*(np.where(stay, squares(side), 0.0) for side in both))
    return tests


def _added(
    predict: Predict, prompts: Prompts, known: Tensor, changed: Mapping[str, Tensor]
) -> tuple[Prompts, Tensor]:
    """Prompts whose fields are the sums, over root 2, of the given and the changed ones; and the sums of both predictions."""
    sums = {name: ROOT * (getattr(prompts, name) + value) for name, value in changed.items()}
    return replace(prompts, **sums), ROOT * (known + predict(replace(prompts, **changed)))


def _times(x: Float[Tensor, "batch d_x"], matrices: Float[Tensor, "batch d_x n"]) -> Tensor:
    """Product of a vector and a matrix for each prompt, [batch, n]."""
    return (x[:, None] @ matrices)[:, 0]


def _rotated(prompts: Prompts, seed: int) -> Prompts:
    shape, generator = (len(prompts), *2 * prompts.x.shape[2:]), generator_for(seed, "init", 0)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    R = torch.linalg.qr(noise).Q
    return replace(prompts, x=prompts.x @ R, x_query=_times(prompts.x_query, R))


def path_of(subject: Subject, own: Setting, seed: int) -> tuple[Predict | None, str]:
    """Function that gives the prediction after each layer, by one linear read-out of the stream for all layers; and the
    read-out in words. None: the prediction after each layer is unknown, and why.
    """
    source, task = subject.source, subject.task
    if not isinstance(source, Predictor):
        if subject.has_path:
            return subject.outputs, "the function"
        return None, "the function gives the last prediction alone"

    def streams(prompts: Prompts) -> Tensor:
        return source.streams(prompts)[1:, :, -1].cpu().double()

    def read_by(read_out: Tensor) -> Predict:
        return lambda prompts: streams(prompts) @ read_out

    try:
        last = streams(own.prompts)[-1]
    except NoStreamError as error:
        return None, str(error).rstrip(".")
    weights = source.weights
    if weights is not None and "unembed.W_U" in weights.tensors:
        W_U = weights.tensors["unembed.W_U"].cpu().double()
        if relative_risk(last @ W_U, own.predictions) <= MISSED:
            return read_by(W_U), "the unembedding"
    needed, prompts = PER_FEATURE * last.shape[1], own.prompts
    if not no_law(task):
        prompts = _drawn(task, needed, prompts.x.shape[1], seed=seed, step=READING)
    if len(prompts) < needed:
        return None, f"a read-out of the stream needs {needed} prompts"
    read_out = _fitted(streams(prompts)[-1], subject.predict(prompts))
    missed = relative_risk(last @ read_out, own.predictions)
    if missed <= MISSED:
        return read_by(read_out), "a fitted read-out"
    return None, f"a linear read-out of the last stream misses {missed:.1%} of the prediction"


def _fitted(
    features: Float[Tensor, "prompt feature"], target: Float[Tensor, "prompt d_y"]
) -> Tensor:
    """Read-out by ridge regression with a small penalty, since entries of a stream may depend on each other."""
    gram = features.mT @ features
    gram.diagonal().add_(PENALTY * gram.diagonal().mean().clamp(min=1e-30))
    return torch.linalg.solve(gram, features.mT @ target)


@dataclass(frozen=True, eq=False)
class FitScores:
    """Squared errors of learners on the prompts of the scores, [row, column, prompt].

    Columns at the model's own length come first: the last prediction, or the prediction after each layer. Further
    columns are other settings.
    """

    learners: tuple[Algorithm, ...]
    scalars: tuple[Float[np.ndarray, " _"], ...]
    columns: tuple[str, ...]
    n_own: int
    """Number of columns at the model's own length."""
    error: Float[np.ndarray, "row column prompt"]
    """NaN if the learner was not scored."""
    size: Float[np.ndarray, "column prompt"]
    """Mean squares of the model's predictions."""
    rests: Mapping[str, "Rest"] = field(default_factory=dict)
    """Part of the model that an algorithm with a scaled read-out leaves unexplained, by label."""
    progress: Mapping[str, Progress] = field(default_factory=dict)
    """Least progress of the model along any direction of the task vector, relative to an algorithm's, by label."""

    @property
    def names(self) -> list[str]:
        return [each.label or each.name for each in self.learners]

    def r2(self, counts: Float[np.ndarray, " prompt"] | None = None) -> np.ndarray:
        """1 - mean (model - learner)^2 / mean model^2, [row, column], with each prompt taken `counts` times."""
        counts = np.ones(self.size.shape[1]) if counts is None else counts
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 - (self.error @ counts) / (self.size @ counts)

    def r2_sem(self) -> Float[np.ndarray, "row column"]:
        """Standard errors of `r2` over the scored prompts, without the fit of the scalars on other prompts."""
        columns = zip(self.error.swapaxes(0, 1), self.size, strict=True)
        return np.stack([ratio_and_sem(each.T, size)[1] for each, size in columns], 1)

    def joined(self, other: "FitScores") -> "FitScores":
        """Rows of both."""
        rows = {n: getattr(self, n) + getattr(other, n) for n in ("learners", "scalars")}
        return replace(self, **rows, error=np.concatenate([self.error, other.error]))

    def table(self) -> pd.DataFrame:
        """Scalars and R² with its standard error in each column, by learner."""
        r2, sem = self.r2(), self.r2_sem()
        table: dict[str, object] = {
            "scalars": [", ".join(map(digits, each)) for each in self.scalars]
        }
        for n, column in enumerate(self.columns):
            key = "r2" if column == LAST else f"{column.replace(' ', '_')}_r2"
            table |= {key: r2[:, n], f"{key}_sem": sem[:, n]}
        return pd.DataFrame(table, index=self.names)


@dataclass(frozen=True, eq=False)
class Trial:
    """Prompts, targets and cached moments for fitting and scoring learners."""

    settings: Mapping[str, Setting]
    """The model's own length first, then other settings in which the model does its task."""
    task: TaskConfig
    n_layers: int
    target: Float[Tensor, "column prompt d_y"]
    """The last prediction, or the prediction after each layer, at the own length."""
    known_moments: dict[object, PromptMoments] = field(default_factory=dict)
    """Cache of `moments`, which trials of one model share."""
    varied: Setting | None = None
    """Prompts of several noise levels, on which adaptive ridge is fitted; None: on those of the own length."""

    @property
    def own(self) -> Setting:
        return next(iter(self.settings.values()))

    @property
    def n_own(self) -> int:
        return len(self.target)

    def moments(self, name: str, scale: float = 1.0) -> PromptMoments:
        """Moments of the prompts of a setting that are scored; "fit": those that are fitted to."""
        if (name, scale) not in self.known_moments:
            fit, own = name == "fit", self.settings.get(name) is self.own
            prompts = self.own.prompts[::2][:FIT_PROMPTS] if fit else self.settings[name].prompts
            prompts = prompts[1::2] if own else prompts
            moments = (
                PromptMoments(prompts, self.task) if scale == 1 else self.moments(name).times(scale)
            )
            self.known_moments[name, scale] = moments
        return self.known_moments[name, scale]

    def scores(
        self,
        learners: Sequence[Algorithm],
        starts: Mapping[str, Float[np.ndarray, " _"]] | None = None,
        *,
        n_starts: int = 1,
        tolerance: float = COARSE,
    ) -> FitScores:
        """Scores of learners fitted here; in other settings of those that are near.

        Args:
            starts: First scalars of the search, by label or name.
        """
        first, *others = self.settings
        layers = [f"layer {n}" for n in range(self.n_own)] if self.n_own > 1 else [LAST]
        sizes = [squares(self.own.predictions[1::2])] * self.n_own
        sizes += [squares(self.settings[name].predictions) for name in others]
        error = np.full((len(learners), len(sizes), len(sizes[0])), np.nan)
        scalars = []
        for row, learner in enumerate(learners):
            start = (starts or {}).get(learner.label or learner.name)
            values = self._fitted(learner, start, n_starts, tolerance)
            path = learner.predictions(self.moments(first), values.tolist(), self.n_layers)
            own = error[row, : self.n_own] = squares(path[-self.n_own :] - self.target[:, 1::2])
            if others and 1 - own.sum(1).max() / sizes[0].sum() >= LOOSE:
                error[row, self.n_own :] = self._elsewhere(learner, values, others)
            scalars.append(values)
        columns = (*layers, *others)
        return FitScores(
            tuple(learners), tuple(scalars), columns, self.n_own, error, np.array(sizes)
        )

    def _fitted(
        self, learner: Algorithm, start: np.ndarray | None, n_starts: int, tolerance: float
    ) -> Float[np.ndarray, " _"]:
        """Scalars of a learner, fitted to the target on the prompts of the fits."""
        moments, wanted = self._fit_to(learner)
        return fit_algorithm(
            learner,
            moments,
            wanted,
            n_layers=self.n_layers,
            n_starts=n_starts if start is None else 1,
            start=None if start is None else torch.from_numpy(start),
            tolerance=tolerance,
        ).scalars

    def _fit_to(self, learner: Algorithm) -> tuple[PromptMoments, Tensor]:
        """Moments of the prompts of the fit of a learner, and the predictions that are fitted there."""
        if learner.label == ADAPTIVE and self.varied is not None:
            return PromptMoments(self.varied.prompts, self.task), self.varied.predictions
        wanted = self.target[:, ::2][:, :FIT_PROMPTS]
        return self.moments("fit"), wanted if self.n_own > 1 else wanted[0]

    def scalar_sems(
        self, learner: Algorithm, scalars: Float[np.ndarray, " _"]
    ) -> Float[np.ndarray, " _"]:
        """Standard errors of the fitted scalars of a learner without steps, over the prompts of the fit."""
        moments, wanted = self._fit_to(learner)
        return scalar_errors(learner, moments, wanted, scalars, n_layers=self.n_layers)

    def _elsewhere(
        self, learner: Algorithm, scalars: np.ndarray, names: Sequence[str]
    ) -> np.ndarray:
        """Errors in other settings. Moments are means over the pairs; or sums, so that step sizes grow with the length,
        if these fit better."""
        laws = []
        for summed in (False, True) if learner.has_path or learner.along_pairs else (False,):
            errors = []
            for name in names:
                moments = self.moments(name, self.settings[name].scale if summed else 1.0)
                last = learner.predictions(moments, scalars.tolist(), self.n_layers)[-1]
                errors.append(squares(last - self.settings[name].predictions))
            laws.append(np.array(errors))
        return min(laws, key=np.mean)


def predict_by(
    learner: Algorithm, scalars: Float[np.ndarray, " _"], task: TaskConfig, n_layers: int
) -> Predict:
    """Function that gives the last prediction of a learner with fitted scalars."""
    return lambda prompts: learner.predictions(
        PromptMoments(prompts, task), scalars.tolist(), n_layers
    )[-1]


def squares(difference: Float[Tensor, "*axes prompt d_y"]) -> np.ndarray:
    """Mean squares over responses; numbers that are not finite become large ones."""
    return difference.square().mean(-1).nan_to_num(nan=torch.inf).clamp(max=1e12).numpy()


def scaled_name(learner: Algorithm) -> str:
    """Name of an algorithm with a scaled read-out."""
    return f"{learner.label or learner.name} with a scaled read-out"


def scaled(learner: Algorithm) -> Algorithm:
    """An algorithm whose predictions are multiplied by one more scalar.

    Example:
        >>> scaled(ALGORITHMS[0]).name
        'gradient_descent with a scaled read-out'
    """

    def run(moments: PromptMoments, n_layers: int, *scalars: Tensor) -> Tensor:
        return scalars[-1] * learner.run(moments, n_layers, *scalars[:-1])

    factor = Scalar("factor", lambda moments: 1.0, where="once", lower=-torch.inf)
    return Algorithm(
        scaled_name(learner), None, (*learner.scalars, factor), run, has_path=learner.has_path
    )


@dataclass(frozen=True, eq=False)
class Rest:
    """Part of the model that an algorithm with a scaled read-out leaves unexplained.

    Learners treat all coordinates of x alike, or each by its own fixed number. If the law of the task is the same with
    other signs of the coordinates (or with their order reversed), so is the difference of any two learners. Noise of
    weights is not: with other signs x^T E w keeps the diagonal of E, 1/d_x of its square if entries are independent.
    """

    square: Float[np.ndarray, "column prompt"]
    """Mean square over a prompt and its reflections."""
    product: Float[np.ndarray, "column prompt"]
    """Rest times the rest on the reflected prompt; `square` if the task has no such symmetry."""
    size: Float[np.ndarray, " prompt"]
    """Mean squares of the last prediction."""
    noise: float
    """Fraction that noise of weights keeps."""
    columns: tuple[str, ...] = (LAST,)
    """Predictions at the own length, then other settings."""

    def share(
        self, counts: Float[np.ndarray, " prompt"] | None = None, *, most: bool = False
    ) -> tuple[float, str]:
        """Fraction of another learner in the rest, 0 for noise and 1 for a learner, and its column: the least, or the
        most, over columns with more than rounding. 0 if there is no such column."""
        counts = np.ones(len(self.size)) if counts is None else counts
        square, product = self.square @ counts, self.product @ counts
        fitted = [ELSEWHERE if name in NOISES else ROUNDING for name in self.columns]
        more = np.flatnonzero(square > np.array(fitted) * (self.size @ counts))
        if not len(more):
            return 0.0, self.columns[0]
        shares = (product[more] / square[more] - self.noise) / (1 - self.noise)
        at = int(shares.argmax() if most else shares.argmin())
        return float(shares[at]), self.columns[more[at]]


def reflected(prompts: Prompts, task: TaskConfig, seed: int) -> list[Prompts]:
    """Prompts with other signs of the coordinates of x, or in reverse order for a chain of correlations, which are as
    likely; none if the task has no such symmetry."""
    if task.n_tasks is not None or task.d_x == 1:
        return []
    if task.covariance.kind == "kms" and task.covariance.rho != 0:
        return [replace(prompts, x=prompts.x.flip(-1), x_query=prompts.x_query.flip(-1))]
    shape = (2, len(prompts), task.d_x)
    generator = generator_for(seed, "init", 3)
    signs = 2.0 * torch.randint(0, 2, shape, generator=generator, device="cpu").to(prompts.x) - 1
    return [
        replace(prompts, x=prompts.x * each[:, None], x_query=prompts.x_query * each)
        for each in signs
    ]


def rest_of(
    own: Float[Tensor, "column prompt d_y"],
    others: Sequence[Float[Tensor, "column prompt d_y"]],
    size: Float[np.ndarray, " prompt"],
    noise: float,
    columns: tuple[str, ...] = (LAST,),
) -> Rest:
    """Rest from the model minus the learner, on prompts and on their reflections."""
    if not others:
        return Rest(squares(own), squares(own), size, 0.0, columns)
    reflections = torch.stack(list(others))
    square = (own.square() + reflections.square().mean(0)) / 2
    product = own * reflections.mean(0)
    return Rest(square.mean(2).numpy(), product.mean(2).numpy(), size, noise, columns)


@dataclass(frozen=True, eq=False)
class Place:
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


def places_of(trial: Trial, read: Predict, columns: Sequence[str], seed: int) -> list[Place]:
    """The prompts of the scores at the own length, and those with other noise."""
    places = []
    for n, (name, setting) in enumerate(trial.settings.items()):
        if n > 0 and name not in NOISES:
            continue
        prompts = setting.prompts if n > 0 else setting.prompts[1::2]
        own = trial.target[:, 1::2] if n == 0 else setting.predictions[None]
        others = reflected(prompts, trial.task, seed)
        seen = own, *(read(each)[-len(own) :] for each in others)
        moments = trial.moments(name), *(PromptMoments(each, trial.task) for each in others)
        places.append(Place(tuple(columns[: trial.n_own]) if n == 0 else (name,), seen, moments))
    return places


def with_scaled(
    scores: FitScores, trial: Trial, read: Predict, near: float, seed: int, *, rests: bool
) -> FitScores:
    """Scores with scaled read-outs of the algorithms that are near, and with the rest that each of these leaves.

    Args:
        read: Function of prompts that gives predictions, one for each column at the own length.
        near: Least R² of an algorithm that is near.
        rests: False: the rests are not needed.
    """
    least, found = scores.r2()[:, : trial.n_own].min(1), {}
    rows = [m for m, each in enumerate(scores.learners) if each.label and least[m] >= near]
    places = places_of(trial, read, scores.columns, seed) if rows and rests else []
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


def step_effects(
    predictor: Predictor,
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
) -> pd.DataFrame | None:
    """Effects of the steps of an algorithm with fitted scalars, put into the stream at the query, one row per layer.

    The query is no key of later layers, so that a change of its stream changes its own prediction alone. Linear images of
    what the algorithm holds are fitted to the even prompts, effects are measured on the odd ones.

    Returns:
        `steps_r2`: R² with the prediction of the model as it is, if a linear image of the algorithm's step replaces the
        layer's addition. `exchanged_r2`: R² of the change of the prediction with the expected one, if the algorithm's
        prediction after the layer is exchanged with that of another prompt; NaN if the algorithm predicts 0 there. None
        if the stream cannot be set, or its linear images need more prompts.
    """
    prompts, d_y = prompts[:STEP_PROMPTS], task.d_y
    try:
        hooked = predictor.hooked
        places = query_positions(hooked, prompts)
        if len(_widths(hooked, prompts[:1])) > 1:
            return None  # a layer whose output is no sum with its input
        streams = predictor.streams(prompts)[:, :, -1].cpu().double()
    except NoStreamError:
        return None
    held, x = states(algorithm, scalars, prompts, task, predictor.n_layers), prompts.x_query
    if len(prompts) < 4 * (held[0].shape[1] + task.d_x):
        return None
    predicted = partial(_predictions, hooked, prompts[1::2])
    known, rows = predicted(), []
    for layer in range(predictor.n_layers):
        before, after = streams[layer : layer + 2]
        at = (layer + 1, places[layer + 1])
        step = held[layer + 1] - held[layer]
        put = predicted(at, before[1::2] + step[1::2] @ _map(step, after - before))
        so_far = held[layer + 1][1::2, :d_y]
        swap = so_far.roll(1, 0) - so_far
        # The stream holds x, too, so that the map has rows for it.
        image = _map(torch.cat([held[layer + 1], x], 1), after)[:d_y]
        exchanged = predicted(at, after[1::2] + swap @ image)
        silent = so_far.abs().max() == 0
        change = np.nan if silent else r2_and_sem(exchanged - known, swap)[0]
        rows.append((r2_and_sem(put, known)[0], change))
    return pd.DataFrame(rows, columns=["steps_r2", "exchanged_r2"])


def _widths(hooked: HookedPredictor, prompts: Prompts) -> set[int]:
    """Widths of the stream before each layer and after the last."""
    names = [hooked.stream_name(layer) for layer in range(hooked.n_layers + 1)]
    _, streams = hooked.activations(prompts, names)
    return {stream.shape[-1] for stream in streams}


def states(
    algorithm: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    prompts: Prompts,
    task: TaskConfig,
    n_layers: int,
) -> list[Float[Tensor, "prompt entry"]]:
    """The algorithm's prediction before the first layer and after each, and x if the layers change it."""
    moments = PromptMoments(prompts, task)
    path = algorithm.predictions(moments, scalars.tolist(), n_layers)
    path = torch.cat([torch.zeros_like(path[:1]), path])
    x = algorithm.changed_covariates(moments, scalars.tolist(), n_layers)
    if x is None:
        return list(path)
    # Algorithm 1 writes its x beside the given one, into an empty place.
    own = algorithm.label == "preprocess_then_optimise"
    first = torch.zeros_like(x[:1]) if own else moments.prompts.x_query[None]
    return [torch.cat(both, 1) for both in zip(path, torch.cat([first, x]), strict=True)]


def _map(
    features: Float[Tensor, "prompt feature"], wanted: Float[Tensor, "prompt d_model"]
) -> Float[Tensor, "feature d_model"]:
    """Linear map from features that is nearest to the wanted values on even prompts."""
    return torch.linalg.lstsq(features[::2], wanted[::2], driver="gelsd").solution


def _predictions(
    hooked: HookedPredictor,
    prompts: Prompts,
    at: tuple[int, int] | None = None,
    values: Float[Tensor, "prompt d_model"] | None = None,
) -> Float[Tensor, "prompt d_y"]:
    """Predictions, with the stream after a layer set to given values at one position."""
    weight = next(hooked.model.parameters())
    given = prompts.to(weight.device).to(weight.dtype)

    def put(stream: Tensor, hook: object) -> Tensor:
        assert at is not None
        assert values is not None
        stream = stream.clone()
        stream[:, at[1]] = values.to(stream)
        return stream

    hooks: Hooks = [] if at is None else [(hooked.stream_name(at[0]), put)]
    with torch.no_grad():
        output = hooked.run(hooked.inputs(given), hooks)
        return hooked.prediction(output, given).cpu().double()
