"""Whether weights are a minimum of a loss: what descent from them finds, and what draws around them say."""

import math

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.training.local_losses import LocalLoss
from mechinterp.analysis.training.sampler import mean_error

FALL = 0.05
"""Largest n_beta (L - L_min) of weights that count as a minimum: the estimate is too low by as much."""
GROWTH = (4.0, 0.1)
"""An estimate grows if its last third differs from its first by more than so many standard errors and such a part."""


def descend(
    loss: LocalLoss, n_beta: float, localisation: float, *, most: int = 200
) -> tuple[Float[np.ndarray, " weight"], float]:
    """The lowest weights that descent finds within the pull, and by how much n_beta L is lower there.

    Args:
        most: Steps of L-BFGS.
    """
    from scipy.optimize import minimize  # takes a good part of a start-up

    least = float(loss.function(loss.at[None])[0][0])

    def pulled(point: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            value, gradient = loss.function(point[None])
        away = point - loss.at
        energy = n_beta * (float(value[0]) - least) + localisation / 2 * float(away @ away)
        return energy, n_beta * gradient[0] + localisation * away

    # The weights are kept in float32: a fall of 1e-6 is rounding.
    settings = {"maxiter": most, "maxfun": 2 * most, "ftol": 0.0, "gtol": 1e-4, "maxcor": 30}
    found = minimize(pulled, loss.at, jac=True, method="L-BFGS-B", options=settings)
    fall = n_beta * (least - float(loss.function(found.x[None])[0][0]))
    return (found.x, fall) if fall > 0 else (loss.at, 0.0)


def why_no_minimum(excess: Float[np.ndarray, "chain draw"]) -> str:
    """What n_beta (L - L*) of draws says against a minimum at L*; empty if nothing.

    Example:
        >>> why_no_minimum(np.random.default_rng(0).gamma(3.0, size=(4, 300)))
        ''
        >>> why_no_minimum(-np.ones((4, 300)))
        'draws lie below the weights: n_beta (L - L*) falls to -1, and is -1 in the mean.'
    """
    if not np.isfinite(excess).all():
        return "draws overflow."
    if excess.min() < -FALL:
        return (
            f"draws lie below the weights: n_beta (L - L*) falls to {excess.min():.3g}, "
            f"and is {excess.mean():.3g} in the mean."
        )
    third = max(excess.shape[1] // 3, 2)
    first, last = excess[:, :third], excess[:, -third:]
    change = float(last.mean() - first.mean())
    error = math.hypot(mean_error(first), mean_error(last))
    if abs(change) > GROWTH[0] * error and abs(change) > GROWTH[1] * excess.mean():
        return f"the estimate grows while it is drawn, by {change:.3g} ± {error:.2g}."
    return ""
