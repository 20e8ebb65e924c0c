"""Algorithms of linear regression that a model of several layers may run, one step per layer.

Each member of `ALGORITHMS` gives its prediction after every layer as a function of prompts and a
few scalars, from the same weight vector w = 0 on. S = X^T X / L and b = X^T y / L are the second
moments of a context. docs/algorithms.md has the formulas, their sources, and what tells the members
apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.predictors import nearest_neighbours, ridge, zero_prediction
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.sparse_predictors import averaging

NEIGHBOURS = 3
WHERE = {
    "every layer": slice(None),
    "all but the first": slice(1, None),
    "all but the last": slice(-1),
    "once": slice(1),
}


@dataclass(frozen=True)
class Scalar:
    """A scalar of an algorithm, in some layers or once."""

    name: str
    start: Callable[[PromptMoments], float]
    """A natural value, positive."""
    where: str = "every layer"
    """Which layers have one; a key of `WHERE`."""
    lower: float = 0.0
    """The least value it may take."""

    def layers(self, n_layers: int) -> range:
        """The layers that have one, of n_layers."""
        return range(n_layers)[WHERE[self.where]]


@dataclass(frozen=True)
class Algorithm:
    """A learner with a prediction after every layer."""

    name: str
    label: str | None
    """The label of a model that runs it; None for controls and reference curves."""
    scalars: tuple[Scalar, ...]
    run: Callable[..., Tensor]
    """(moments, n_layers, one tensor per scalar) to predictions [layer, batch, d_y]."""
    has_path: bool = True
    """Whether layers differ; without a path the prediction is the same after every layer."""
    linear_in_y: bool = True
    """Whether the prediction is linear in the responses of the context."""
    equivariant: bool = True
    """Whether a rotation of x and x_query together leaves the prediction as it is."""
    modes: Callable[[PromptMoments], Tensor] | None = None
    """Eigenvalues [..., mode] of what every step descends on, smallest first, where all steps
    descend on the same and may change places; None where each has its own."""

    def names(self, n_layers: int) -> tuple[str, ...]:
        """Names of the scalars in order, such as eta_0, eta_1, gamma_0."""
        return tuple(
            scalar.name if scalar.where == "once" else f"{scalar.name}_{layer}"
            for scalar in self.scalars
            for layer in scalar.layers(n_layers)
        )

    def start(self, moments: PromptMoments, n_layers: int) -> Float[Tensor, " scalar"]:
        """Natural values of the scalars."""
        return self._per_scalar(n_layers, lambda scalar: scalar.start(moments))

    def lower(self, n_layers: int) -> Float[Tensor, " scalar"]:
        """The least values of the scalars."""
        return self._per_scalar(n_layers, lambda scalar: scalar.lower)

    def _per_scalar(self, n_layers: int, value: Callable[[Scalar], float]) -> Tensor:
        values = [value(scalar) for scalar in self.scalars for _ in scalar.layers(n_layers)]
        return torch.tensor(values, dtype=torch.float64)

    def predictions(
        self,
        moments: PromptMoments,
        scalars: Sequence[float] | Float[Tensor, " scalar"],
        n_layers: int,
    ) -> Float[Tensor, "layer batch d_y"]:
        """The prediction after each of n_layers layers.

        Args:
            scalars: In the order of `names`.
        Raises:
            ValueError: If n_layers is below 1 or there are more or fewer scalars than names.
        Example:
            >>> from mechinterp.config import TaskConfig
            >>> from mechinterp.icl.prompts import generator_for, sample_prompts
            >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
            >>> moments = PromptMoments(prompts, TaskConfig())
            >>> tuple(ALGORITHMS[0].predictions(moments, [0.8, 0.4, 0.2], 3).shape)
            (3, 8, 1)
        """
        if n_layers < 1:
            raise ValueError(f"n_layers must be >= 1, got {n_layers}.")
        given = torch.as_tensor(scalars, dtype=torch.float64)
        counts = [len(scalar.layers(n_layers)) for scalar in self.scalars]
        if given.shape != (sum(counts),):
            raise ValueError(
                f"scalars of {self.name} must be {sum(counts)} numbers for n_layers = {n_layers}, "
                f"got shape {list(given.shape)}."
            )
        return self.run(moments, n_layers, *given.split(counts))


def _filtered(moments: PromptMoments, phi: Sequence[Tensor]) -> Tensor:
    """Predictions of w = phi_l(S) b, one phi(s) of [batch, d_x] per layer."""
    parts = "layer batch d_x, batch d_x d_y -> layer batch d_y"
    return einsum(torch.stack(list(phi)), moments.mode_predictions, parts)


def _iterated(
    moments: PromptMoments, n_layers: int, update: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """Predictions <w_l, x_query> of w_{l+1} = update(l, w_l, b - S w_l), from w_0 = 0."""
    w, predictions = torch.zeros_like(moments.b), []
    for layer in range(n_layers):
        w = update(layer, w, moments.b - moments.S @ w)
        predictions.append((moments.prompts.x_query[:, None] @ w)[:, 0])
    return torch.stack(predictions)


def _gradient_descent(moments: PromptMoments, n_layers: int, eta: Tensor) -> Tensor:
    return _gd_plus_plus(moments, n_layers, eta, torch.zeros_like(eta[1:]))


def _gd_plus_plus(moments: PromptMoments, n_layers: int, eta: Tensor, gamma: Tensor) -> Tensor:
    """x_{l+1} = (1 - gamma_l S_l) x_l, so that x_l = a_l(S) x and S_l = a_l(S)^2 S; a step on x_l
    is one of size eta_l a_l(S)^2 on x. What the last layer does to x no one reads."""
    s = moments.eigenvalues
    a, phi = torch.ones_like(s), [torch.zeros_like(s)]
    for layer in range(n_layers):
        phi.append(phi[-1] + eta[layer] * a.square() * (1 - s * phi[-1]))
        if layer < n_layers - 1:
            a = a * (1 - gamma[layer] * a.square() * s)
    return _filtered(moments, phi[1:])


def _preconditioned(moments: PromptMoments, n_layers: int, eta: Tensor, c: Tensor) -> Tensor:
    values, vectors = moments.covariance

    def update(layer: int, w: Tensor, gradient: Tensor) -> Tensor:
        A = (vectors * (eta[layer] / (values + c[layer]))) @ vectors.mT
        return w + A @ gradient

    return _iterated(moments, n_layers, update)


def _newton(moments: PromptMoments, n_layers: int, alpha: Tensor) -> Tensor:
    s = moments.eigenvalues
    m = [alpha * s]
    for _ in range(n_layers - 1):
        m.append(2 * m[-1] - m[-1].square() * s)
    return _filtered(moments, m)


def _preprocess_then_optimise(moments: PromptMoments, n_layers: int, eta: Tensor) -> Tensor:
    # A step of u on r x is one of w = r u with the preconditioner r^2; r is b.
    def update(layer: int, w: Tensor, gradient: Tensor) -> Tensor:
        return w + eta[layer - 1] * moments.b.square() * gradient if layer else w

    return _iterated(moments, n_layers, update)


def _preprocessed_modes(moments: PromptMoments) -> Tensor:
    """Eigenvalues of the second moments of r x, [batch, d_y, d_x]."""
    r = moments.b.mT
    return torch.linalg.eigvalsh(r[..., None] * moments.S[:, None] * r[..., None, :])


def _ista(moments: PromptMoments, n_layers: int, eta: Tensor, threshold: Tensor) -> Tensor:
    def update(layer: int, w: Tensor, gradient: Tensor) -> Tensor:
        stepped = w + eta[layer] * gradient
        return stepped.sign() * torch.relu(stepped.abs() - threshold[layer])

    return _iterated(moments, n_layers, update)


def _ridge(moments: PromptMoments, n_layers: int, penalty: Tensor) -> Tensor:
    phi = 1 / (moments.eigenvalues + penalty / moments.n_pairs)
    return _filtered(moments, [phi] * n_layers)


def _momentum(moments: PromptMoments, n_layers: int, eta: Tensor, beta: Tensor) -> Tensor:
    s = moments.eigenvalues
    phi = [torch.zeros_like(s), eta[0].expand(s.shape)]
    for layer in range(1, n_layers):
        inertia = beta[layer - 1] * (phi[-1] - phi[-2])
        phi.append(phi[-1] + eta[layer] * (1 - s * phi[-1]) + inertia)
    return _filtered(moments, phi[1:])


def _without_path(learner: Callable[[PromptMoments], Tensor]) -> Callable[..., Tensor]:
    return lambda moments, n_layers: learner(moments).expand(n_layers, -1, -1)


_ETA = Scalar("eta", lambda moments: 1 / moments.curvature)

ALGORITHMS = (
    Algorithm(
        "gradient descent",
        "gradient_descent",
        (_ETA,),
        _gradient_descent,
        modes=lambda moments: moments.eigenvalues,
    ),
    Algorithm(
        "GD++",
        "gd_plus_plus",
        (
            _ETA,
            Scalar(
                "gamma",
                lambda moments: 0.25 / moments.curvature,
                where="all but the last",
                lower=-torch.inf,
            ),
        ),
        _gd_plus_plus,
    ),
    Algorithm(
        "preconditioned gradient descent",
        "preconditioned_gd",
        (
            Scalar("eta", lambda moments: 1.0),
            Scalar("c", lambda moments: moments.covariance[0].mean().item()),
        ),
        _preconditioned,
        equivariant=False,
    ),
    Algorithm(
        "iterative Newton",
        "newton",
        (
            Scalar(
                "alpha",
                # Stable for every prompt, as 1 - s m_k is (1 - alpha s^2)^(2^k).
                lambda moments: 1 / moments.eigenvalues.max().item() ** 2,
                where="once",
            ),
        ),
        _newton,
    ),
    Algorithm(
        "preprocess then optimise",
        "preprocess_then_optimise",
        (
            Scalar(
                "eta",
                lambda moments: 1 / (moments.curvature * moments.b.square().amax(1).mean().item()),
                where="all but the first",
            ),
        ),
        _preprocess_then_optimise,
        linear_in_y=False,
        equivariant=False,
        modes=_preprocessed_modes,
    ),
    Algorithm(
        "ISTA",
        "sparse_shrinkage",
        (_ETA, Scalar("threshold", lambda moments: 0.25 * moments.b.abs().mean().item())),
        _ista,
        linear_in_y=False,
        equivariant=False,
    ),
    Algorithm(
        "ridge",
        "ridge_like",
        # At 0 it is not defined where there are fewer pairs than coordinates.
        (Scalar("penalty", lambda moments: moments.penalty or 0.1, where="once", lower=1e-9),),
        _ridge,
        has_path=False,
    ),
    Algorithm(
        "zero",
        None,
        (),
        _without_path(lambda moments: zero_prediction(moments.prompts)),
        has_path=False,
    ),
    Algorithm(
        "averaging",
        None,
        (),
        _without_path(lambda moments: averaging(moments.prompts)),
        has_path=False,
    ),
    Algorithm(
        "momentum",
        None,
        (_ETA, Scalar("beta", lambda moments: 0.3, where="all but the first")),
        _momentum,
    ),
    Algorithm(
        "posterior mean of a dense prior",
        None,
        (),
        _without_path(lambda moments: ridge(moments.prompts, penalty=moments.penalty)),
        has_path=False,
    ),
    Algorithm(
        "nearest neighbours",
        None,
        (),
        _without_path(lambda moments: nearest_neighbours(moments.prompts, count=NEIGHBOURS)),
        has_path=False,
    ),
)
"""Candidates for a label, then controls and reference curves, which have none."""
