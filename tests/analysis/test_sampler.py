"""Hamiltonian Monte Carlo: laws that are known, steps that overflow, and what draws are worth."""

import numpy as np
import pytest

from mechinterp.analysis.training.sampler import (
    Chains,
    DualAveraging,
    LocalLoss,
    Tempered,
    effective_draws,
    hamiltonian_draws,
    mean_error,
    r_hat,
)


def autoregressive(correlation: float, n_draws: int = 4000, n_chains: int = 6) -> np.ndarray:
    """Chains of variance 1 whose neighbouring draws are correlated."""
    noise = np.random.default_rng(0).standard_normal((n_chains, n_draws))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for draw in range(1, n_draws):
        new = (1 - correlation**2) ** 0.5 * noise[:, draw]
        values[:, draw] = correlation * values[:, draw - 1] + new
    return values


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_correlated_draws_count_as_fewer(correlation: float):
    values = autoregressive(correlation)
    expected = values.size * (1 - correlation) / (1 + correlation)
    # The relative error of an autocorrelation time summed over w lags is sqrt(2 (2 w + 1) / n), w about 6 of them.
    lags = 6 * (1 + correlation) / (1 - correlation)
    allowed = 4 * (2 * (2 * lags + 1) / values.size) ** 0.5
    assert abs(effective_draws(values) / expected - 1) < allowed
    assert mean_error(values) == pytest.approx(expected**-0.5, rel=allowed)


def test_alternating_draws_do_not_count_as_more_than_there_are():
    values = np.tile([1.0, -1.0], (4, 100)) + 0.01 * np.random.default_rng(0).normal(size=(4, 200))
    assert effective_draws(values) <= 800


def test_chains_that_disagree_are_told_and_make_the_error_large():
    values = np.random.default_rng(0).standard_normal((4, 500))
    assert r_hat(values) < 1.02
    apart = values + 5 * np.arange(4)[:, None]
    assert r_hat(apart) > 3
    assert effective_draws(apart) < 10
    assert mean_error(apart) > 2
    still = np.ones((4, 500))
    assert effective_draws(still) == 0
    assert np.isnan([r_hat(still), mean_error(still)]).all()


def test_chains_that_share_a_trend_do_not_agree_with_their_own_halves():
    drift = np.linspace(-2, 2, 500)
    trend = np.random.default_rng(0).standard_normal((4, 500)) + drift
    # Eight halves have means of -1 or 1, whose variance is 8/7, and variances of 1 + 1/3; whole chains agree.
    expected = np.sqrt(1 + 8 / 7 / (1 + 1 / 3))
    # A mean of 250 draws is known to 0.073, so that the ratio is known to 0.016.
    assert r_hat(trend) == pytest.approx(expected, abs=4 * 0.016)
    assert r_hat(trend - drift) < 1.02


@pytest.mark.slow
def test_a_gaussian_has_its_mean_and_variance():
    curvatures = np.array([1.0, 10.0, 100.0, 1000.0])

    def quadratic(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (curvatures * points**2).sum(1) / 2, curvatures * points

    law = Tempered(LocalLoss(quadratic, np.zeros(4), "4 entries", "a quadratic"), 1e3, 1.0)
    excess, accepted = hamiltonian_draws(law, Chains(8, 500, 150, 20))
    # n_beta L is a sum of c_i chi^2 / 2, c_i = n_beta h / (n_beta h + 1).
    share = 1e3 * curvatures / (1e3 * curvatures + 1)
    error = mean_error(excess)
    assert abs(excess.mean() - share.sum() / 2) < 4 * error
    assert error < 0.06
    square = excess**2
    second = (share.sum() ** 2 + 2 * (share**2).sum()) / 4
    assert abs(square.mean() - second) < 4 * mean_error(square)
    assert abs(accepted.mean() - 0.9) < 0.08


def test_steps_that_overflow_are_rejected_and_the_seed_decides():
    def steep(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        fourth = np.exp(points**4).sum(1)
        return fourth, 4 * points**3 * np.exp(points**4)

    law = Tempered(LocalLoss(steep, np.zeros(3), "3 entries", "a well"), 5.0, 1.0)
    (excess, accepted), (again, _), (other, _) = (
        hamiltonian_draws(law, Chains(4, 100, 60, 8), seed=seed) for seed in (0, 0, 1)
    )
    assert np.isfinite(excess).all()
    assert excess.min() >= 0
    assert 0.3 < accepted.mean() <= 1
    np.testing.assert_array_equal(excess, again)
    assert not np.array_equal(excess, other)


def test_the_step_size_grows_while_all_is_accepted_and_falls_while_nothing_is():
    easy, hard = DualAveraging(0.1), DualAveraging(0.1)
    for _ in range(50):
        easy.update(1.0)
        hard.update(0.0)
    assert easy.average > 0.2
    assert hard.average < 0.01


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("n_chains", 1, 2), ("n_draws", 7, 8), ("n_warmup", 0, 8), ("n_leapfrog", 0, 1)],
)
def test_chains_have_a_least_length(name: str, value: int, least: int):
    with pytest.raises(ValueError, match=f"{name} must be >= {least}, got {value}"):
        Chains(**{name: value})
