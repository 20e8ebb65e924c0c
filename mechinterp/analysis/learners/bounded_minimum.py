"""Minimum of a function of one number between two bounds."""

from collections.abc import Callable

GOLDEN = 0.5 * (3 - 5**0.5)
"""Fraction of the longer side at which a golden-section step cuts it."""
ROUNDING = 2.2e-16**0.5
"""Relative distance below which function values near a minimum differ by rounding alone."""


def bounded_minimum(
    function: Callable[[float], float], low: float, high: float, *, tolerance: float
) -> float:
    """Place of a local minimum, by parabolas through three points and golden-section steps.

    It takes the steps of scipy.optimize.minimize_scalar(method="bounded"), whose import takes 0.3 s.

    Args:
        tolerance: Largest distance to the minimum.
    Source:
        Brent 1973, Algorithms for Minimization without Derivatives, chapter 5.
    Example:
        >>> round(bounded_minimum(lambda x: (x - 2) ** 2, 0, 5, tolerance=1e-6), 6)
        2.0
    """
    best = second = third = low + GOLDEN * (high - low)
    at_best = at_second = at_third = function(best)
    step = before = 0.0
    while True:
        middle = 0.5 * (low + high)
        least = ROUNDING * abs(best) + tolerance / 3
        if abs(best - middle) <= 2 * least - 0.5 * (high - low):
            return best
        parabola = None
        if abs(before) > least:
            parabola, before = (
                _parabola((best, second, third), (at_best, at_second, at_third), low, high, before),
                step,
            )
        if parabola is None:
            before = (low if best >= middle else high) - best
            step = GOLDEN * before
        else:
            step, x = parabola, best + parabola
            if x - low < 2 * least or high - x < 2 * least:
                step = least if middle >= best else -least
        x = best + (max(abs(step), least) if step >= 0 else -max(abs(step), least))
        value = function(x)
        if value <= at_best:
            low, high = (best, high) if x >= best else (low, best)
            third, at_third, second, at_second = second, at_second, best, at_best
            best, at_best = x, value
            continue
        low, high = (x, high) if x < best else (low, x)
        if value <= at_second or second == best:
            third, at_third, second, at_second = second, at_second, x, value
        elif value <= at_third or third in (best, second):
            third, at_third = x, value


def _parabola(
    places: tuple[float, float, float],
    values: tuple[float, float, float],
    low: float,
    high: float,
    before: float,
) -> float | None:
    """Step from the first place to the lowest point of a parabola; None if it leaves the bounds or is no shorter than half
    the step before the last."""
    (x, w, v), (fx, fw, fv) = places, values
    r, q = (x - w) * (fx - fv), (x - v) * (fx - fw)
    p, q = (x - v) * q - (x - w) * r, 2 * (q - r)
    p, q = (-p if q > 0 else p), abs(q)
    inside = q * (low - x) < p < q * (high - x)
    return p / q if abs(p) < abs(0.5 * q * before) and inside else None
