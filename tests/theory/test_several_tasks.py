"""Steps for several responses: exact risks against Monte Carlo, optima against their neighbours and closed forms."""

import numpy as np
import pytest
import torch

from analyses.lib.theory.learners import joint_debiased_gd
from analyses.lib.theory.several_tasks import (
    StepMoments,
    joint_step,
    joint_step_of_rank,
    joint_step_risk,
    step_moments,
)
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import prompt_chunks

SUPPORTS = ((0, 1, 2, 3), (2, 3, 4, 5))
SETTING = {"d_x": 6, "context_length": 48, "beta_var": 1 / 6, "noise_var": 0.1}


def moments_of(*, shared: bool) -> StepMoments:
    return step_moments(SUPPORTS, **SETTING, query_noise_var=0.1, shared_beta=shared)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_risk_is_that_of_prompts(shared: bool):
    task = TaskConfig(d_y=2, supports=SUPPORTS, shared_beta=shared, **SETTING)
    moments = moments_of(shared=shared)
    theta = joint_step(moments) + 0.1 * np.random.default_rng(0).standard_normal((2, 2, 6))
    squares = []
    for prompts in prompt_chunks(task, 100_000, seed=0):
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("shared", "needed"), [(True, 3), (False, 2)])
def test_risk_falls_with_the_rank_until_it_is_that_of_the_best_step(shared: bool, needed: int):
    moments = moments_of(shared=shared)
    best = joint_step(moments)
    assert np.linalg.matrix_rank(best.reshape(4, 6)) == needed
    risks = [joint_step_risk(joint_step_of_rank(moments, rank), moments) for rank in (1, 2, 3)]
    least = joint_step_risk(best, moments)
    np.testing.assert_allclose(risks[needed - 1 :], least, rtol=1e-9)
    assert (np.diff(risks[:needed]) < -0.005).all()
