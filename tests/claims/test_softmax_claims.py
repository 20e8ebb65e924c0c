"""Claims of He et al. 2025 (arXiv 2503.12734) on the shipped models; each test's name is the claim.

Tolerances are stated per claim. Claims that do not hold for every seed are tested as what was found.
"""

from functools import cache

import numpy as np
import pytest
import torch

from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.fits import LEARNERS, fit_learners
from mechinterp.analysis.patterns import classify
from mechinterp.checkpoints.native import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.functional import replica_predictions, stack
from mechinterp.theory.softmax import debiased_step_size
from tests.conftest import CHECKPOINTS

pytestmark = pytest.mark.slow

SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("softmax-h*/config.json"))
MULTI = [name for name in NAMES if not name.startswith("softmax-h1-")]


@cache
def checkpoint(name):
    return load(CHECKPOINTS / name)


@cache
def label(name):
    return classify(checkpoint(name))


def converged(n_heads=None):
    """Models of several heads that ended as debiased gradient descent."""
    found = [name for name in MULTI if label(name).pattern == "debiased_gd"]
    return [name for name in found if n_heads is None or name.startswith(f"softmax-h{n_heads}-")]


@cache
def million_prompt_losses():
    """Loss and its standard error of every shipped model at L = 40, on the same million prompts."""
    weights = stack([checkpoint(name).weights for name in NAMES])
    heads = [checkpoint(name).config.model.n_heads for name in NAMES]
    squares = []
    for prompts in prompt_chunks(TaskConfig(), 1_000_000, seed=1):
        error = replica_predictions(weights, prompts, heads) - prompts.y_query[:, None]
        squares.append(error.square().mean(2))
    means, sems = mean_and_sem(torch.cat(squares).double().numpy())
    return {name: (mean, sem) for name, mean, sem in zip(NAMES, means, sems, strict=True)}


def test_every_head_count_is_shipped_with_three_seeds_at_the_paper_s_setting():
    for n_heads in (1, 2, 3, 4, 8):
        assert len([name for name in NAMES if name.startswith(f"softmax-h{n_heads}-")]) >= 3
    for name in NAMES:
        config = checkpoint(name).config
        assert config.task == TaskConfig(d_x=5, context_length=40, noise_var=0.1)
        assert (config.train.steps, config.train.batch_size, config.train.learning_rate) == (
            500_001,
            256,
            1e-3,
        )
        snapshots = (0, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
        assert tuple(checkpoint(name).snapshots) == snapshots
        assert checkpoint(name).history["step"].nunique() == 502


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MULTI])
def test_one_head_is_a_kernel_smoother_with_omega_052_and_mu_149(name):
    found = label(name)
    assert found.pattern == "kernel_regression"
    assert abs(found.circuits.omega_mean[0]) == pytest.approx(0.52, abs=0.015)
    assert abs(found.circuits.mu[0, 0]) == pytest.approx(1.49, abs=0.04)


def test_most_models_of_several_heads_are_debiased_gd():
    assert len(converged()) > len(MULTI) / 2
    for n_heads in (2, 3, 4, 8):
        of_this_size = [name for name in MULTI if name.startswith(f"softmax-h{n_heads}-")]
        assert len(converged(n_heads)) > len(of_this_size) / 2


@pytest.mark.parametrize("name", MULTI)
def test_several_heads_are_debiased_gd_or_else_one_kernel_smoother(name):
    # The claim that the patterns "consistently appear" does not hold for every seed (facts found here):
    # two heads may end with one sign, as a single kernel smoother split in two.
    assert label(name).pattern in ("debiased_gd", "kernel_regression")


@pytest.mark.parametrize("name", MULTI)
def test_omega_is_between_012_and_0135_and_homogeneous(name):
    if name not in converged():
        assert label(name).pattern == "kernel_regression"
        return
    found = label(name)
    total = np.abs(found.circuits.mu[:, 0])
    gamma = np.average(np.abs(found.circuits.omega_mean), weights=total)
    assert 0.12 < gamma < 0.135


@pytest.mark.parametrize("name", MULTI)
def test_mu_sums_to_zero_within_3_percent_and_mu_omega_is_the_optimal_step_within_2(name):
    if name not in converged():
        assert label(name).pattern == "kernel_regression"
        return
    assert label(name).zero_sum <= 0.03
    assert label(name).eta[0] == pytest.approx(debiased_step_size(**SETTING), rel=0.02)


def test_loss_is_0404_for_one_head_and_0243_for_converged_models():
    losses = million_prompt_losses()
    for name in NAMES:
        loss, sem = losses[name]
        assert sem < 0.001
        if name in converged():
            assert loss == pytest.approx(0.243, abs=0.003)
        else:
            # One head, or several that ended as one kernel smoother.
            assert loss == pytest.approx(0.404, abs=0.004)


@pytest.mark.parametrize("name", MULTI)
def test_the_fit_says_debiased_gd(name):
    if name not in converged():
        assert label(name).pattern == "kernel_regression"
        return
    fits = fit_learners(checkpoint(name), context_lengths=[40], n_prompts=20_000)
    assert fits.best == "debiased_gd"
    assert fits.r2[0, LEARNERS.index("debiased_gd")] > 0.99
    assert fits.lead > 10 * fits.lead_sem
