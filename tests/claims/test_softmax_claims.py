"""Claims of He et al. 2025 (arXiv 2503.12734) on the shipped models; each test's name is the claim.

Tolerances are stated per claim. The paper's patterns do not appear for every seed: which shipped
models ended otherwise is stated below and tested too.
"""

from functools import cache

import numpy as np
import pytest
import torch

from mechinterp.analysis.learners.fits import LEARNERS, fit_learners
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import TaskConfig, override
from mechinterp.theory.softmax import debiased_step_size
from mechinterp.training.one_layer.pack import Pack
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import CHECKPOINTS, assert_close_to_rounding

pytestmark = pytest.mark.slow

SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
NAMES = sorted(file.parent.name for file in CHECKPOINTS.glob("softmax-h*/config.json"))
SINGLE = [name for name in NAMES if name.startswith("softmax-h1-")]
# Two heads that ended with one sign: a single kernel smoother split in two.
SPLIT = ["softmax-h2-s11", "softmax-h2-s8", "softmax-h2-s9"]
# One head with 1% of the output reads y through its QK circuit; the others are debiased GD.
ODD_HEAD = ["softmax-h8-s1"]
PAIRED = [name for name in NAMES if name not in SINGLE + SPLIT + ODD_HEAD]


@cache
def checkpoint(name):
    return load(CHECKPOINTS / name)


@cache
def label(name):
    return classify(checkpoint(name))


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


def test_the_sweep_file_names_the_shipped_models_with_their_configs():
    models = load_sweep(CHECKPOINTS.parent / "analyses" / "sweeps" / "softmax.json")
    assert models == {name: checkpoint(name).config for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_starts_from_the_weights_its_config_says(name):
    start, expected = (
        checkpoint(name).snapshots[0].circuits,
        initial_weights(checkpoint(name).config),
    )
    for part in ("W_Q", "W_K", "W_V", "W_O"):
        assert_close_to_rounding(getattr(start, part), getattr(expected, part))


@pytest.mark.parametrize("name", ["softmax-h1-s0", "softmax-h2-s9", "softmax-h3-s1"])
def test_a_shipped_model_is_remade_from_its_config_alone(name):
    # It was trained in the company of others; alone the sums round differently, and nothing else does.
    config = override(checkpoint(name).config, "train.steps=1000")
    alone = Pack({name: config})
    alone.advance()
    weights, expected = (
        alone.results()[name].weights.circuits,
        checkpoint(name).snapshots[1000].circuits,
    )
    for part in ("QK", "OV"):
        torch.testing.assert_close(
            getattr(weights, part), getattr(expected, part), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", SINGLE)
def test_one_head_is_a_kernel_smoother_with_omega_052_and_mu_149(name):
    found = label(name)
    assert found.pattern == "kernel_regression"
    assert abs(found.circuits.omega_mean[0]) == pytest.approx(0.52, abs=0.015)
    assert abs(found.circuits.mu[0, 0]) == pytest.approx(1.49, abs=0.04)


@pytest.mark.parametrize("name", PAIRED)
def test_several_heads_are_debiased_gd(name):
    assert label(name).pattern == "debiased_gd"


@pytest.mark.parametrize("n_heads", [2, 3, 4, 8])
def test_most_seeds_are_debiased_gd(n_heads):
    prefix = f"softmax-h{n_heads}-"
    assert 2 * sum(name.startswith(prefix) for name in PAIRED) > sum(
        name.startswith(prefix) for name in NAMES
    )


@pytest.mark.parametrize("name", PAIRED)
def test_omega_is_that_of_the_paper_give_or_take_adam_s_noise(name):
    found = label(name).circuits
    gamma = np.average(np.abs(found.omega_mean), weights=np.abs(found.mu[:, 0]))
    # 0.126 to 0.130; Adam moves it by 0.003.
    assert 0.123 <= gamma <= 0.133


@pytest.mark.parametrize("name", PAIRED)
def test_mu_sums_to_zero_within_3_percent_and_mu_omega_is_the_optimal_step_within_2(name):
    assert label(name).scales.zero_sum <= 0.03
    assert label(name).scales.eta[0] == pytest.approx(debiased_step_size(**SETTING), rel=0.02)


@pytest.mark.exhaustive
def test_losses_on_a_million_shared_prompts():
    models = {name: checkpoint(name) for name in SINGLE + PAIRED + ODD_HEAD}
    losses = shared_losses(models, TaskConfig(), n_prompts=1_000_000, seed=1)
    assert losses.loss_sem.max() < 0.001
    for name, loss in zip(losses.models, losses.loss[0], strict=True):
        assert loss == pytest.approx(0.404 if name in SINGLE else 0.243, abs=0.001), name


@pytest.mark.parametrize("name", PAIRED + ODD_HEAD)
def test_the_fit_says_debiased_gd(name):
    fits = fit_learners(checkpoint(name), context_lengths=[40], n_prompts=20_000)
    assert fits.best == "debiased_gd"
    assert fits.r2[0, LEARNERS.index("debiased_gd")] > 0.99
    assert fits.lead > 10 * fits.lead_sem
