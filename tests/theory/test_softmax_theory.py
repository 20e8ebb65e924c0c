"""Closed forms against Monte Carlo, against each other and against the paper's numbers."""

import numpy as np
import pytest

from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd, vanilla_gd
from mechinterp.icl.prompts import sample_prompts
from mechinterp.theory.softmax import (
    bayes_risk_limit,
    debiased_risk,
    debiased_step_size,
    gd_risk_limit,
    linear_attention_risk,
    manifold_mu,
    ridge_risk,
    vanilla_risk,
    vanilla_step_size,
)

SETTINGS = [
    {"d_x": 5, "context_length": 40, "noise_var": 0.1},
    {"d_x": 3, "context_length": 7, "noise_var": 1.5},
    {"d_x": 8, "context_length": 2, "noise_var": 0.0},
]
KINDS = {
    "vanilla": (vanilla_gd, vanilla_risk, vanilla_step_size),
    "debiased": (debiased_gd, debiased_risk, debiased_step_size),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("eta", [0.3, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_risk_is_the_monte_carlo_mean_of_the_squared_error(setting, eta, kind):
    learner, risk, _ = KINDS[kind]
    task = TaskConfig(**setting)
    prompts = sample_prompts(task, 200_000, seed=1)
    squares = (learner(prompts, eta=eta) - prompts.y_query).square()[:, 0].double().numpy()
    mean, sem = mean_and_sem(squares)
    assert abs(mean - risk(eta, **setting)) < 4 * sem
    assert sem < 0.02 * mean


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_step_size_minimises_the_exact_risk(setting, kind):
    _, risk, step_size = KINDS[kind]
    eta, h = step_size(**setting), 1e-4
    slope = (risk(eta + h, **setting) - risk(eta - h, **setting)) / (2 * h)
    assert abs(slope) < 1e-10
    assert risk(eta, **setting) < min(risk(eta - 0.05, **setting), risk(eta + 0.05, **setting))


def test_manifold_mu_tends_to_half_the_optimal_step_for_small_gamma():
    step_size = debiased_step_size(**SETTINGS[0])
    assert 2 * 1e-4 * manifold_mu(1e-4, **SETTINGS[0]) == pytest.approx(step_size, rel=1e-6)


def test_manifold_mu_refuses_a_gamma_that_is_not_positive():
    with pytest.raises(ValueError, match=r"gamma must be > 0, got 0\.0\."):
        manifold_mu(0.0, **SETTINGS[0])


@pytest.mark.slow
def test_limits_of_the_risks():
    for noise_var, ratio in ((3.0, 0.2), (0.1, 0.125)):
        setting = {"d_x": 4000, "context_length": round(4000 / ratio), "noise_var": noise_var}
        limit = gd_risk_limit(ratio, noise_var=noise_var)
        assert vanilla_risk(vanilla_step_size(**setting), **setting) == pytest.approx(
            limit, rel=1e-3
        )
        assert bayes_risk_limit(ratio, noise_var=noise_var) < limit
    setting = {"d_x": 100, "context_length": 800, "noise_var": 0.1}
    risk, sem = ridge_risk(n_draws=200, rng=np.random.default_rng(0), **setting)
    assert risk == pytest.approx(bayes_risk_limit(0.125, noise_var=0.1), abs=5 * sem + 2e-4)


def test_linear_attention_turns_up_beyond_its_length():
    setting = {"trained_length": 40, "d_x": 5, "noise_var": 0.1}
    risks = [linear_attention_risk(context_length=L, **setting) for L in (10, 40, 60, 200)]
    assert risks == pytest.approx([0.7462, 0.2398, 0.3646, 11.60], rel=1e-3)
