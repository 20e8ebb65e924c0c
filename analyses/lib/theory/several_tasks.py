"""One debiased step for several responses at once: the best step, its exact risk, and the heads
that it needs.

Response n is predicted as y_hat_n = sum_mi theta_nmi g_mi x_query_i from g_mi = (1/L) sum_l y_lm
(x_li - mean(x)_i). Attention heads whose QK is diagonal on x and whose mu sum to zero compute such
a step. With H heads, theta as a matrix from (n, m) to i has rank at most H - 1: sum_h mu_h
omega_h^T with sum_h mu_h = 0. x ~ N(0, I); task vectors have entries of variance `beta_var` on
their supports, with one vector for all responses (`shared_beta`) or one for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import require_counts

Theta = Float[np.ndarray, "response source d_x"]
STARTS, SWEEPS = 20, 500


@dataclass(frozen=True, eq=False)
class StepMoments:
    """Moments that determine the risk of a step."""

    second: Float[np.ndarray, "d_x source source"]
    """E g_mi g_ki for every coordinate; different coordinates do not interact in a prediction."""
    first: Theta
    """E beta_ni g_mi."""
    variance: Float[np.ndarray, " response"]
    """E y_query_n^2, including the noise of the query if there is any."""


def step_moments(
    supports: Sequence[Sequence[int]],
    *,
    d_x: int,
    context_length: int,
    beta_var: float,
    noise_var: float,
    query_noise_var: float,
    shared_beta: bool,
) -> StepMoments:
    """Moments of the centred correlations with the responses.

    Source:
        Derived here from Wishart moments, for the tasks of He et al. 2025, arXiv 2503.12734, section 4.4.
    Example:
        >>> moments = step_moments([[0], [0, 1]], d_x=2, context_length=40, beta_var=1, noise_var=0.1, query_noise_var=0, shared_beta=True)
        >>> moments.variance.tolist()
        [1.0, 2.0]
    """
    on = np.zeros((len(supports), d_x))
    for response, support in enumerate(supports):
        on[response, list(support)] = 1
    d_y, n = len(on), context_length - 1
    alike = np.ones((d_y, d_y)) if shared_beta else np.eye(d_y)
    both = beta_var * alike[:, :, None] * on[:, None] * on[None]  # [n, m, i]: E beta_ni beta_mi
    own, others = both, both.sum(2, keepdims=True) - both
    second = own * (n**2 + 2 * n) + others * n + noise_var * n * np.eye(d_y)[:, :, None]
    variance = np.einsum("nni->n", both) + query_noise_var
    second, first = second.transpose(2, 0, 1) / context_length**2, both * n / context_length
    return StepMoments(second, first, variance)


def joint_step(moments: StepMoments) -> Theta:
    """Step with the smallest risk. If all responses share a task vector, each also uses the others'
    data.

    Source:
        Derived here. With separate vectors, theta_nni = 1 / (1 + (|S_n| + s^2 / beta_var) / L) on
        the support, else 0.
    Example:
        >>> moments = step_moments([[0], [1]], d_x=2, context_length=40, beta_var=1, noise_var=1, query_noise_var=0, shared_beta=False)
        >>> joint_step(moments)[0].round(4).tolist()
        [[0.9524, 0.0], [0.0, 0.0]]
    """
    return np.linalg.solve(moments.second, moments.first.transpose(2, 1, 0)).transpose(2, 1, 0)


def joint_step_risk(theta: Theta, moments: StepMoments) -> float:
    """Exact mean squared error, averaged over responses.

    Source:
        Derived here from Wishart moments.
    Example:
        >>> moments = step_moments([[0], [1]], d_x=2, context_length=40, beta_var=1, noise_var=1, query_noise_var=0, shared_beta=False)
        >>> round(joint_step_risk(joint_step(moments), moments), 4)
        0.0714
    """
    quadratic = np.einsum("nmi,imk,nki->n", theta, moments.second, theta)
    linear = np.einsum("nmi,nmi->n", theta, moments.first)
    return float((moments.variance - 2 * linear + quadratic).mean())


def joint_step_of_rank(moments: StepMoments, rank: int) -> Theta:
    """Step with the smallest risk among those of `rank` + 1 heads, by alternating least squares
    from several starts.

    Raises:
        ValueError: If rank is below 1.
    Source:
        Derived here.
    Example:
        >>> moments = step_moments([[0], [1]], d_x=2, context_length=40, beta_var=1, noise_var=1, query_noise_var=0, shared_beta=False)
        >>> round(joint_step_risk(joint_step_of_rank(moments, 1), moments), 4)
        0.1136
    """
    require_counts(rank=rank)
    generator = np.random.default_rng(0)
    starts = generator.standard_normal((STARTS, rank, moments.first.shape[2]))
    steps = [_alternate(moments, omega) for omega in starts]
    return min(steps, key=lambda theta: joint_step_risk(theta, moments))


def _alternate(moments: StepMoments, omega: Float[np.ndarray, "rank d_x"]) -> Theta:
    """Smallest risk of sum_k mu_knm omega_ki: minimised alternately over mu and omega."""
    (rank, _), (d_y, sources, _) = omega.shape, moments.first.shape
    for _ in range(SWEEPS):
        gram = np.einsum("ki,imp,li->kmlp", omega, moments.second, omega)
        gram = gram.reshape(rank * sources, rank * sources)
        right = np.einsum("ki,nmi->kmn", omega, moments.first).reshape(rank * sources, d_y)
        mu = (np.linalg.pinv(gram, hermitian=True) @ right).reshape(rank, sources, d_y)
        gram = np.einsum("kmn,imp,lpn->ikl", mu, moments.second, mu)
        right = np.einsum("kmn,nmi->ik", mu, moments.first)
        omega = (np.linalg.pinv(gram, hermitian=True) @ right[..., None])[..., 0].T
    return np.einsum("kmn,ki->nmi", mu, omega)
