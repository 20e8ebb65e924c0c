"""Reference risks of sparse regression: learners that do not use sparsity, and an oracle that knows
the support.

Covariates are N(0, I) unless stated otherwise. Risks are excess risks E <beta_hat - beta, x>^2,
without the noise of the query, in units of y^2."""

import numpy as np
from jaxtyping import Float


def ols_risk(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Excess risk of least squares: noise_var d / (L - d - 1), for any task vector.

    Raises:
        ValueError: If context_length is not above d_x + 1.
    Source:
        Classical: E (X^T X)^-1 = I / (L - d - 1) for an inverse Wishart matrix.
    Example:
        >>> ols_risk(d_x=16, context_length=37, noise_var=0.4)
        0.32
    """
    if context_length <= d_x + 1:
        raise ValueError(f"context_length must be > d_x + 1 = {d_x + 1}, got {context_length}.")
    return noise_var * d_x / (context_length - d_x - 1)


def oracle_risk(*, sparsity: int, context_length: int, noise_var: float) -> float:
    """Excess risk of least squares on the true support: noise_var s / (L - s - 1).

    Raises:
        ValueError: If context_length is not above sparsity + 1.
    """
    least = sparsity + 1
    if context_length <= least:
        raise ValueError(f"context_length must be > sparsity + 1 = {least}, got {context_length}.")
    return ols_risk(d_x=sparsity, context_length=context_length, noise_var=noise_var)


def minimum_norm_risk(
    *, d_x: int, context_length: int, noise_var: float, signal_var: float
) -> float:
    """Excess risk of minimum-norm least squares: (1 - L/d) signal_var + noise_var L / (d - L - 1).

    Args:
        signal_var: |beta|^2, the variance of x . beta; unit y^2.
    Raises:
        ValueError: If context_length is not below d_x - 1.
    Source:
        Classical: projection on L of d directions, and E tr (X X^T)^-1 = L / (d - L - 1).
    Example:
        >>> minimum_norm_risk(d_x=64, context_length=32, noise_var=0.25, signal_var=1.0)
        0.7580645161290323
    """
    if context_length >= d_x - 1:
        raise ValueError(f"context_length must be < d_x - 1 = {d_x - 1}, got {context_length}.")
    unseen = (1 - context_length / d_x) * signal_var
    return unseen + noise_var * context_length / (d_x - context_length - 1)


def best_ridge_risk(*, d_x: int, context_length: int, noise_var: float, signal_var: float) -> float:
    """Excess risk of ridge regression at its best penalty, for large d and L at a fixed ratio.

    noise_var g m,   m = (-(1 - g + l) + sqrt((1 - g + l)^2 + 4 g l)) / (2 g l),   g = d/L,  l = noise_var g / signal_var

    The best penalty on X^T X is L l = d noise_var / signal_var.

    Args:
        signal_var: |beta|^2, the variance of x . beta; unit y^2.
    Raises:
        ValueError: If noise_var or signal_var is not positive.
    Source:
        Marchenko-Pastur law with the resolvent of X^T X / L, as in Dobriban and Wager 2018, arXiv
        1507.03003.
    Example:
        >>> round(best_ridge_risk(d_x=64, context_length=128, noise_var=0.25, signal_var=1.0), 4)
        0.1754
    """
    for name, value in (("noise_var", noise_var), ("signal_var", signal_var)):
        if value <= 0:
            raise ValueError(f"{name} must be > 0, got {value}.")
    g = d_x / context_length
    penalty = noise_var * g / signal_var
    b = 1 - g + penalty
    return float(noise_var * (np.sqrt(b**2 + 4 * g * penalty) - b) / (2 * penalty))


def correlation_moments(
    beta: Float[np.ndarray, " d_x"],
    eigenvalues: Float[np.ndarray, " d_x"],
    *,
    context_length: int,
    noise_var: float,
) -> tuple[Float[np.ndarray, " d_x"], Float[np.ndarray, " d_x"]]:
    """Mean and variance of r_j = (1/L) sum_l x_lj y_l, the weights of `preprocess_then_optimise`.

    E r_j = lambda_j beta_j,   Var r_j = (lambda_j (sum_i lambda_i beta_i^2 + noise_var) + lambda_j^2 beta_j^2) / L

    Args:
        eigenvalues: Variances lambda of the independent covariates.
    Source:
        Derived here: fourth moments of a Gaussian vector (Isserlis).
    Example:
        >>> mean, variance = correlation_moments(np.eye(4)[0], np.ones(4), context_length=10, noise_var=0.5)
        >>> mean, variance
        (array([1., 0., 0., 0.]), array([0.25, 0.15, 0.15, 0.15]))
    """
    mean = eigenvalues * beta
    total = float((eigenvalues * beta**2).sum()) + noise_var
    return mean, (eigenvalues * total + mean**2) / context_length
