"""Labels of models whose pattern is known by construction, and what labels may not depend on."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.lib.theory.softmax import manifold_mu
from mechinterp.analysis.one_layer.classify import Thresholds, classify
from mechinterp.checkpoints.checkpoint import Checkpoint, save
from mechinterp.checkpoints.load import load
from mechinterp.config import CovarianceConfig, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    kernel_head,
    zero_head,
)
from mechinterp.models.heads import AttentionWeights, stack
from mechinterp.models.weights import weights_of_layer
from mechinterp.theory.softmax import debiased_step_size
from mechinterp.training.one_layer.step import initial_weights
from tests.analysis.test_labels import assert_undetermined

PAPER = {"d_x": 5, "context_length": 40, "noise_var": 0.1}


def on_manifold(gamma: float, positive: list[float], negative: list[float]) -> AttentionWeights:
    """Heads on the solution manifold; the lists split mu_gamma over the heads of each sign."""
    total = manifold_mu(gamma, **PAPER)
    omega = [gamma] * len(positive) + [-gamma] * len(negative)
    mu = [total * share for share in positive] + [-total * share for share in negative]
    return diagonal_heads(omega, mu, d_x=5)


@pytest.mark.parametrize("omega", [0.05, 0.13])
def test_a_pair_is_debiased_gd_with_its_step_size(omega):
    found = classify(debiased_gradient_step(0.8, omega, d_x=5))
    assert found.pattern == "debiased_gd"
    assert found.labels == ("positive", "negative")
    assert found.scales.eta[0] == pytest.approx(0.8, rel=1e-12)
    assert found.scales.zero_sum == pytest.approx(0, abs=1e-12)
    assert found.scales.omega_spread == pytest.approx(0, abs=1e-12)
    assert found.sign_matching
    assert found.substitution.r2 > 0.999
    assert found.scales.eta_optimal == pytest.approx(debiased_step_size(**PAPER))


def test_the_closed_form_stands_in_better_for_smaller_omega():
    models = (debiased_gradient_step(0.8, omega, d_x=5) for omega in (0.1, 0.05))
    gaps = [1 - classify(model).learner.r2 for model in models]
    # The predictions differ by O(omega^2), so their squared distance falls sixteenfold.
    assert gaps[0] / gaps[1] == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize("omega", [0.5, -0.5])
def test_one_head_is_a_kernel_smoother(omega):
    found = classify(kernel_head(omega, 3 * omega, d_x=5))
    assert found.pattern == "kernel_regression"
    assert found.labels == ("positive" if omega > 0 else "negative",)
    assert found.substitution.r2 == pytest.approx(1, abs=1e-12)


def test_two_heads_of_one_sign_are_never_debiased_gd():
    found = classify(diagonal_heads([0.528, 0.575], [0.955, 0.507], d_x=5))
    assert found.pattern == "kernel_regression"
    assert found.labels == ("positive", "positive")


@pytest.mark.slow
def test_heads_on_the_solution_manifold_are_one_step():
    found = classify(on_manifold(0.13, [0.4, 0.6], [0.1, 0.2, 0.7]))
    assert found.pattern == "debiased_gd"
    assert found.scales.eta[0] == pytest.approx(2 * 0.13 * manifold_mu(0.13, **PAPER))


def test_a_weak_head_is_a_dummy_whatever_its_circuits():
    weak = diagonal_heads([0.4], [-1e-3], d_x=5)  # its signs do not match, but it does nothing
    found = classify(stack([debiased_gradient_step(0.88, 0.1, d_x=5), weak, zero_head(d_x=5)]))
    assert found.labels == ("positive", "negative", "dummy", "dummy")
    assert found.pattern == "debiased_gd"
    assert found.share.sum() == pytest.approx(1)
    assert found.share[3] == 0


def test_no_active_head_is_undetermined():
    found = classify(zero_head(d_x=5))
    reason = "no head is active, or the active heads cancel each other"
    assert_undetermined(found, reason, "dummy")
    assert not found.sign_matching


@pytest.mark.parametrize(
    ("omega", "mu", "second", "reason"),
    [
        ([0.3, -0.3], [2, 2], "mismatched", r"head 1 is mismatched: omega is -0\.3 and mu is 2"),
        ([0.13, -0.2], [3, -3], "negative", r"omega_spread is 0\.538, above the limit 0\.25"),
        ([0.13, -0.13], [3, -2], "negative", r"zero_sum is 0\.200, above the limit 0\.05"),
        (
            [1.5, -1.5],
            [0.3, -0.3],
            "negative",
            r"learner_r2 is .* for debiased_gd, below the limit 0\.9",
        ),
    ],
)
def test_what_is_not_clear_is_undetermined_and_says_the_number(omega, mu, second, reason):
    found = classify(diagonal_heads(omega, mu, d_x=5))
    assert_undetermined(found, "", "positive", second)
    assert re.search(reason, found.reason)


def test_the_threshold_on_the_qk_circuit_is_above_random_heads():
    random = initial_weights(ExperimentConfig(model=ModelConfig(n_heads=20_000)))
    assert (random.qk_diagonal > Thresholds().qk_diagonal).float().mean() < 1e-3


def test_heads_that_only_average_or_only_read_x_are_unstructured():
    average, eye = diagonal_heads([0.0], [1.0], d_x=5), torch.eye(6, dtype=torch.float64)
    reads_x = replace(average, W_V=eye[None], W_O=1 - eye[None, :, 5:])
    for weights, pattern in ((average, "undetermined"), (reads_x, "unstructured")):
        found = classify(weights)
        assert (found.labels, found.pattern) == (("unstructured",), pattern)
    assert (
        "head 0 is unstructured: qk_diagonal is 0.000, below the limit 0.8"
        in classify(average).reason
    )
    assert (
        "random weights reach the same values: qk_diagonal_best p = 1" in classify(reads_x).reason
    )
    assert np.isnan(classify(reads_x).scales.zero_sum)
    assert np.isinf(classify(stack([kernel_head(0.5, 1.5, d_x=5), average])).scales.omega_spread)


def test_mixed_entries_of_omega():
    weights = diagonal_heads([0.4, -0.4], [2.0, -2.0], d_x=5)
    weights.W_K[0, 0, 0] *= -1
    found = classify(weights)
    assert found.labels[0] == "mixed"
    assert "omega runs from -0.4 to 0.4" in found.reason


@pytest.mark.slow
def test_label_does_not_depend_on_the_scale_of_the_responses():
    weights = on_manifold(0.13, [1.0], [1.0])
    # y is ten times as large, s^2 / signal the same
    found = classify(weights, TaskConfig(beta_var=20.0, noise_var=10.0))
    assert found.pattern == "debiased_gd"
    assert found.scales.eta_optimal == pytest.approx(debiased_step_size(**PAPER))


def test_general_covariance_has_no_isotropic_optimum():
    task = TaskConfig(covariance=CovarianceConfig(kind="kms", rho=0.5))
    found = classify(on_manifold(0.13, [1.0], [1.0]), task)
    assert np.isnan(found.scales.eta_optimal)


@pytest.mark.parametrize(
    ("d_y", "d_x", "message"),
    [
        (2, 2, "must have the model's d_y = 2, got d_y = 1"),
        (1, 3, "must have the model's d_x = 2, got d_x = 3"),
    ],
)
def test_what_cannot_be_classified_is_refused(d_y, d_x, message):
    with pytest.raises(ValueError, match=message):
        classify(diagonal_heads([0.1], [1.0], d_x=2, d_y=d_y), TaskConfig(d_x=d_x))


def test_frame_and_repr():
    found = classify(debiased_gradient_step(0.8, 0.1, d_x=5))
    assert list(found.to_frame().columns[:3]) == ["head", "label", "share"]
    assert repr(found).startswith("Classification(debiased_gd)\nWhat it computes: one step of")
    assert len(found.plot().data) == 2


@pytest.mark.slow
@pytest.mark.parametrize("context_only", [True, False])
def test_two_rectified_heads_are_one_linear_step(tmp_path: Path, context_only: bool):
    # max(s, 0) - max(-s, 0) = s: heads of opposite omega and mu make a step of mu * omega.
    omega, mu = 0.4, 2.0
    heads = replace(diagonal_heads([omega, -omega], [mu, -mu], d_x=5), score="relu/L")
    source: AttentionWeights | Checkpoint = heads
    if context_only:
        model = ModelConfig(n_heads=2, d_head=6, score="relu/L", context_only=True)
        weights = weights_of_layer(heads, model=model)
        save(tmp_path / "relu", ExperimentConfig(model=model), weights, step=0)
        source = load(tmp_path / "relu")
    found = classify(source)
    assert found.pattern == "linear_gd"
    assert found.scales.eta[0] == pytest.approx(mu * omega, rel=1e-6)
    assert found.learner.r2 == pytest.approx(1, abs=1e-9)
    # One of them predicts s/2 + |s|/2, of which a step has the first half alone.
    one = replace(diagonal_heads([omega], [mu], d_x=5), score="relu/L")
    alone = classify(one)
    assert alone.scales.eta[0] == pytest.approx(mu * omega / 2, rel=1e-12)
    assert alone.learner.r2 < 0.95
