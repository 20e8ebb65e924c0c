"""Risks of gradient steps, linear attention and ridge regression in the setting of He et al. 2025.

All functions assume x ~ N(0, I) and signal variance 1 (beta ~ N(0, I/d_x)); `noise_var` is in units
of the signal variance."""

from typing import TypeVar

import numpy as np

Gamma = TypeVar("Gamma", float, np.ndarray)


def vanilla_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one gradient step from zero: 1 / (1 + (d + 1 + s^2 d) / L).

    Source:
        He et al. 2025, arXiv 2503.12734, (D.28)-(D.29); checked by Monte Carlo in tests/theory.
    Example:
        >>> round(vanilla_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8602
    """
    return 1 / (1 + (d_x + 1 + noise_var * d_x) / context_length)


def vanilla_risk(eta: float, *, d_x: int, context_length: int, noise_var: float) -> float:
    """Exact risk, noise included, of y_hat = (eta/L) sum_l y_l <x_l, x_query>.

    1 + s^2 - 2 eta + eta^2 (1 + (d + 1 + s^2 d) / L), in units of the signal variance.

    Source:
        He et al. 2025, arXiv 2503.12734, (D.28).
    Example:
        >>> round(vanilla_risk(0.8602, d_x=5, context_length=40, noise_var=0.1), 4)
        0.2398
    """
    return 1 + noise_var - 2 * eta + eta**2 * (1 + (d_x + 1 + noise_var * d_x) / context_length)


def debiased_risk(eta: float, *, d_x: int, context_length: int, noise_var: float) -> float:
    """Exact risk, noise included, of y_hat = (eta/L) sum_l y_l <x_l - mean(x), x_query>.

    1 + s^2 - 2 eta (1 - 1/L) + eta^2 (L - 1)(L + d + s^2 d) / L^2, in units of the signal variance.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.11); the risk is derived here from Wishart moments.
    Example:
        >>> round(debiased_risk(0.8791, d_x=5, context_length=40, noise_var=0.1), 4)
        0.2429
    """
    length = context_length
    quadratic = (length - 1) * (length + d_x + noise_var * d_x) / length**2
    return 1 + noise_var - 2 * eta * (1 - 1 / length) + eta**2 * quadratic


def linear_attention_risk(
    *, trained_length: int, context_length: int, d_x: int, noise_var: float
) -> float:
    """Risk of linear attention with the fixed factor 1/L, optimal at one context length and tested
    at another.

    Its step size grows with the context length, so that its risk rises beyond the trained length.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (5.1) and figure 8; the closed form is derived here.
    Example:
        >>> setting = {"trained_length": 40, "d_x": 5, "noise_var": 0.1}
        >>> [round(linear_attention_risk(context_length=L, **setting), 3) for L in (40, 100)]
        [0.24, 1.724]
    """
    eta = vanilla_step_size(d_x=d_x, context_length=trained_length, noise_var=noise_var)
    scaled = eta * context_length / trained_length
    return vanilla_risk(scaled, d_x=d_x, context_length=context_length, noise_var=noise_var)


def gd_risk_limit(ratio: float, *, noise_var: float) -> float:
    """Risk of the best gradient step for d, L -> infinity with d/L = ratio: s^2 + (1+s^2) r / (1 + (1+s^2) r).

    Source:
        He et al. 2025, arXiv 2503.12734, Theorem 4.2 (iii).
    Example:
        >>> round(gd_risk_limit(0.2, noise_var=3.0), 4)
        3.4444
    """
    total = (1 + noise_var) * ratio
    return noise_var + total / (1 + total)


def bayes_risk_limit(ratio: float, *, noise_var: float) -> float:
    """Risk of the Bayes predictor (ridge) for d, L -> infinity with d/L = ratio.

    (s^2 + (r-1)/r + sqrt(4 s^2 + (s^2 + (1-r)/r)^2)) / 2, from the Marchenko-Pastur law.

    Source:
        He et al. 2025, arXiv 2503.12734, Theorem 4.2 (iii).
    Example:
        >>> round(bayes_risk_limit(0.2, noise_var=3.0), 4)
        3.4051
    """
    shift = (1 - ratio) / ratio
    root = np.sqrt(4 * noise_var + (noise_var + shift) ** 2)
    return float((noise_var - shift + root) / 2)


def ridge_risk(
    *, d_x: int, context_length: int, noise_var: float, n_draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """Risk of the Bayes predictor, s^2 + s^2 E tr(X X^T + d s^2 I)^-1, and its standard error.

    The expectation over contexts is computed by Monte Carlo.

    Source:
        He et al. 2025, arXiv 2503.12734, section 4.3.
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> risk, sem = ridge_risk(n_draws=2000, rng=np.random.default_rng(0), **setting)
        >>> abs(risk - 0.1144) < 4 * sem + 1e-4
        True
    """
    x = rng.standard_normal((n_draws, context_length, d_x))
    gram = x.transpose(0, 2, 1) @ x + d_x * noise_var * np.eye(d_x)
    traces = np.trace(np.linalg.inv(gram), axis1=1, axis2=2)
    sem = traces.std(ddof=1) / n_draws**0.5
    return float(noise_var * (1 + traces.mean())), float(noise_var * sem)


def manifold_mu(gamma: Gamma, *, d_x: int, context_length: int, noise_var: float) -> Gamma:
    """Sum of mu over the positive heads of the solution manifold at |omega| = gamma.

    gamma / (2 (gamma^2 + (1 + s^2) sinh(d gamma^2) / L)); the sum over the negative heads is minus this.

    Args:
        gamma: |omega| of all active heads, > 0, or an array of such values; unit 1/x^2.
    Raises:
        ValueError: If a gamma is not positive.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.6)-(4.7).
    Example:
        >>> round(float(manifold_mu(0.13, d_x=5, context_length=40, noise_var=0.1)), 3)
        3.381
    """
    if not np.min(gamma) > 0:
        raise ValueError(f"gamma must be > 0, got {np.min(gamma)}.")
    with np.errstate(over="ignore"):  # mu is 0 for a huge gamma
        curvature = (1 + noise_var) * np.sinh(d_x * gamma**2) / context_length
    return gamma / (2 * (gamma**2 + curvature))
