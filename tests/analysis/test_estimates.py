import numpy as np
import pytest
import torch

from mechinterp.analysis.stats import (
    best_factor,
    carried_by_few,
    mean_and_sem,
    ratio_and_sem,
    without_worst,
)
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import sample_prompts


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


@pytest.mark.parametrize("d_y", [1, 2])
def test_the_best_factor_undoes_a_factor_exactly(d_y: int):
    clean = sample_prompts(TaskConfig(d_y=d_y), 32, seed=0, dtype=torch.float64).y_query_clean
    for factor in (0.25, 1.0, -3.0):
        found, sem = best_factor(clean / factor, clean)
        assert found == pytest.approx(factor, rel=1e-12)
        assert sem == pytest.approx(0, abs=1e-12)


def test_the_best_factor_has_the_least_loss():
    """Mean (c f - y)^2 is a parabola in c: its derivative is 0 at the factor."""
    prompts = sample_prompts(TaskConfig(), 64, seed=0, dtype=torch.float64)
    prediction = 0.3 * ridge(prompts, penalty=0.5)
    factor, _ = best_factor(prediction, prompts.y_query)
    slope = (prediction * (factor * prediction - prompts.y_query)).mean()
    assert float(slope) == pytest.approx(0, abs=1e-12)
    assert np.isnan(best_factor(torch.zeros(4, 1), torch.ones(4, 1))[0])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_best_factor_of_the_posterior_mean_is_1_and_its_error_the_spread_over_repetitions():
    task, repetitions = TaskConfig(), 1000
    prompts = sample_prompts(task, 256 * repetitions, seed=0, dtype=torch.float64)
    parts = [prompts[start : start + 256] for start in range(0, len(prompts), 256)]
    found = [
        best_factor(2 * ridge(part, penalty=task.posterior_penalty), part.y_query_clean)
        for part in parts
    ]
    factors, sems = np.array(found).T
    spread = factors.std()
    assert factors.mean() == pytest.approx(0.5, abs=4 * spread / repetitions**0.5)
    assert np.mean(sems) == pytest.approx(spread, rel=4 / (2 * repetitions) ** 0.5 + 0.02)


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


@pytest.mark.slow
def test_more_prompts_bring_a_mean_without_the_worst_nearer_to_its_limit():
    # P(size > s) = s^-a has no mean for a < 1. Below the quantile q of 1 - 1/1000 the mean is
    # a (q^(1 - a) - 1) / (1 - a) / (1 - 1/1000), and the mean square of the same form with 2 in the place of 1.
    a, part = 0.8, 1 - 1 / 1000
    q = (1 - part) ** (-1 / a)
    limit, square = (a * (q ** (power - a) - 1) / (power - a) / part for power in (1, 2))
    generator = np.random.default_rng(0)
    off = []
    for n in (4_000, 64_000, 1_024_000):
        found = [generator.uniform(size=n) ** (-1 / a) for _ in range(20)]
        kept = np.array([sizes[without_worst(sizes)].mean() for sizes in found])
        # The error of the quantile adds (q - mean)^2 / 1000 to the variance.
        sem = ((square - limit**2 + (q - limit) ** 2 / 1000) / n) ** 0.5
        off.append(np.square(kept - limit).mean() ** 0.5)
        assert off[-1] < 2 * sem
        assert np.abs(np.array([sizes.mean() for sizes in found]) - limit).max() > 8 * sem
    assert off[0] > 2 * off[1] > 4 * off[2]


def test_the_worst_are_those_of_a_thousand_and_undefined_sizes_come_first():
    sizes = np.arange(2999.0)
    assert without_worst(sizes).sum() == 2997
    assert not without_worst(sizes)[-2:].any()
    assert without_worst(sizes[:999]).all()
    sizes[7] = np.nan
    assert np.flatnonzero(~without_worst(sizes)).tolist() == [7, 2998]
