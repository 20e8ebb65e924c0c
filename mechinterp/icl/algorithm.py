"""Algorithms of linear regression: a prediction after every layer, as a function of a few scalars."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix


class PromptMoments:
    """Moments of prompts that the algorithms use, in float64.

    The task is the one that a model was trained on; the prompts may come from another task. It gives the covariance Sigma of
    preconditioned gradient descent and the penalty of the posterior mean.
    """

    scale: float
    """Number of pairs relative to a fixed L_0 by which sums are divided; 1 if they are divided by the number of pairs."""

    def __init__(self, prompts: Prompts, task: TaskConfig) -> None:
        self.prompts = prompts.to(torch.float64)
        self.task = task
        self.scale = 1.0

    def times(self, factor: float) -> "PromptMoments":
        """Moments with S and b times a factor; with factor L / L_0 they are sums over pairs divided by a fixed L_0."""
        scaled, (values, vectors) = PromptMoments(self.prompts, self.task), self._eigh
        scaled.S, scaled.b = factor * self.S, factor * self.b
        scaled._eigh = (factor * values, vectors)
        scaled.scale = factor
        return scaled

    @property
    def context_length(self) -> int:
        return self.prompts.x.shape[1]

    @property
    def n_pairs(self) -> Float[Tensor, "batch 1"]:
        """Number of pairs of each context."""
        return self.S.new_full((len(self.prompts), 1), self.context_length)

    @cached_property
    def S(self) -> Float[Tensor, "batch d_x d_x"]:
        """X^T X / L, unit x^2."""
        return self.prompts.x.mT @ self.prompts.x / self.context_length

    @cached_property
    def b(self) -> Float[Tensor, "batch d_x d_y"]:
        """X^T y / L, unit x y."""
        return self.prompts.x.mT @ self.prompts.y / self.context_length

    def gradient(self, w: Float[Tensor, "batch d_x d_y"]) -> Float[Tensor, "batch d_x d_y"]:
        """Negative gradient b - S w."""
        return self.b - self.S @ w

    @property
    def eigenvalues(self) -> Float[Tensor, "batch d_x"]:
        """Eigenvalues s of S, smallest first."""
        return self._eigh[0]

    @cached_property
    def mode_predictions(self) -> Float[Tensor, "batch d_x d_y"]:
        """<v, x_query> <v, b> for each eigenvector v of S.

        The prediction of w = phi(S) b is their sum with weights phi(s).
        """
        vectors = self._eigh[1]
        query = (self.prompts.x_query[:, None] @ vectors).mT
        return query * (vectors.mT @ self.b)

    def query_times(self, phi: Float[Tensor, "batch d_x"]) -> Float[Tensor, "batch d_x"]:
        """phi(S) x_query, for phi given at the eigenvalues."""
        vectors = self._eigh[1]
        return ((self.prompts.x_query[:, None] @ vectors * phi[:, None]) @ vectors.mT)[:, 0]

    @property
    def modes(self) -> tuple[Float[Tensor, "batch d_x"], Float[Tensor, "batch d_x d_x"]]:
        """Eigenvalues and eigenvectors of S, smallest first."""
        return self._eigh

    @cached_property
    def _eigh(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.S)
        return values, vectors

    @cached_property
    def covariance(self) -> tuple[Float[Tensor, " d_x"], Float[Tensor, "d_x d_x"]]:
        """Eigenvalues and eigenvectors of Sigma."""
        Sigma = torch.from_numpy(covariance_matrix(self.task.covariance, self.task.d_x))
        values, vectors = torch.linalg.eigh(Sigma.to(self.S))
        return values, vectors

    @property
    def curvature(self) -> float:
        """Mean over prompts of the largest eigenvalue of S, unit x^2."""
        return self.eigenvalues[:, -1].mean().item()

    @property
    def penalty(self) -> float:
        """Ridge penalty of the posterior mean under a dense Gaussian prior with the task's variance; unit x^2."""
        return self.task.posterior_penalty


WHERE = {
    "every layer": slice(None),
    "all but the last": slice(-1),
    "once": slice(1),
    **{f"from layer {first}": slice(first, None) for first in range(6)},
}
Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Scalar:
    """Scalar parameter of an algorithm, with a value per layer or one for all."""

    name: str
    start: Callable[[PromptMoments], float]
    """Function that gives a natural, positive start value."""
    where: str = "every layer"
    """Layers that have a value; a key of `WHERE`."""
    lower: float = 0.0
    """Lower bound of the scalar."""

    def layers(self, n_layers: int) -> range:
        """Layers, out of n_layers, that have a value of this scalar."""
        return range(n_layers)[WHERE[self.where]]


@dataclass(frozen=True)
class Algorithm:
    """Learner with a prediction after every layer."""

    name: str
    label: str | None
    """Label of a model that runs the algorithm; None for a learner that gives no label."""
    scalars: tuple[Scalar, ...]
    run: Callable[..., Tensor] = None  # type: ignore[assignment]
    """Function of (moments, n_layers, one tensor per scalar): predictions [layer, batch, d_y]. None: made from `step`."""
    step: Step | None = None
    """Function of (moments, w, b - S w, the layer's scalars): w after one layer, if it follows from w alone."""
    has_path: bool = True
    """True: predictions differ between layers. False: they are the same after every layer."""
    linear_in_y: bool = True
    """True: the prediction is linear in the responses of the context."""
    along_pairs: bool = False
    """True: the learner takes the pairs one after another. False: the pairs are a set."""
    contains: str = ""
    """Label of the smaller algorithm that this one is for some scalars: if both explain a model, the smaller is its name."""
    equivariant: bool = True
    """True: rotating x and x_query together does not change the prediction."""
    factor: float = 1.0
    """Fixed factor on the predictions of `run`: rho, if a learner of tasks that drift predicts with the next task vector."""
    covariates: Callable[..., Tensor] | None = None
    """Function of the arguments of `run`: the query's x after each layer, [layer, batch, d_x]. None: layers do not
    change x."""
    by_mode: bool = False
    """True: `step` multiplies each mode of S by a number. It then gets phi(s), [batch, d_x, 1], in place of w = phi(S) b, and
    1 - s phi(s) in place of the gradient."""
    modes: Callable[[PromptMoments], Tensor] | None = None
    """Function that gives the eigenvalues [..., mode], smallest first, of the quadratic that every step descends on. None if
    steps cannot be exchanged because each descends on its own."""

    def __post_init__(self) -> None:
        if self.run is None and self.step is not None:
            object.__setattr__(
                self, "run", partial(_in_steps, self.step, self.scalars, self.by_mode)
            )

    def names(self, n_layers: int) -> tuple[str, ...]:
        """Names of the scalars in order, such as eta_0, eta_1, gamma_0."""
        return tuple(
            scalar.name if scalar.where == "once" else f"{scalar.name}_{layer}"
            for scalar in self.scalars
            for layer in scalar.layers(n_layers)
        )

    def start(self, moments: PromptMoments, n_layers: int) -> Float[Tensor, " scalar"]:
        """Natural start values of the scalars."""
        return self._per_scalar(n_layers, lambda scalar: scalar.start(moments))

    def lower(self, n_layers: int) -> Float[Tensor, " scalar"]:
        """Lower bounds of the scalars."""
        return self._per_scalar(n_layers, lambda scalar: scalar.lower)

    def _per_scalar(self, n_layers: int, value: Callable[[Scalar], float]) -> Tensor:
        values = [value(scalar) for scalar in self.scalars for _ in scalar.layers(n_layers)]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def predictions(
        self,
        moments: PromptMoments,
        scalars: Sequence[float] | Float[Tensor, " scalar"],
        n_layers: int,
    ) -> Float[Tensor, "layer batch d_y"]:
        """Prediction after each of n_layers layers.

        Args:
            scalars: Values in the order of `names`.
        Raises:
            ValueError: If n_layers is below 1, or the number of scalars is wrong.
        Example:
            >>> from mechinterp.config import TaskConfig
            >>> from mechinterp.icl.prompts import generator_for, draw_prompts
            >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
            >>> from mechinterp.icl.algorithms import ALGORITHMS
            >>> moments = PromptMoments(prompts, TaskConfig())
            >>> tuple(ALGORITHMS[0].predictions(moments, [0.8, 0.4, 0.2], 3).shape)
            (3, 8, 1)
        """
        if n_layers < 1:
            raise ValueError(f"n_layers must be >= 1, got {n_layers}.")
        return self.run(moments, n_layers, *self._split(scalars, n_layers))

    def changed_covariates(
        self,
        moments: PromptMoments,
        scalars: Sequence[float] | Float[Tensor, " scalar"],
        n_layers: int,
    ) -> Float[Tensor, "layer batch d_x"] | None:
        """The query's x after each layer; None if the layers do not change it."""
        if self.covariates is None:
            return None
        return self.covariates(moments, n_layers, *self._split(scalars, n_layers))

    def _split(self, scalars: Sequence[float] | Tensor, n_layers: int) -> Sequence[Tensor]:
        """Values of each scalar, one tensor per scalar."""
        given = torch.as_tensor(scalars, dtype=torch.float64, device="cpu")
        counts = [len(scalar.layers(n_layers)) for scalar in self.scalars]
        if given.shape != (sum(counts),):
            raise ValueError(
                f"scalars of {self.name} must be {sum(counts)} numbers for n_layers = {n_layers}, "
                f"got shape {list(given.shape)}."
            )
        return given.split(counts)


def filtered(moments: PromptMoments, phi: Sequence[Tensor] | Tensor) -> Tensor:
    """Predictions of w = phi_l(S) b, for one phi(s) [batch, d_x] per layer."""
    parts = "layer batch d_x, batch d_x d_y -> layer batch d_y"
    return einsum(torch.stack(list(phi)), moments.mode_predictions, parts)


def iterated(
    moments: PromptMoments, n_layers: int, update: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """Predictions <w_l, x_query> of w_{l+1} = update(l, w_l, b - S w_l), from w_0 = 0."""
    w, predictions = torch.zeros_like(moments.b), []
    for layer in range(n_layers):
        w = update(layer, w, moments.gradient(w))
        predictions.append((moments.prompts.x_query[..., None] * w).sum(1))
    return torch.stack(predictions)


def _in_steps(
    step: Step,
    scalars: tuple[Scalar, ...],
    by_mode: bool,
    moments: PromptMoments,
    n_layers: int,
    *values: Tensor,
) -> Tensor:
    """Predictions of repeated steps; layers without a value of the first scalar leave w unchanged."""
    layers = scalars[0].layers(n_layers) if scalars else range(n_layers)

    def update(layer: int, w: Tensor, gradient: Tensor) -> Tensor:
        if layer not in layers:
            return w
        at = (value[min(layer - layers.start, len(value) - 1)] for value in values)
        return step(moments, w, gradient, *at)

    if not by_mode:
        return iterated(moments, n_layers, update)
    s = moments.eigenvalues[..., None]
    phi = [torch.zeros_like(s)]
    for layer in range(n_layers):
        phi.append(update(layer, phi[-1], 1 - s * phi[-1]))
    return filtered(moments, torch.stack(phi[1:])[..., 0])


def without_path(learner: Callable[[PromptMoments], Tensor]) -> Callable[..., Tensor]:
    """Algorithm function that repeats a learner's prediction after every layer."""
    return partial(_repeated, learner)


def _repeated(
    learner: Callable[[PromptMoments], Tensor], moments: PromptMoments, n_layers: int
) -> Tensor:
    return learner(moments).expand(n_layers, -1, -1)


def fixed(value: float) -> Callable[[PromptMoments], float]:
    """Start of a scalar that is the same for all prompts. A result holds its algorithm, so that every function of one
    must be found by its name when the result is pickled.

    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> fixed(0.5)(PromptMoments(draw_prompts(TaskConfig(), 2), TaskConfig()))
        0.5
    """
    return partial(_value, value)


def _value(value: float, moments: PromptMoments) -> float:
    return value


def part_of_inverse_curvature(part: float) -> Callable[[PromptMoments], float]:
    """Start of a step size: a part of 1 / curvature."""
    return partial(_over_curvature, part)


def _over_curvature(part: float, moments: PromptMoments) -> float:
    return part / moments.curvature


def usual_penalty(moments: PromptMoments) -> float:
    """Start of a ridge penalty: that of the task, or 0.1 without noise."""
    return moments.penalty or 0.1
