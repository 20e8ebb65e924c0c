"""Closed forms for one-layer softmax attention and for the gradient steps it is compared with.

All functions take and return numbers. They assume x ~ N(0, I) and signal variance 1 (beta ~ N(0, I/d_x)); `noise_var` is
the noise variance in units of the signal variance.
"""

from typing import TypeVar

import numpy as np

Gamma = TypeVar("Gamma", float, np.ndarray)


def debiased_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one debiased gradient step: 1 / (1 + (1 + s^2) d / L).

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.3) and (4.11) with the factor 1/L.
    Example:
        >>> round(debiased_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8791
    """
    return 1 / (1 + (1 + noise_var) * d_x / context_length)


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
