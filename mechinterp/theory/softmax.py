"""Closed forms for one-layer softmax attention and the gradient-descent steps it is compared with.

Numbers in, numbers out. All assume x ~ N(0, I), signal variance 1 (beta ~ N(0, I/d_x)) and write
`noise_var` for the noise variance in units of the signal variance.
"""

import numpy as np


def vanilla_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one gradient step from zero: 1 / (1 + (d + 1 + s^2 d) / L).

    Source:
        He et al. 2025, arXiv 2503.12734, (D.28)-(D.29); checked by Monte Carlo in tests/theory.
    Example:
        >>> round(vanilla_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8602
    """
    return 1 / (1 + (d_x + 1 + noise_var * d_x) / context_length)


def debiased_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one debiased gradient step: 1 / (1 + (1 + s^2) d / L).

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.3) and (4.11) with the factor 1/L.
    Example:
        >>> round(debiased_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8791
    """
    return 1 / (1 + (1 + noise_var) * d_x / context_length)


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


def manifold_mu(gamma: float, *, d_x: int, context_length: int, noise_var: float) -> float:
    """Sum of mu over the positive heads of the solution manifold whose |omega| is gamma.

    gamma / (2 (gamma^2 + (1 + s^2) sinh(d gamma^2) / L)); the negative heads sum to minus that.

    Args:
        gamma: Common |omega| of the active heads, > 0; unit 1/x^2.
    Raises:
        ValueError: If gamma is not positive.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.6)-(4.7).
    Example:
        >>> round(manifold_mu(0.13, d_x=5, context_length=40, noise_var=0.1), 3)
        3.381
    """
    if gamma <= 0:
        raise ValueError(f"gamma must be > 0, got {gamma}.")
    curvature = (1 + noise_var) * np.sinh(d_x * gamma**2) / context_length
    return float(gamma / (2 * (gamma**2 + curvature)))
