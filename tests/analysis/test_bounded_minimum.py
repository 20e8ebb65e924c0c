"""The search for a minimum takes the steps of scipy's, bit for bit."""

import math

import pytest
from scipy.optimize import minimize_scalar

from mechinterp.analysis.learners.bounded_minimum import bounded_minimum

FUNCTIONS = {
    "square": lambda x: (x - 2) ** 2,
    "fourth power": lambda x: (x - 0.3) ** 4 + 1e-3 * x,
    "two valleys": lambda x: math.cos(3 * x) + 0.1 * x,
    "edge": lambda x: -x,
    "corner": lambda x: abs(x - 1.234),
    "flat": lambda x: 0.0,
    "steep": lambda x: math.exp(5 * x) - 40 * x,
    "undefined": lambda x: math.nan,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bounds", [(0.0, 5.0), (-4.0, 0.0), (-1.0, 3.0)])
@pytest.mark.parametrize("tolerance", [1e-4, 1e-9])
def test_steps_are_those_of_scipy(name: str, bounds: tuple[float, float], tolerance: float):
    asked: dict[str, list[float]] = {"ours": [], "theirs": []}

    def noting(whose: str):
        def function(x: float) -> float:
            asked[whose].append(float(x))
            return FUNCTIONS[name](float(x))

        return function

    ours = bounded_minimum(noting("ours"), *bounds, tolerance=tolerance)
    options = {"xatol": tolerance}
    theirs = minimize_scalar(noting("theirs"), bounds=bounds, method="bounded", options=options).x
    assert asked["ours"] == asked["theirs"]
    assert ours == theirs


def test_the_minimum_of_a_square_is_found():
    assert bounded_minimum(FUNCTIONS["square"], 0, 5, tolerance=1e-8) == pytest.approx(2, abs=1e-8)
