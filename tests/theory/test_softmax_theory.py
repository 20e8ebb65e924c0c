"""The softmax paper's closed forms, approximate loss and flow of two heads, against Monte Carlo, each other and the
paper's numbers."""

import numpy as np
import pytest
import torch

from analyses.lib.theory.approximate_loss import (
    approximate_loss,
    loss_gradients,
    manifold_loss,
    optimal_mu,
    single_head,
    step_terms,
    taylor_terms,
)
from analyses.lib.theory.softmax import (
    bayes_risk_limit,
    debiased_risk,
    gd_risk_limit,
    linear_attention_risk,
    manifold_mu,
    ridge_risk,
    vanilla_risk,
    vanilla_step_size,
)
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd, vanilla_gd
from mechinterp.icl.prompts import draw_prompts
from mechinterp.theory.softmax import debiased_step_size, two_head_flow
from tests.conftest import sampled

SETTINGS = [
    {"d_x": 5, "context_length": 40, "noise_var": 0.1},
    {"d_x": 3, "context_length": 7, "noise_var": 1.5},
    {"d_x": 8, "context_length": 2, "noise_var": 0.0},
]
SETTING = SETTINGS[0]
KINDS = {
    "vanilla": (vanilla_gd, vanilla_risk, vanilla_step_size),
    "debiased": (debiased_gd, debiased_risk, debiased_step_size),
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("eta", sampled([0.3, 0.9], keep=(0.3).__eq__))
@pytest.mark.parametrize("kind", KINDS)
def test_risk_is_the_monte_carlo_mean_of_the_squared_error(setting, eta, kind):
    learner, risk, _ = KINDS[kind]
    task = TaskConfig(**setting)
    prompts = draw_prompts(task, 50_000, seed=1)
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
    step_size = debiased_step_size(**SETTING)
    assert 2 * 1e-4 * manifold_mu(1e-4, **SETTING) == pytest.approx(step_size, rel=1e-6)


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


@pytest.fixture
def heads() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=4) * 0.3, random.normal(size=4)


def test_gradients_are_those_of_the_loss(heads):
    omega, mu = (torch.tensor(part, requires_grad=True) for part in heads)
    c = 1.1 / 40
    inner = torch.outer(omega, omega)
    loss = 1.1 - 2 * mu @ omega + mu @ (inner + c * torch.exp(5 * inner)) @ mu
    loss.backward()
    assert approximate_loss(*heads, **SETTING) == pytest.approx(loss.item(), rel=1e-12)
    d_omega, d_mu = loss_gradients(*heads, **SETTING)
    np.testing.assert_allclose(d_omega, omega.grad.numpy(), rtol=1e-12)
    np.testing.assert_allclose(d_mu, mu.grad.numpy(), rtol=1e-12)


def test_taylor_terms_add_up_to_the_loss(heads):
    omega, mu = heads
    p = mu @ omega
    terms = taylor_terms(omega, mu, **SETTING)
    expected = 1.1 - 2 * p + p**2 + terms.sum()
    assert approximate_loss(omega, mu, **SETTING) == pytest.approx(expected, rel=1e-12)
    assert terms[0] == pytest.approx(1.1 / 40 * mu.sum() ** 2)
    assert (terms >= 0).all()


def test_step_terms_add_up_to_the_gradients(heads):
    terms = step_terms(*heads, **SETTING)
    d_omega, d_mu = loss_gradients(*heads, **SETTING)
    np.testing.assert_allclose(terms.mu, -d_mu / 2, rtol=1e-12)
    np.testing.assert_allclose(terms.omega, -d_omega / 2, rtol=1e-12)
    balanced = step_terms(np.array([0.1, -0.1]), np.array([3.0, -3.0]), **SETTING)
    assert (balanced.zero_sum == 0).all()
    assert (step_terms(np.zeros(3), np.arange(3.0), **SETTING).homogenising == 0).all()


@pytest.mark.parametrize("gamma", [0.05, 0.13, 0.3])
def test_the_manifold_is_where_mu_is_best(gamma: float):
    omega = gamma * np.array([1.0, 1.0, -1.0, 0.0])
    total = manifold_mu(gamma, **SETTING)
    mu = total * np.array([0.3, 0.7, -1.0, 0.0])
    loss = approximate_loss(omega, mu, **SETTING)
    assert loss == pytest.approx(manifold_loss(gamma, **SETTING), rel=1e-12)
    best = optimal_mu(omega, **SETTING)
    assert best[:2].sum() == pytest.approx(total)
    assert approximate_loss(omega, best, **SETTING) == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(loss_gradients(omega, mu, **SETTING)[1], 0, atol=1e-12)


def test_the_single_head_is_a_minimum():
    omega, mu = single_head(**SETTING)
    gradients = loss_gradients(np.array([omega]), np.array([mu]), **SETTING)
    np.testing.assert_allclose(gradients, 0, atol=1e-12)
    loss = approximate_loss(np.array([omega]), np.array([mu]), **SETTING)
    assert loss == pytest.approx(0.37207, abs=1e-5)


# Two opposite heads under gradient flow; what becomes of them late is measured by softmax/figure_22_flow.


def two_heads(*times: float):
    return two_head_flow(np.array(times), start=1e-3, **SETTING)


def test_the_flow_descends_half_the_approximate_loss():
    time = np.linspace(0, 12, 2401)
    run = two_heads(*time)
    rates = np.gradient(run.omega, time), np.gradient(run.mu, time)
    for at in (800, 1500, 1700, 2300):
        pair = [np.array([value, -value]) for value in (run.omega[at], run.mu[at])]
        d_omega, d_mu = loss_gradients(*pair, **SETTING)
        assert rates[0][at] == pytest.approx(-d_omega[0] / 2, rel=1e-3, abs=1e-5)
        assert rates[1][at] == pytest.approx(-d_mu[0] / 2, rel=1e-3, abs=1e-5)
        half = approximate_loss(*pair, **SETTING) / 2
        assert run.half_loss[at] == pytest.approx(half, rel=1e-10)
    assert (np.diff(run.half_loss) < 0).all()


def test_the_peak_is_where_omega_stops_growing():
    run = two_heads(0.0, 30.0)
    at = two_heads(run.peak_time)
    assert run.peak_omega == pytest.approx(at.omega[0], rel=1e-6)
    product = 2 * at.mu[0] * at.omega[0]
    balance = product * (1 + 5 * 1.1 / 40 * np.cosh(5 * at.omega[0] ** 2))
    assert balance == pytest.approx(1, rel=1e-6)
    assert np.isnan(two_heads(0.0, 3.0).peak_time)


@pytest.mark.parametrize(
    ("d_x", "length", "peak", "when"), [(25, 200, 0.3701, 6.47), (100, 800, 0.2179, 5.71)]
)
def test_peaks_at_other_sizes(d_x: int, length: int, peak: float, when: float):
    setting = {"d_x": d_x, "context_length": length, "noise_var": 0.1}
    run = two_head_flow(np.array([0.0, 12.0]), start=1e-3, **setting)
    assert run.peak_omega == pytest.approx(peak, rel=2e-3)
    assert run.peak_time == pytest.approx(when, rel=7e-3)
