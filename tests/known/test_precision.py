"""Comparison of float32 and float64 in draws of the learning coefficient."""

import numpy as np
import pandas as pd
import pytest

from analyses.known.precision import loss_in_float32, summaries, with_float32
from mechinterp.analysis.one_layer.linear_components import heads_of_linear
from mechinterp.analysis.training.local_losses import population_loss
from mechinterp.known import suite
from mechinterp.training.linear_models import task_moments

HAND = suite(2, trained="none")


@pytest.mark.parametrize("name", ["minimum-3", "singular-rank1-h2"])
def test_the_loss_in_float32_is_that_in_float64_to_its_rounding(name: str):
    entry = HAND[name]
    heads, moments = heads_of_linear(entry.checkpoint.weights), task_moments(entry.task)
    double = population_loss(heads, moments)
    points = double.at + 0.1 * np.random.default_rng(0).normal(size=(4, double.at.size))
    (loss, gradient), (expected, slope) = (
        each(points) for each in (loss_in_float32(heads, moments), double.function)
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, atol=1e-5 * np.abs(slope).max())
    # It is the arithmetic of float32 and not that of float64.
    assert np.abs(loss - expected).max() > 0
    assert with_float32(double, heads, moments).function is double.function


def test_means_are_over_regular_minima_and_differences_over_all():
    rows = [
        {"model": "a", "exact": 4.0, "float64": 4.4, "float32": 4.0},
        {"model": "a", "exact": 4.0, "float64": 4.0, "float32": 4.0},
        {"model": "singular", "exact": 2.0, "float64": 1.0, "float32": 1.2},
    ]
    errors = {"float64_sem": 0.15, "float32_sem": 0.15, "part": "estimate"}
    found = {row["of"]: row for row in summaries(pd.DataFrame([row | errors for row in rows]))}
    assert found["float64"]["bias"] == pytest.approx(5)
    assert found["float64"]["bias_sem"] == pytest.approx(5)
    assert found["float64"]["within"] == 50
    assert found["float32"]["bias"] == 0
    assert found["difference"]["bias"] == pytest.approx(-5)
    assert found["difference, all"]["n"] == 3
    assert found["difference, all"]["bias"] == pytest.approx(0)
