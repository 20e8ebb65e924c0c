"""Whether the weights of a model are a minimum of its loss: a few steps of descent before the chains run."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.training.sampler import Tempered, mean_error

FALL = 0.05
"""Largest nbeta (L - L_min) of weights that count as a minimum; the estimate is too low by this
much at most."""
GROWING = (4.0, 0.1)
"""An estimate counts as growing if its last third differs from its first by more than GROWING[0]
standard errors and by more than the fraction GROWING[1]."""


def fall_nearby(law: Tempered) -> tuple[float, bool]:
    """Decrease of nbeta L by descent within the pull, and True if it is only known to be at least as large.

    Where a gradient takes long, descent on the first look ends once nbeta L is lower by 2 FALL. The decrease at the
    weights that it found is then measured by the loss itself.
    """
    if law.loss.first_look is not None:
        look = Tempered(
            replace(law.loss, function=law.loss.first_look), law.nbeta, law.localization
        )
        lower, _ = lowest_nearby(look, enough=2 * FALL)
        fall = -float(law.energy(lower[None])[0][0])
        if fall > FALL:
            return fall, True
    return lowest_nearby(law)[1], False


def lowest_nearby(
    law: Tempered, *, most: int = 200, enough: float = math.inf
) -> tuple[Float[np.ndarray, " weight"], float]:
    """Lowest weights that descent finds within the pull, and the decrease of nbeta L.

    Args:
        most: Largest number of L-BFGS steps.
        enough: Descent ends once nbeta L, with the pull, is lower by this much.
    """
    from scipy.optimize import minimize  # slow import

    def pulled(point: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            _, energy, gradient = law.energy(point[None])
        return float(energy[0]), gradient[0]

    def stop(intermediate_result: Any) -> None:  # scipy passes the result by this name
        if -intermediate_result.fun > enough:
            raise StopIteration

    # Weights are stored in float32: a decrease of 1e-6 is rounding.
    settings = {"maxiter": most, "maxfun": 2 * most, "ftol": 0.0, "gtol": 1e-4, "maxcor": 30}
    lowest = minimize(
        pulled, law.loss.at, jac=True, method="L-BFGS-B", options=settings, callback=stop
    ).x
    fall = -float(law.energy(lowest[None])[0][0])
    return (lowest, fall) if fall > 0 else (law.loss.at, 0.0)


def why_no_minimum(excess: Float[np.ndarray, "chain draw"]) -> str:
    """Evidence of the draws' nbeta (L - L*) against a minimum at L*; empty if there is none.

    Example:
        >>> why_no_minimum(np.random.default_rng(0).gamma(3.0, size=(4, 300)))
        ''
        >>> why_no_minimum(-np.ones((4, 300)))
        'draws have a lower loss than the weights: nbeta (L - L*) has minimum -1 and mean -1.'
    """
    if not np.isfinite(excess).all():
        return "draws overflow."
    if excess.min() < -FALL:
        return (
            f"draws have a lower loss than the weights: nbeta (L - L*) has minimum {excess.min():.3g} "
            f"and mean {excess.mean():.3g}."
        )
    third = max(excess.shape[1] // 3, 2)
    first, last = excess[:, :third], excess[:, -third:]
    change = float(last.mean() - first.mean())
    error = math.hypot(mean_error(first), mean_error(last))
    if abs(change) > GROWING[0] * error and abs(change) > GROWING[1] * excess.mean():
        return f"the estimate grows during sampling, by {change:.3g} ± {error:.2g}."
    return ""
