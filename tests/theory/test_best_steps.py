"""Steps with a matrix, and joint steps for several responses: exact risks against Monte Carlo, optima against their
neighbours and closed forms."""

import numpy as np
import pytest
import torch

from analyses.lib.theory.learners import joint_debiased_gd
from analyses.lib.theory.preconditioning import (
    debiased_preconditioner,
    debiased_step_risk,
    vanilla_preconditioner,
    vanilla_step_risk,
)
from analyses.lib.theory.several_tasks import (
    StepMoments,
    joint_step,
    joint_step_risk,
    step_moments,
)
from analyses.lib.theory.softmax import debiased_risk, vanilla_risk
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import covariance_matrix, prompt_chunks

TASK = TaskConfig(covariance=CovarianceConfig(kind="kms", rho=0.5))
SIGMA = covariance_matrix(TASK.covariance, 5)
SETTING = {"context_length": 40, "noise_var": 0.1}
KINDS = {
    "vanilla": (vanilla_preconditioner, vanilla_step_risk),
    "debiased": (debiased_preconditioner, debiased_step_risk),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_preconditioner_is_best(kind: str):
    preconditioner, risk = KINDS[kind]
    best = preconditioner(SIGMA, **SETTING)
    least = risk(best, SIGMA, **SETTING)
    random = np.random.default_rng(0)
    for _ in range(20):
        nearby = risk(best + 1e-3 * random.normal(size=(5, 5)), SIGMA, **SETTING)
        assert least < nearby < least + 1e-4
    inverse, eye = np.linalg.inv(SIGMA), np.eye(5)
    for other in (inverse, eye):
        assert min(risk(a * other, SIGMA, **SETTING) for a in np.linspace(0.1, 2, 200)) > least


def test_risks_at_the_published_setting():
    eye = np.eye(5)
    for eta in (0.5, 0.88):
        for risk, isotropic in (
            (vanilla_step_risk, vanilla_risk),
            (debiased_step_risk, debiased_risk),
        ):
            expected = isotropic(eta, d_x=5, **SETTING)
            assert risk(eta * eye, eye, **SETTING) == pytest.approx(expected)
    gamma = debiased_preconditioner(SIGMA, **SETTING)
    expected = [1.091, 1.288, 1.289, 1.288, 1.091]
    np.testing.assert_allclose(np.diag(gamma), expected, atol=1e-3)
    assert debiased_step_risk(gamma, SIGMA, **SETTING) == pytest.approx(0.23677, abs=1e-5)
    gamma = vanilla_preconditioner(SIGMA, **SETTING)
    assert vanilla_step_risk(gamma, SIGMA, **SETTING) == pytest.approx(0.23393, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_risks_against_monte_carlo(kind: str):
    gamma = np.random.default_rng(1).normal(size=(5, 5)) * 0.3 + np.eye(5)
    matrix = torch.from_numpy(gamma).to(torch.float32)
    errors = []
    for prompts in prompt_chunks(TASK, 40_000, seed=2):
        x = prompts.x - prompts.x.mean(1, keepdim=True) if kind == "debiased" else prompts.x
        moment = (x.mT @ prompts.y)[..., 0] / 40
        y_hat = torch.einsum("bi,ij,bj->b", prompts.x_query, matrix, moment)
        errors.append((y_hat - prompts.y_query[:, 0]).square().numpy())
    mean, sem = mean_and_sem(np.concatenate(errors).astype(np.float64))
    assert mean == pytest.approx(KINDS[kind][1](gamma, SIGMA, **SETTING), abs=4 * sem)


# One step for two responses.

SUPPORTS = ((0, 1, 2, 3), (2, 3, 4, 5))
JOINT = {"d_x": 6, "context_length": 48, "beta_var": 1 / 6, "noise_var": 0.1}


def moments_of(*, shared: bool) -> StepMoments:
    return step_moments(SUPPORTS, **JOINT, query_noise_var=0.1, shared_beta=shared)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_risk_is_that_of_prompts(shared: bool):
    task = TaskConfig(d_y=2, supports=SUPPORTS, shared_beta=shared, **JOINT)
    moments = moments_of(shared=shared)
    theta = joint_step(moments) + 0.1 * np.random.default_rng(0).standard_normal((2, 2, 6))
    squares = []
    for prompts in prompt_chunks(task, 40_000, seed=0):
        error = joint_debiased_gd(prompts, theta=theta) - prompts.y_query
        squares.append(error.square().mean(1))
    mean, sem = mean_and_sem(torch.cat(squares).double().numpy())
    assert abs(mean - joint_step_risk(theta, moments)) < 3 * sem


@pytest.mark.parametrize("shared", [True, False])
def test_the_joint_step_is_best(shared: bool):
    moments = moments_of(shared=shared)
    best = joint_step(moments)
    generator = np.random.default_rng(1)
    for _ in range(20):
        other = best + 0.01 * generator.standard_normal(best.shape)
        assert joint_step_risk(other, moments) > joint_step_risk(best, moments)


def test_separate_task_vectors_take_separate_steps():
    theta = joint_step(moments_of(shared=False))
    on = np.array([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    np.testing.assert_allclose(theta[[0, 1], [0, 1]], on / (1 + (4 + 0.6) / 48), atol=1e-12)
    assert np.abs(theta[[0, 1], [1, 0]]).max() < 1e-12


def test_a_shared_task_vector_is_learned_from_both_responses():
    theta = joint_step(moments_of(shared=True))
    # On shared coordinates the two responses are alike; elsewhere the other one explains away what they share.
    np.testing.assert_allclose(theta[0, 0, 2:4], theta[0, 1, 2:4], rtol=1e-12)
    np.testing.assert_allclose(theta[0, 1, :2] / theta[0, 0, :2], -2 / (4 + 0.6), rtol=1e-12)
    assert np.abs(theta[0, :, 4:]).max() < 1e-12
    np.testing.assert_allclose(theta[1, ::-1, ::-1], theta[0], rtol=1e-12, atol=1e-12)
