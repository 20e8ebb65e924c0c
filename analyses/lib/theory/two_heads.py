"""Slow drift of two heads of opposite sign, in closed form."""

import numpy as np
from jaxtyping import Float

Times = Float[np.ndarray, " time"]


def late_mu(
    time: Times, *, d_x: int, context_length: int, noise_var: float
) -> Float[np.ndarray, " time"]:
    """mu in phase III, (c d^3 t / (16 k^6))^(1/6), where omega follows mu quickly as 1 / (2 k mu).

    The paper argues for t^(1/2); its own equations, integrated numerically, give t^(1/6).

    Source:
        Derived here from He et al. 2025, arXiv 2503.12734, (B.4).
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> late_mu(np.array([1e4]), **setting).round(3).tolist()
        [3.158]
    """
    c = (1 + noise_var) / context_length
    k = 1 + c * d_x
    return (c * d_x**3 * time / (16 * k**6)) ** (1 / 6)
