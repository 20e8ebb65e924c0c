import numpy as np
import pytest

from mechinterp.analysis.estimates import mean_and_sem, ratio_and_sem


def test_standard_errors_are_the_spread_over_repetitions():
    random = np.random.default_rng(0)
    power = random.exponential(size=(4000, 400))
    part = 0.3 * power + random.normal(scale=0.2, size=power.shape)
    means, ratios = zip(
        *[(mean_and_sem(p), ratio_and_sem(q, p)) for p, q in zip(power, part, strict=True)],
        strict=True,
    )
    for estimates, truth in ((means, 1.0), (ratios, 0.3)):
        values, sems = np.array(estimates).T
        assert values.mean() == pytest.approx(truth, abs=4 * values.std() / 4000**0.5)
        assert np.mean(sems) == pytest.approx(values.std(), rel=0.05)


def test_ratio_of_nothing_is_nan():
    ratio, sem = ratio_and_sem(np.zeros(5), np.zeros(5))
    assert np.isnan(ratio)
    assert np.isnan(sem)
