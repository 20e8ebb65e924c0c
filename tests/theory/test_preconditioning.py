"""Preconditioned steps: exact risks against Monte Carlo, optima against their neighbours."""

import numpy as np
import pytest
import torch

from analyses.lib.theory.preconditioning import (
    debiased_preconditioner,
    debiased_step_risk,
    vanilla_preconditioner,
    vanilla_step_risk,
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
    for prompts in prompt_chunks(TASK, 100_000, seed=2):
        x = prompts.x - prompts.x.mean(1, keepdim=True) if kind == "debiased" else prompts.x
        moment = (x.mT @ prompts.y)[..., 0] / 40
        y_hat = torch.einsum("bi,ij,bj->b", prompts.x_query, matrix, moment)
        errors.append((y_hat - prompts.y_query[:, 0]).square().numpy())
    mean, sem = mean_and_sem(np.concatenate(errors).astype(np.float64))
    assert mean == pytest.approx(KINDS[kind][1](gamma, SIGMA, **SETTING), abs=4 * sem)
