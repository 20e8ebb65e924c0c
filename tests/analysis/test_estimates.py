import numpy as np
import pytest

from mechinterp.analysis.estimates import carried_by_few, mean_and_sem, ratio_and_sem


@pytest.mark.slow
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


def test_a_hundredth_carries_a_mean_or_does_not():
    few = np.ones(200)
    few[:2] = 99.5  # 199 of 397
    assert carried_by_few(few)
    assert carried_by_few(-few)
    few[:2] = 98.5  # 197 of 395
    assert not carried_by_few(few)
    few[:3] = 99.5  # three of 200 are more than a hundredth
    assert not carried_by_few(few)
    # Signs do not cancel, and 99 values have no hundredth.
    assert not carried_by_few(np.tile([1.0, -1.0], 100))
    assert not carried_by_few(np.array([1e9] + [1.0] * 98))
