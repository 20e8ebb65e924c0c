"""Risks of one (debiased) gradient step with a preconditioner, for any covariance, and the best
preconditioner.

All functions assume beta ~ N(0, I/d_x) and x ~ N(0, Sigma). `noise_var` is the noise variance s^2;
for Sigma = I the signal variance is 1."""

import numpy as np
from jaxtyping import Float

Matrix = Float[np.ndarray, "d_x d_x"]


def vanilla_preconditioner(sigma: Matrix, *, context_length: int, noise_var: float) -> Matrix:
    """Best Gamma of x_query^T Gamma (1/L) sum x_l y_l: ((1 + 1/L) Sigma + ((tr Sigma + d s^2)/L) I)^-1.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (5.6) with beta ~ N(0, I/d).
    Example:
        >>> vanilla_preconditioner(np.eye(5), context_length=40, noise_var=0.1)[0, 0].round(4)
        np.float64(0.8602)
    """
    return np.linalg.inv(sigma / context_length + _regularised(sigma, context_length, noise_var))


def debiased_preconditioner(sigma: Matrix, *, context_length: int, noise_var: float) -> Matrix:
    """Best Gamma of the step on centred covariates: (Sigma + ((tr Sigma + d s^2)/L) I)^-1.

    Source:
        Derived here from Wishart moments, for the step of He et al. 2025, arXiv 2503.12734, eq. (5.3).
    Example:
        >>> debiased_preconditioner(np.eye(5), context_length=40, noise_var=0.1)[0, 0].round(4)
        np.float64(0.8791)
    """
    return np.linalg.inv(_regularised(sigma, context_length, noise_var))


def vanilla_step_risk(
    gamma: Matrix, sigma: Matrix, *, context_length: int, noise_var: float
) -> float:
    """Exact risk, noise included, of x_query^T Gamma (1/L) sum x_l y_l.

    Source:
        He et al. 2025, arXiv 2503.12734, section 5.3; derived here for any Gamma from Wishart
        moments.
    Example:
        >>> eye = np.eye(5)
        >>> round(vanilla_step_risk(0.8602 * eye, eye, context_length=40, noise_var=0.1), 4)
        0.2398
    """
    second = sigma / context_length + _regularised(sigma, context_length, noise_var)
    return _risk(gamma, sigma, sigma @ second, 1.0, noise_var)


def debiased_step_risk(
    gamma: Matrix, sigma: Matrix, *, context_length: int, noise_var: float
) -> float:
    """Exact risk, noise included, of x_query^T Gamma (1/L) sum (x_l - mean(x)) y_l.

    Source:
        Derived here from Wishart moments, for the step of He et al. 2025, arXiv 2503.12734, eq. (5.3).
    Example:
        >>> eye = np.eye(5)
        >>> round(debiased_step_risk(0.8791 * eye, eye, context_length=40, noise_var=0.1), 4)
        0.2429
    """
    shrunk = 1 - 1 / context_length
    second = shrunk * _regularised(sigma, context_length, noise_var)
    return _risk(gamma, sigma, sigma @ second, shrunk, noise_var)


def _regularised(sigma: np.ndarray, context_length: int, noise_var: float) -> np.ndarray:
    d_x = len(sigma)
    return sigma + (np.trace(sigma) + d_x * noise_var) / context_length * np.eye(d_x)


def _risk(
    gamma: np.ndarray, sigma: np.ndarray, second: np.ndarray, first: float, noise_var: float
) -> float:
    """s^2 + (1/d) [tr Sigma - 2 first tr(Sigma Gamma Sigma) + tr(Sigma Gamma second Gamma^T)]."""
    linear = first * np.trace(sigma @ gamma @ sigma)
    quadratic = np.trace(sigma @ gamma @ second @ gamma.T)
    return float(noise_var + (np.trace(sigma) - 2 * linear + quadratic) / len(sigma))
