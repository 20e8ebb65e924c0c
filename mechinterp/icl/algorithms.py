"""Algorithms of linear regression that a model with several layers may run, one step per layer.

Each member of `ALGORITHMS` gives its prediction after every layer as a function of prompts and a few scalars, starting
from the weight vector w = 0. S = X^T X / L and b = X^T y / L are the second moments of a context. docs/algorithms.md has
the formulas, their sources, and the tests that distinguish the members.
"""

import torch
from torch import Tensor

from mechinterp.icl.algorithm import (
    Algorithm,
    PromptMoments,
    Scalar,
    filtered,
    fixed,
    part_of_inverse_curvature,
    usual_penalty,
    without_path,
)
from mechinterp.icl.along_pairs import ALONG_PAIRS
from mechinterp.icl.predictors import dmmse

_SEEN = 1e-12
"""An eigenvalue below this fraction of the largest counts as 0."""
ETA = Scalar("eta", part_of_inverse_curvature(1.0))


def _shrunk(moments: PromptMoments, n_layers: int, gamma: Tensor) -> list[Tensor]:
    """a_l(s) before each layer and after the last, with x_l = a_l(S) x: x_{l+1} = (1 - gamma_l S_l) x_l and
    S_l = a_l(S)^2 S. The change of x in the last layer is left out, because nothing reads it."""
    s = moments.eigenvalues
    a = [torch.ones_like(s)]
    for layer in range(n_layers - 1):
        a.append(a[-1] * (1 - gamma[layer] * a[-1].square() * s))
    return [*a, a[-1]]


def _gd_plus_plus(moments: PromptMoments, n_layers: int, eta: Tensor, gamma: Tensor) -> Tensor:
    """Predictions of GD++: a step on x_l equals a step with eta_l a_l(S)^2 on x."""
    s, phi = moments.eigenvalues, [torch.zeros_like(moments.eigenvalues)]
    for size, a in zip(eta, _shrunk(moments, n_layers, gamma)[:-1], strict=True):
        phi.append(phi[-1] + size * a.square() * (1 - s * phi[-1]))
    return filtered(moments, phi[1:])


def _shrunk_covariates(moments: PromptMoments, n_layers: int, eta: Tensor, gamma: Tensor) -> Tensor:
    return torch.stack([moments.query_times(a) for a in _shrunk(moments, n_layers, gamma)[1:]])


def _descent_step(moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    return w + eta * gradient


def _preconditioned_step(
    moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor, c: Tensor
) -> Tensor:
    values, vectors = moments.covariance
    return w + ((gradient.mT @ vectors) * (eta / (values + c)) @ vectors.mT).mT


def _newton(moments: PromptMoments, n_layers: int, alpha: Tensor) -> Tensor:
    s = moments.eigenvalues
    m = [alpha * s]
    for _ in range(n_layers - 1):
        m.append(2 * m[-1] - m[-1].square() * s)
    return filtered(moments, m)


def _preprocessed_step(moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor) -> Tensor:
    # A step of u on r x equals a step of w = r u with the preconditioner r^2; here r is b.
    return w + eta * moments.b.square() * gradient


def _preprocessed_covariates(moments: PromptMoments, n_layers: int, eta: Tensor) -> Tensor:
    return (moments.b[..., 0] * moments.prompts.x_query).expand(n_layers, -1, -1)


def _preprocessed_modes(moments: PromptMoments) -> Tensor:
    """Eigenvalues of the second moments of r x, [batch, d_y, d_x]."""
    r = moments.b.mT
    return torch.linalg.eigvalsh(r[..., None] * moments.S[:, None] * r[..., None, :])


def _shrinking_step(
    moments: PromptMoments, w: Tensor, gradient: Tensor, eta: Tensor, threshold: Tensor
) -> Tensor:
    stepped = w + eta * gradient
    return stepped.sign() * torch.relu(stepped.abs() - threshold)


def _first_threshold(moments: PromptMoments) -> float:
    return 0.25 * moments.b.abs().mean().item()


def _preprocessed_eta(moments: PromptMoments) -> float:
    return 1 / (moments.curvature * moments.b.square().amax(1).mean().item())


def _mean_variance(moments: PromptMoments) -> float:
    return moments.covariance[0].mean().item()


def _newton_alpha(moments: PromptMoments) -> float:
    # Stable for every prompt, since 1 - s m_k = (1 - alpha s^2)^(2^k).
    return 1 / moments.eigenvalues.max().item() ** 2


def _eigenvalues(moments: PromptMoments) -> Tensor:
    return moments.eigenvalues


def _ridge(moments: PromptMoments, n_layers: int, penalty: Tensor) -> Tensor:
    phi = 1 / (moments.eigenvalues + penalty / moments.n_pairs)
    return filtered(moments, [phi] * n_layers)


def _adaptive_ridge(
    moments: PromptMoments,
    n_layers: int,
    low: Tensor,
    ratio: Tensor,
    odds: Tensor,
    beta_var: Tensor,
) -> Tensor:
    """Ridge regressions at the penalties low and low * ratio, mixed by the evidence of their noise levels penalty * beta_var.

    X X^T has the eigenvalues L s, and |y|^2 falls into the parts L <v, b>^2 / s along its eigenvectors and the rest.
    """
    n_pairs, (s, vectors) = moments.context_length, moments.modes
    y = moments.prompts.y
    along = (vectors.mT @ moments.b).square()
    seen = s > _SEEN * s[:, -1:]
    parts = torch.where(seen[..., None], n_pairs * along / s.clamp(min=1e-300)[..., None], 0.0)
    rest = (y.square().sum(1) - parts.sum(1)).clamp(min=0)
    logs = []
    phi = []
    for penalty in (low, low * ratio):
        values = beta_var * (n_pairs * s.clamp(min=0) + penalty)
        square = (parts / values[..., None]).sum(1) + rest / (beta_var * penalty)
        beyond = n_pairs - s.shape[1]
        logdet = values.log().sum(1) + beyond * (beta_var * penalty).log()
        logs.append(-(square.sum(1) + y.shape[2] * logdet) / 2)
        phi.append(1 / (s + penalty / n_pairs))
    low_is_true = torch.sigmoid(logs[0] - logs[1] + odds.log())[:, None]
    return filtered(moments, [low_is_true * phi[0] + (1 - low_is_true) * phi[1]] * n_layers)


def _posterior_mean(moments: PromptMoments) -> Tensor:
    task = moments.task
    return dmmse(moments.prompts, pool=task.pool(), noise_var=task.noise_variance)


def _low_penalty(moments: PromptMoments) -> float:
    return _penalties(moments)[0]


def _penalty_ratio(moments: PromptMoments) -> float:
    return _penalties(moments)[1]


def _beta_variance(moments: PromptMoments) -> float:
    return moments.task.beta_variance


def _penalties(moments: PromptMoments) -> tuple[float, float]:
    """First lower penalty of adaptive ridge and ratio of the higher one: those of the task's noise levels; for one level,
    ten times less and more."""
    levels = [variance for variance, _ in moments.task.noise_levels]
    if len(levels) > 1:
        return min(levels) / moments.task.beta_variance, max(levels) / min(levels)
    penalty = moments.penalty or 0.1
    return penalty / 10, 100.0


ALGORITHMS = (
    Algorithm(
        "gradient descent",
        "gradient_descent",
        (ETA,),
        step=_descent_step,
        by_mode=True,
        modes=_eigenvalues,
    ),
    Algorithm(
        "GD++",
        "gd_plus_plus",
        (
            ETA,
            Scalar(
                "gamma",
                part_of_inverse_curvature(0.25),
                where="all but the last",
                lower=-torch.inf,
            ),
        ),
        _gd_plus_plus,
        covariates=_shrunk_covariates,
        contains="gradient_descent",
    ),
    Algorithm(
        "preconditioned gradient descent",
        "preconditioned_descent",
        (
            Scalar("eta", fixed(1.0)),
            Scalar("c", _mean_variance),
        ),
        equivariant=False,
        step=_preconditioned_step,
        contains="gradient_descent",
    ),
    Algorithm(
        "iterative Newton",
        "newton",
        (Scalar("alpha", _newton_alpha, where="once"),),
        _newton,
    ),
    Algorithm(
        "preprocess then optimise",
        "preprocess_then_optimise",
        (Scalar("eta", _preprocessed_eta, where="from layer 1"),),
        linear_in_y=False,
        equivariant=False,
        covariates=_preprocessed_covariates,
        step=_preprocessed_step,
        modes=_preprocessed_modes,
    ),
    Algorithm(
        "ISTA",
        "sparse_shrinkage",
        (ETA, Scalar("threshold", _first_threshold)),
        linear_in_y=False,
        equivariant=False,
        step=_shrinking_step,
        contains="gradient_descent",
    ),
    Algorithm(
        "ridge",
        "ridge_like",
        # With penalty 0 it is undefined for fewer pairs than coordinates.
        (Scalar("penalty", usual_penalty, where="once", lower=1e-9),),
        _ridge,
        has_path=False,
    ),
    Algorithm(
        "adaptive ridge",
        "adaptive_ridge",
        (
            Scalar("low", _low_penalty, where="once", lower=1e-9),
            # At least 1, so that the two levels cannot change places.
            Scalar("ratio", _penalty_ratio, where="once", lower=1.0),
            Scalar("odds", fixed(1.0), where="once", lower=1e-9),
            Scalar("beta_var", _beta_variance, where="once", lower=1e-9),
        ),
        _adaptive_ridge,
        has_path=False,
        linear_in_y=False,
        contains="ridge_like",
    ),
    Algorithm(
        "posterior mean of the pool",
        "posterior_mean",
        (),
        without_path(_posterior_mean),
        has_path=False,
        linear_in_y=False,
        equivariant=False,
    ),
    *ALONG_PAIRS,
)
"""Algorithms that can become a label; the posterior mean applies to tasks with a pool only, adaptive ridge to learners that
are not linear in y, and the last ones to learners that take the pairs one after another."""
