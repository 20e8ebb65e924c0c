"""Natural splines of the response are those of scipy."""

import numpy as np
import pytest
from scipy.interpolate import CubicSpline

from mechinterp.analysis.response.projection import spline


@pytest.mark.parametrize("n_knots", [2, 3, 4, 9])
def test_splines_are_natural_and_go_on_straight(n_knots: int):
    generator = np.random.default_rng(n_knots)
    knots = np.sort(generator.exponential(size=n_knots))
    at = generator.normal(scale=4, size=(50, 7))
    curve = CubicSpline(knots, np.eye(n_knots), bc_type="natural")
    inside = np.clip(at, knots[0], knots[-1])
    expected = curve(inside) + curve(inside, 1) * (at - inside)[..., None]
    np.testing.assert_allclose(spline(at, knots), expected, rtol=1e-10, atol=1e-12)


def test_splines_are_one_at_their_own_knot():
    knots = np.array([0.1, 0.2, 0.7, 1.5, 4.0])
    np.testing.assert_allclose(spline(knots, knots), np.eye(5), atol=1e-14)
    # The second derivative at the middle of the knots 0, 1, 2 is -3, that at the ends 0.
    middle = spline(np.array([0.5, 1.5]), np.array([0.0, 1.0, 2.0]))
    np.testing.assert_allclose(middle[:, 1], 11 / 16, atol=1e-15)


def test_divided_splines_keep_their_values_at_the_knots():
    knots = np.array([0.1, 0.2, 0.7, 1.5])
    np.testing.assert_allclose(spline(knots, knots, c=0.3), np.eye(4), atol=1e-14)
