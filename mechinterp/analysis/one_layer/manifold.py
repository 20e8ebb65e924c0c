"""Solution manifold of the approximate loss, and the distance of a model's heads from it."""

from functools import partial

import numpy as np
from jaxtyping import Float

from mechinterp.config import TaskConfig
from mechinterp.theory.softmax import manifold_mu

ROUNDS, POINTS = 3, 1251
"""Grids of so many points, each between the neighbours of the last one's best: (2/1250)^3 of the range. To import scipy's
search takes longer than a whole reading of a model."""


def nearest_on_manifold(
    omega: Float[np.ndarray, " head"], mu: Float[np.ndarray, " head"], task: TaskConfig
) -> tuple[float, float]:
    """gamma of the nearest point of the solution manifold, and the distance to it.

    For a given gamma the nearest point has |omega_h| = gamma and shifts the mu of each sign equally, so
    that they sum to +-mu_gamma. Distances in omega and in mu are relative to their norms.

    Args:
        omega: Mean omega of each active head, of both signs; unit 1/x^2.
        mu: mu of each active head.
    Returns:
        gamma in 1/x^2 and the distance; NaN unless x is isotropic and mu is not 0, with omega of both signs.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.6)-(4.7); the projection is derived here.
    Example:
        >>> total = manifold_mu(0.13, d_x=5, context_length=40, noise_var=0.1)
        >>> gamma, distance = nearest_on_manifold(
        ...     np.array([0.13, -0.13]), np.array([total, -total]), TaskConfig()
        ... )
        >>> round(gamma, 4), round(distance, 4)
        (0.13, 0.0)
    """
    both_signs = (omega > 0).any() and (omega < 0).any()
    if task.covariance.kind != "identity" or not both_signs or not mu.any():
        return float("nan"), float("nan")
    mu_at = partial(
        manifold_mu,
        d_x=task.d_x,
        context_length=task.context_length,
        noise_var=task.noise_var / task.signal_var,
    )

    def distances(gammas: Float[np.ndarray, " point"]) -> Float[np.ndarray, " point"]:
        targets = mu_at(gammas)
        off_omega = np.square(np.abs(omega) - gammas[:, None]).sum(1) / np.sum(omega**2)
        off_mu = sum(
            np.square(np.abs(mu[group]).sum() - targets) / group.sum()
            for group in (omega > 0, omega < 0)
        ) / np.sum(mu**2)
        return np.sqrt(off_omega + off_mu)

    low, high = np.abs(omega).min() / 4, np.abs(omega).max() * 4
    for _ in range(ROUNDS):
        gammas = np.linspace(low, high, POINTS)
        away = distances(gammas)
        nearest = int(np.argmin(away))
        low, high = gammas[max(nearest - 1, 0)], gammas[min(nearest + 1, POINTS - 1)]
    return float(gammas[nearest]), float(away[nearest])
