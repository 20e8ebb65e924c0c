"""Two heads under gradient flow: the phases, the peak, the exponents of the late drift."""

import numpy as np
import pytest

from analyses.lib.theory.approximate_loss import approximate_loss, loss_gradients
from analyses.lib.theory.softmax import manifold_mu
from analyses.lib.theory.two_heads import late_mu
from mechinterp.theory.softmax import debiased_step_size, two_head_flow

SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}


def flow(*times: float):
    return two_head_flow(np.array(times), start=1e-3, **SETTING)


def test_the_flow_descends_half_the_approximate_loss():
    time = np.linspace(0, 12, 2401)
    run = flow(*time)
    rates = np.gradient(run.omega, time), np.gradient(run.mu, time)
    for at in (800, 1500, 1700, 2300):
        pair = [np.array([value, -value]) for value in (run.omega[at], run.mu[at])]
        d_omega, d_mu = loss_gradients(*pair, **SETTING)
        assert rates[0][at] == pytest.approx(-d_omega[0] / 2, rel=1e-3, abs=1e-5)
        assert rates[1][at] == pytest.approx(-d_mu[0] / 2, rel=1e-3, abs=1e-5)
        half = approximate_loss(*pair, **SETTING) / 2
        assert run.half_loss[at] == pytest.approx(half, rel=1e-10)
    assert (np.diff(run.half_loss) < 0).all()


@pytest.mark.slow
def test_the_published_trajectory():
    # After the peak, where its Euler steps of 0.01 are accurate.
    run = flow(12.0, 30.0, 100.0, 1000.0, 10_000.0)
    np.testing.assert_allclose(run.omega, [0.5046, 0.3979, 0.3106, 0.2058, 0.1394], rtol=1e-3)
    np.testing.assert_allclose(run.mu, [0.7962, 1.0653, 1.3958, 2.1297, 3.1510], rtol=1e-3)


def test_phase_one_and_two():
    time = np.array([1.0, 3.0, 4.0, 5.0, 6.0])
    run = flow(*time)
    # He et al. 2025, (B.13): mu overtakes omega. Before, omega = mu = start e^t.
    k = 1 + 1.1 * 5 / 40
    overtaking = (2 * k + (1e6 - 2 * k) * np.exp(-2 * time)) ** -0.5
    assert run.mu == pytest.approx(overtaking, rel=3e-3)
    early = 1.1 / 2 - 2e-6 * (np.exp(2 * time[:3]) - 1)
    assert run.half_loss[:3] == pytest.approx(early, rel=5e-4)


def test_the_peak_is_where_omega_stops_growing():
    run = flow(0.0, 30.0)
    at = flow(run.peak_time)
    assert run.peak_omega == pytest.approx(at.omega[0], rel=1e-6)
    product = 2 * at.mu[0] * at.omega[0]
    balance = product * (1 + 5 * 1.1 / 40 * np.cosh(5 * at.omega[0] ** 2))
    assert balance == pytest.approx(1, rel=1e-6)
    assert np.isnan(flow(0.0, 3.0).peak_time)


@pytest.mark.slow
def test_the_late_drift_has_the_power_one_sixth():
    time = np.geomspace(1e3, 1e4, 20)
    run = flow(0.0, *time)
    exponents = np.polyfit(np.log(time), np.log(np.stack([run.mu, run.omega], 1)[1:]), 1)[0]
    assert exponents == pytest.approx([0.170, -0.169], abs=0.003)
    assert run.mu[-1] == pytest.approx(late_mu(time[-1:], **SETTING)[0], rel=3e-3)
    settled = manifold_mu(run.omega[-1:], **SETTING)[0]  # (B.17)
    assert run.mu[-1] == pytest.approx(settled, rel=1e-3)
    step_size = 2 * run.mu[-1] * run.omega[-1]
    assert step_size == pytest.approx(debiased_step_size(**SETTING), rel=2e-3)


@pytest.mark.parametrize(
    ("d_x", "length", "peak", "when"), [(25, 200, 0.3701, 6.47), (100, 800, 0.2179, 5.71)]
)
def test_peaks_at_other_sizes(d_x: int, length: int, peak: float, when: float):
    setting = {"d_x": d_x, "context_length": length, "noise_var": 0.1}
    run = two_head_flow(np.array([0.0, 12.0]), start=1e-3, **setting)
    assert run.peak_omega == pytest.approx(peak, rel=2e-3)
    assert run.peak_time == pytest.approx(when, rel=7e-3)
