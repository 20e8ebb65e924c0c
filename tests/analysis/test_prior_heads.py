"""Heads and snapshots by how near they bring a model to the posterior mean of its pool and to ridge."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.pools.map import transient
from analyses.pools.prior_heads import _rises, prior_heads
from mechinterp.analysis.learners.priors import ERROR, compare_priors
from mechinterp.analysis.over_steps import OverSteps
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.weights import weights_of_layer
from mechinterp.training.one_layer.step import initial_weights

TASK = TaskConfig(d_x=3, context_length=5, n_tasks=2, beta_var=1.0, noise_var=0.25)
CONFIG = ExperimentConfig(
    task=TASK, model=ModelConfig(n_heads=3, score="linear/L"), train=TrainConfig(steps=20)
)

EFFECTS = ("weight_change", "dmmse_rise", "ridge_rise", "memory_excess")


def layer(seed: int = 0) -> AttentionWeights:
    return initial_weights(replace(CONFIG, seed=seed)).to(torch.float64)


def without(weights: AttentionWeights, head: int) -> AttentionWeights:
    W_O = weights.W_O.clone()
    W_O[head] = 0
    return weights.with_tensors({**weights.tensors, "W_O": W_O})


def test_a_mask_does_what_comparing_the_masked_model_says():
    weights = layer()
    found = prior_heads(weights, TASK, n_prompts=200, method="zero")
    full = compare_priors(weights, TASK, n_prompts=200).overall
    for head in range(3):
        masked = compare_priors(without(weights, head), TASK, n_prompts=200).overall
        change = masked.weight_dmmse - full.weight_dmmse
        assert found.weight_change[0, head] == pytest.approx(change[0])
        rise = masked.distance_dmmse - full.distance_dmmse
        assert found.dmmse_rise[0, head] == pytest.approx(rise[0])
        to_ridge = masked.distance_ridge - full.distance_ridge
        assert found.ridge_rise[0, head] == pytest.approx(to_ridge[1])
        assert found.memory_excess[0, head] == pytest.approx(rise[0] - to_ridge[0])


def test_a_head_of_zeros_has_no_effect_and_no_error():
    found = prior_heads(without(layer(), 1), TASK, n_prompts=100, method="zero")
    for name in EFFECTS:
        assert getattr(found, name)[0, 1] == 0
        assert getattr(found, f"{name}_sem")[0, 1] == 0
        assert getattr(found, f"{name}_sem")[0, 0] > 0
    assert (0, 1) not in found.memorises + found.generalises


@pytest.mark.slow
def test_standard_errors_of_heads_are_those_of_repeated_samples():
    runs = [prior_heads(layer(), TASK, n_prompts=200, seed=seed) for seed in range(40)]
    for name in EFFECTS:
        values = np.array([getattr(run, name) for run in runs])
        sems = np.array([getattr(run, f"{name}_sem") for run in runs])
        ratio = values.std(0, ddof=1) / np.sqrt((sems**2).mean(0))
        # Known to 1 / sqrt(2 * 39) for normal values; twice that is allowed for heavy tails.
        assert (np.abs(np.log(ratio)) < 4 * 2 / (2 * 39) ** 0.5).all(), name


def test_prompts_on_which_the_full_or_the_masked_model_errs_most_are_left_out():
    squares = np.random.default_rng(0).chisquare(1, (2000, 3, 8))
    squares[7, 1] = squares[8, 0] = (
        1e9  # one mask explodes on one prompt, the full model on another
    )
    worst = max((i for i in range(2000) if i != 8), key=lambda i: squares[i, [0, 2], ERROR].max())
    rises = _rises(squares)
    for head, gone in enumerate(([7, 8], [8, worst])):
        expected = np.delete(squares[:, head + 1] - squares[:, 0], gone, 0)
        np.testing.assert_array_equal(rises[:1998, head, 0], expected)
    # The rows behind stand for the prompts that go, and are those of the worst that stays.
    assert np.abs(rises).max() < 100


def test_which_heads_memorise_follows_from_both_effects():
    found = prior_heads(layer(), TASK, n_prompts=50)
    ones = {f"{name}_sem": np.ones((2, 2)) for name in EFFECTS}
    far, near = 3.0, 1.0  # 5% over four heads are 2.5 standard errors
    known = replace(
        found,
        **ones,
        weight_change=np.array([[-far, -far], [-near, far]]),
        memory_excess=np.array([[far, near], [far, far]]),
        dmmse_rise=np.zeros((2, 2)),
        ridge_rise=np.array([[near, far], [-far, 0.0]]),
        carried_by_few=np.zeros((2, 2), bool),
    )
    assert known.memorises == [(0, 0)]
    assert known.generalises == [(0, 1)]
    assert "memorise: L0H0; needed for ridge on new tasks: L0H1" in repr(known)
    columns = ["layer", "head", "weight_change", "weight_change_sem"]
    assert list(known.to_frame().columns[:4]) == columns


def test_the_usual_lengths_are_those_of_training(tmp_path: Path):
    weights = weights_of_layer(layer(), model=CONFIG.model)
    save(tmp_path / "model", CONFIG, weights, step=20)
    # This model was trained with five pairs in every prompt.
    default = compare_priors(load(tmp_path / "model"), n_prompts=16)
    assert default.context_length.tolist() == [5]
    shorter = replace(TASK, context_length=3)
    asked = compare_priors(load(tmp_path / "model"), shorter, n_prompts=16)
    assert asked.context_length.tolist() == [3]


def path_of(relative: list[float], sem: float) -> OverSteps:
    """Comparisons at steps 0, 1000, ... with these relative distances on new tasks."""
    some = compare_priors(layer(), TASK, n_prompts=16, context_lengths=[5])
    results = []
    for value in relative:
        both = np.array([some.trimmed.relative[0], value])
        trimmed = some.trimmed.assign(relative=both, relative_sem=np.full(2, sem))
        results.append(replace(some, trimmed=trimmed))
    step = np.arange(len(relative)) * 1000
    return OverSteps("priors", tuple(results), step, np.zeros((0, 2)))


def test_transient_ridge_is_above_a_half_first_and_below_in_the_end():
    assert transient(path_of([0.5, 0.8, 0.9, 0.2], 0.01)) == 1000
    assert transient(path_of([0.5, 0.52, 0.4, 0.2], 0.02)) is None  # not clearly above
    assert transient(path_of([0.8, 0.4, 0.4, 0.2], 0.02)) is None  # untrained
    assert transient(path_of([0.5, 0.8, 0.9, 0.48], 0.02)) is None  # not clearly below
    assert transient(path_of([0.5, 0.8, 0.9, 0.95], 0.01)) is None
