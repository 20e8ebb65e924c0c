"""Algorithms fitted to the predictions of a model on some prompts, and scored on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_tests import Setting, isotropic
from mechinterp.analysis.stats import ratio_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm, Scalar
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompt_moments import PromptMoments

FINE = 1e-4
"""A fit ends where a step takes off less than this share of what is left."""
FIT_PROMPTS = 256
"""Prompts of a fit, at most."""
LOOSE = 0.95
"""R^2 at the model's own length from which on an algorithm is near to it."""
SMALLER = "gradient_descent"
LARGER = {"gd_plus_plus", "preconditioned_descent", "sparse_shrinkage"}
"""Members that contain gradient descent."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Squared errors of algorithms on prompts that nothing was fitted to.

    A column is a layer or a setting. Scalars are fitted at the model's own length alone.
    """

    names: tuple[str, ...]
    """Of the algorithms: members by their labels, then controls."""
    columns: tuple[str, ...]
    n_scalars: tuple[int, ...]
    scalars: tuple[Float[np.ndarray, " _"], ...]
    error: Float[np.ndarray, "row column prompt"]
    """NaN where nothing is asked."""
    size: Float[np.ndarray, "column prompt"]
    """Mean squares of the predictions."""

    def r2(self, counts: Float[np.ndarray, " prompt"] | None = None) -> np.ndarray:
        """1 - mean (model - algorithm)^2 / mean model^2 [row, column], of prompts drawn so many times."""
        counts = np.ones(self.size.shape[1]) if counts is None else counts
        with np.errstate(invalid="ignore", divide="ignore"):
            return 1 - (self.error @ counts) / (self.size @ counts)

    def r2_sem(self) -> Float[np.ndarray, "row column"]:
        """Standard errors of `r2`."""
        return self._ratio(self.error)

    def lead(self, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        """R^2 of a row minus that of another in each column, and its standard error, paired."""
        gap = (self.error[second] - self.error[first])[None]
        with np.errstate(invalid="ignore", divide="ignore"):
            lead = gap.mean(2)[0] / self.size.mean(1)
        return lead, self._ratio(gap)[0]

    def _ratio(self, numerator: Float[np.ndarray, "row column prompt"]) -> np.ndarray:
        sem = np.full(numerator.shape[:2], np.nan)
        for column, size in enumerate(self.size):
            if np.isfinite(size).all():
                sem[:, column] = ratio_and_sem(numerator[:, column].T, size)[1]
        return sem

    def joined(self, other: "Scores") -> "Scores":
        """With the rows of another."""
        by_row = ("names", "n_scalars", "scalars")
        rows = {name: getattr(self, name) + getattr(other, name) for name in by_row}
        return replace(self, **rows, error=np.concatenate([self.error, other.error]))


@dataclass(frozen=True, eq=False)
class Room:
    """Where algorithms are held against a model: its last prediction, or what is predicted after each layer."""

    settings: Mapping[str, Setting]
    """The model's own first; others are asked where they are answered."""
    answered: Sequence[bool]
    task: TaskConfig
    n_layers: int
    path: Float[Tensor, "layer prompt d_y"] | None = None
    """What is predicted after each layer, on the own prompts; None: the last prediction alone."""
    known_moments: dict[tuple[str, float], PromptMoments] = field(default_factory=dict)
    """Those of `moments` so far."""

    def moments(self, setting: str, scale: float = 1.0) -> PromptMoments:
        """Those of the scored prompts: of the own setting the odd ones, of others all."""
        key = (setting, scale)
        if key not in self.known_moments:
            prompts = self.settings[setting].prompts
            prompts = prompts[1::2] if setting == next(iter(self.settings)) else prompts
            one = PromptMoments(prompts, self.task) if scale == 1 else self.moments(setting)
            self.known_moments[key] = one if scale == 1 else one.times(scale)
        return self.known_moments[key]

    @cached_property
    def fit_moments(self) -> PromptMoments:
        """Those of the prompts of fits."""
        return PromptMoments(self.own.prompts[::2][:FIT_PROMPTS], self.task)

    @property
    def own(self) -> Setting:
        return next(iter(self.settings.values()))

    @property
    def columns(self) -> tuple[str, ...]:
        if self.path is None:
            return tuple(self.settings)
        layers = (f"layer {layer}" for layer in range(self.n_layers))
        return (*layers, *list(self.settings)[1:])

    @property
    def n_own(self) -> int:
        """Columns at the own length, which come first."""
        return 1 if self.path is None else self.n_layers

    def target(self) -> Float[Tensor, "*layer prompt d_y"]:
        return self.own.known if self.path is None else self.path

    def unasked(self, algorithms: Sequence[Algorithm]) -> Scores:
        """Of algorithms that are not fitted."""
        nothing = np.full((len(algorithms), len(self.columns), len(self.own.prompts) // 2), np.nan)
        scalars = [np.full(len(each.names(self.n_layers)), np.nan) for each in algorithms]
        return self._table(algorithms, scalars, nothing, nothing[0])

    def _table(
        self,
        algorithms: Sequence[Algorithm],
        scalars: Sequence[np.ndarray],
        error: np.ndarray,
        size: np.ndarray,
    ) -> Scores:
        names = tuple(each.label or each.name for each in algorithms)
        counts = tuple(map(len, scalars))
        return Scores(names, self.columns, counts, tuple(scalars), error, size)

    def scores(
        self,
        algorithms: Sequence[Algorithm],
        *,
        starts: Mapping[str, Float[np.ndarray, " _"]] | None = None,
        n_starts: int = 1,
        tolerance: float = FINE,
    ) -> Scores:
        """Algorithms fitted on the even prompts of the own setting, and scored on the odd of all.

        Args:
            starts: Scalars by name, from which the search starts.
        """
        target = self.target()[..., ::2, :][..., :FIT_PROMPTS, :]
        moments, fitted = self.fit_moments, []
        for algorithm in algorithms:
            start = (starts or {}).get(algorithm.label or algorithm.name)
            fit = fit_algorithm(
                algorithm,
                moments,
                target,
                n_layers=self.n_layers,
                n_starts=n_starts if start is None else 1,
                start=None if start is None else torch.from_numpy(start),
                tolerance=tolerance,
            )
            fitted.append(fit.scalars)
        return self.scored(algorithms, fitted)

    def scored(
        self, algorithms: Sequence[Algorithm], scalars: Sequence[Float[np.ndarray, " _"]]
    ) -> Scores:
        """Algorithms with given scalars on the scored prompts; in other settings members alone, and what comes near to
        the model at its own length, since nothing else speaks against a member there."""
        first = self.n_own
        own, *others = self.settings
        half, n_columns = len(self.own.prompts) // 2, len(self.columns)
        error = np.full((len(algorithms), n_columns, half), np.nan)
        size = np.full((n_columns, half), np.nan)
        size[:first] = _squares(self.own.known[1::2])
        asked = [name for name, yes in zip(others, list(self.answered)[1:], strict=True) if yes]
        columns = [first + others.index(name) for name in asked]
        for column, name in zip(columns, asked, strict=True):
            size[column] = _squares(self.settings[name].known)
        for row, (algorithm, values) in enumerate(zip(algorithms, scalars, strict=True)):
            path = algorithm.predictions(self.moments(own), values.tolist(), self.n_layers)
            predictions = path[-1:] if self.path is None else path
            error[row, :first] = _squares(predictions - self.target()[..., 1::2, :])
            least = (1 - error[row, :first].sum(1) / size[:first].sum(1)).min()
            shown = self.path is None and algorithm.label is not None
            if asked and (shown or least >= LOOSE):
                error[row, columns] = self._elsewhere(algorithm, values, asked)
        return self._table(algorithms, scalars, error, size)

    def _elsewhere(
        self, algorithm: Algorithm, scalars: Float[np.ndarray, " _"], asked: Sequence[str]
    ) -> Float[np.ndarray, "setting prompt"]:
        """Errors in the other settings, under the law of the length that fits better: moments are means over
        the pairs, or sums over them, so that step sizes grow with L."""
        laws = []
        for summed in (False, True) if algorithm.has_path else (False,):
            errors = []
            for name in asked:
                setting = self.settings[name]
                moments = self.moments(name, setting.scale if summed else 1.0)
                last = algorithm.predictions(moments, scalars.tolist(), self.n_layers)[-1]
                errors.append(_squares(last - setting.known))
            laws.append(np.array(errors))
        return min(laws, key=np.mean)


def _squares(difference: Float[Tensor, "*axes prompt d_y"]) -> np.ndarray:
    return difference.square().mean(-1).nan_to_num(nan=torch.inf).clamp(max=1e12).numpy()


def candidates_of(task: TaskConfig) -> tuple[Algorithm, ...]:
    """Algorithms with a label. Where Sigma is a multiple of I, preconditioned gradient descent is
    gradient descent and left out; without a pool there is no posterior mean of one."""
    left_out = {"preconditioned_descent"} if isotropic(task) else set()
    left_out |= {"posterior_mean"} if task.n_tasks is None else set()
    return tuple(member for member in ALGORITHMS if member.label not in left_out)


def scaled(algorithm: Algorithm) -> Algorithm:
    """An algorithm whose predictions are all times one more scalar.

    Example:
        >>> scaled(ALGORITHMS[0]).name
        'gradient_descent with a scaled read-out'
    """

    def run(moments: PromptMoments, n_layers: int, *scalars: Tensor) -> Tensor:
        return scalars[-1] * algorithm.run(moments, n_layers, *scalars[:-1])

    factor = Scalar("factor", lambda moments: 1.0, where="once", lower=-torch.inf)
    name = f"{algorithm.label or algorithm.name} with a scaled read-out"
    scalars = (*algorithm.scalars, factor)
    return Algorithm(name, None, scalars, run, has_path=algorithm.has_path)


def free_preconditioner(room: Room, descent: Algorithm) -> Algorithm | None:
    """Gradient descent with the preconditioner A that the first layer has, whose prediction is x^T A b; None with
    too few prompts for its entries."""
    assert room.path is not None
    prompts, target = room.own.prompts[::2], room.path[0, ::2]
    d_x = prompts.x.shape[2]
    if len(prompts) < 2 * d_x**2:
        return None
    b = PromptMoments(prompts, room.task).b
    entries = (prompts.x_query[:, :, None, None] * b[:, None]).flatten(1, 2)  # [prompt, entry, d_y]
    stacked = entries.mT.flatten(0, 1)
    A = torch.linalg.lstsq(stacked, target.flatten()[:, None], driver="gelsd").solution
    A = A.reshape(d_x, d_x)
    A = A / A.diagonal().mean()

    def step(moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
        return w + eta * (gradient.mT @ A.mT).mT

    name = "descent with a free preconditioner"
    return Algorithm(name, None, descent.scalars, step=step, equivariant=False)
