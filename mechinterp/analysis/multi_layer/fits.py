"""Fits of learners to the predictions of a model, and their scores on prompts that nothing was fitted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.directions import LeastProgress
from mechinterp.analysis.multi_layer.naming_prompts import (
    FIT_PROMPTS,
    FITTED_PROMPTS,
    LAST_PREDICTION,
    SCORED_PROMPTS,
    NamingSetting,
    Predict,
    squares,
)
from mechinterp.analysis.multi_layer.rests import Rest
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.algorithm_fits import TOLERANCE, fit_algorithm, scalar_errors

LOOSE = 0.95
"""Algorithms of this R² at the model's own length are near: they are scored in other settings, too."""
COARSE = 1e-4
"""A fit of an algorithm ends if a step lowers the mean square by less than this fraction."""
N_STARTS = 2
"""Number of starts of the fit of an algorithm to the last prediction."""
N_STARTS_ADAPTIVE = 8
"""Number of starts of the fit of adaptive ridge, whose search may end where one noise level has nearly no weight."""
ADAPTIVE = "adaptive_ridge"
"""Label whose noise levels show on prompts of several levels only."""


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
    by_length: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """R² at other lengths if sums over the pairs are divided by their number, minus that if they are divided by the own length,
    with its standard error, by label. The penalty of recursive least squares is constant, or falls as alpha^L."""
    progress: Mapping[str, LeastProgress] = field(default_factory=dict)
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
            key = "r2" if column == LAST_PREDICTION else f"{column.replace(' ', '_')}_r2"
            table |= {key: r2[:, n], f"{key}_sem": sem[:, n]}
        return pd.DataFrame(table, index=self.names)


@dataclass(frozen=True, eq=False)
class FitTrial:
    """Prompts, targets and cached moments for fitting and scoring learners."""

    settings: Mapping[str, NamingSetting]
    """The model's own length first, then other settings in which the model does its task."""
    task: TaskConfig
    n_layers: int
    target: Float[Tensor, "column prompt d_y"]
    """The last prediction, or the prediction after each layer, at the own length."""
    known_moments: dict[object, PromptMoments] = field(default_factory=dict)
    """Cache of `moments`, which trials of one model share."""
    varied: NamingSetting | None = None
    """Prompts of several noise levels, on which adaptive ridge is fitted; None: on those of the own length."""

    @property
    def own(self) -> NamingSetting:
        return next(iter(self.settings.values()))

    @property
    def n_own(self) -> int:
        return len(self.target)

    def moments(self, name: str, scale: float = 1.0) -> PromptMoments:
        """Moments of the prompts of a setting that are scored; "fit": those that are fitted to."""
        if (name, scale) not in self.known_moments:
            fit, own = name == "fit", self.settings.get(name) is self.own
            prompts = (
                self.own.prompts[FITTED_PROMPTS][:FIT_PROMPTS]
                if fit
                else self.settings[name].prompts
            )
            prompts = prompts[SCORED_PROMPTS] if own else prompts
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
        layers = [f"layer {n}" for n in range(self.n_own)] if self.n_own > 1 else [LAST_PREDICTION]
        sizes = [squares(self.own.predictions[SCORED_PROMPTS])] * self.n_own
        sizes += [squares(self.settings[name].predictions) for name in others]
        error = np.full((len(learners), len(sizes), len(sizes[0])), np.nan)
        scalars, by_length = [], {}
        for row, learner in enumerate(learners):
            start = (starts or {}).get(learner.label or learner.name)
            values = self._fitted(learner, start, n_starts, tolerance)
            path = learner.predictions(self.moments(first), values.tolist(), self.n_layers)
            own = error[row, : self.n_own] = squares(
                path[-self.n_own :] - self.target[:, SCORED_PROMPTS]
            )
            if others and 1 - own.sum(1).max() / sizes[0].sum() >= LOOSE:
                laws = self._elsewhere(learner, values, others)
                error[row, self.n_own :] = min(laws, key=np.mean)
                if len(laws) > 1 and learner.label:
                    by_length[learner.label] = self._gain_of_means(laws, others)
            scalars.append(values)
        columns = (*layers, *others)
        return FitScores(
            tuple(learners),
            tuple(scalars),
            columns,
            self.n_own,
            error,
            np.array(sizes),
            by_length=by_length,
        )

    def _fitted(
        self, learner: Algorithm, start: np.ndarray | None, n_starts: int, tolerance: float
    ) -> Float[np.ndarray, " _"]:
        """Scalars of a learner, fitted to the target on the prompts of the fits."""
        moments, wanted = self._fit_to(learner)
        if learner.label == ADAPTIVE:
            n_starts, tolerance = N_STARTS_ADAPTIVE, TOLERANCE
        return fit_algorithm(
            learner,
            moments,
            wanted,
            n_layers=self.n_layers,
            n_starts=n_starts if start is None else 1,
            start=None if start is None else torch.from_numpy(start),
            tolerance=tolerance,
        ).scalars

    def fit_and_error(
        self, learner: Algorithm, start: Float[np.ndarray, " _"] | None
    ) -> tuple[Float[np.ndarray, " _"], float]:
        """Scalars of a learner, and the mean square that it leaves on the prompts of the fits."""
        moments, wanted = self._fit_to(learner)
        scalars = self._fitted(learner, start, N_STARTS, COARSE)
        path = learner.predictions(moments, scalars.tolist(), self.n_layers)
        rest = path[-1] - (wanted if wanted.ndim == 2 else wanted[-1])
        return scalars, float(rest.square().mean())

    def _fit_to(self, learner: Algorithm) -> tuple[PromptMoments, Tensor]:
        """Moments of the prompts of the fit of a learner, and the predictions that are fitted there."""
        # Also with a scaled read-out, which has a name alone.
        adaptive = (learner.label or learner.name).startswith(ADAPTIVE)
        if adaptive and self.varied is not None:
            return PromptMoments(self.varied.prompts, self.task), self.varied.predictions
        wanted = self.target[:, FITTED_PROMPTS][:, :FIT_PROMPTS]
        return self.moments("fit"), wanted if self.n_own > 1 else wanted[0]

    def scalar_sems(
        self, learner: Algorithm, scalars: Float[np.ndarray, " _"]
    ) -> Float[np.ndarray, " _"]:
        """Standard errors of the fitted scalars of a learner without steps, over the prompts of the fit."""
        moments, wanted = self._fit_to(learner)
        return scalar_errors(learner, moments, wanted, scalars, n_layers=self.n_layers)

    def _gain_of_means(
        self, laws: Sequence[np.ndarray], names: Sequence[str]
    ) -> tuple[float, float]:
        """R² of the first law minus that of the second at other lengths, with its standard error over prompts."""
        rows = [n for n, name in enumerate(names) if self.settings[name].scale != 1]
        if not rows:
            return np.nan, np.nan
        gains = np.concatenate([laws[1][n] - laws[0][n] for n in rows])
        sizes = np.concatenate([squares(self.settings[names[n]].predictions) for n in rows])
        gain, sem = ratio_and_sem(gains[:, None], sizes)
        return float(gain[0]), float(sem[0])

    def _elsewhere(
        self, learner: Algorithm, scalars: np.ndarray, names: Sequence[str]
    ) -> list[np.ndarray]:
        """Errors in other settings, for one or two laws: moments are means over the pairs, or sums, so that step sizes grow
        with the length."""
        laws = []
        for summed in (False, True) if learner.has_path or learner.along_pairs else (False,):
            errors = []
            for name in names:
                moments = self.moments(name, self.settings[name].scale if summed else 1.0)
                last = learner.predictions(moments, scalars.tolist(), self.n_layers)[-1]
                errors.append(squares(last - self.settings[name].predictions))
            laws.append(np.array(errors))
        return laws


def predict_by(
    learner: Algorithm, scalars: Float[np.ndarray, " _"], task: TaskConfig, n_layers: int
) -> Predict:
    """Function that gives the last prediction of a learner with fitted scalars."""
    return lambda prompts: learner.predictions(
        PromptMoments(prompts, task), scalars.tolist(), n_layers
    )[-1]
