"""Linear attention trained from a config: what is drawn, followed, kept, and refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.training.history import history
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.theory.linear import MergedHeads, merged_heads, separate_heads
from mechinterp.training.linear import flow
from mechinterp.training.linear_models import (
    initial_heads,
    task_moments,
    train_linear,
    training_set,
)
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.train import require_no_divergence, train_models
from tests.conftest import assert_close_to_rounding, refused

SHORT = ("train.steps=400", "train.log_every=100", "train.snapshot_every=150", "train.init_std=0.1")
SEPARATE = override(preset("linear-separate"), *SHORT)
MERGED = override(preset("linear-merged"), *SHORT, "train.learning_rate=0.2")
RANK_TWO = override(preset("linear-rank-2"), *SHORT)
CONFIGS = {"rank 1": SEPARATE, "merged": MERGED, "rank 2": RANK_TWO}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def step_matrix(weights: Weights) -> np.ndarray:
    """M of weights of linear attention."""
    d_x = weights.d_x
    blocks = weights.model.score_slope * weights.QK.double()[:, :d_x, :d_x]
    return torch.einsum("h,hij->ji", weights.mu.double()[:, 0], blocks).numpy()


def test_heads_are_drawn_with_init_std_from_the_seed():
    for config, expected in (
        (SEPARATE, separate_heads(5, 4, std=0.1, seed=4)),
        (MERGED, merged_heads(8, 4, std=0.1, seed=4)),
    ):
        drawn = initial_heads(override(config, "seed=4"))
        for part, wanted in zip(vars(drawn).values(), vars(expected).values(), strict=True):
            assert np.array_equal(part, wanted)
    assert initial_heads(RANK_TWO).K.shape == (9, 2, 8)


@EACH
def test_without_init_std_they_are_those_of_pytorch(config: ExperimentConfig):
    config = replace(config, train=replace(config.train, init_std=None))
    weights, heads = initial_weights(config).to(torch.float64), initial_heads(config)
    assert_close_to_rounding(heads.v, weights.mu[:, 0])
    assert_close_to_rounding(heads.M, step_matrix(weights))
    assert isinstance(heads, MergedHeads) == config.model.merged_qk


@EACH
def test_the_flow_runs_two_learning_rates_of_tau_per_step(config: ExperimentConfig):
    trained = train_linear(config)
    duration = 2 * config.train.learning_rate * 400
    expected = flow(initial_heads(config), task_moments(config.task), duration=duration)
    assert trained.history["loss"].iloc[-1] == pytest.approx(expected.loss[-1], rel=1e-7)
    assert step_matrix(trained.weights) == pytest.approx(expected.M[-1], abs=1e-6)
    assert trained.weights.W_Q.dtype == torch.float32


def test_descent_on_a_training_set_descends_its_own_loss():
    config = override(SEPARATE, "train.optimizer=gradient_descent", "task.n_sequences=64")
    trained = train_linear(config)
    (prompts,) = training_set(config.task, 64, seed=0)
    error = predict(trained.weights.to(torch.float64), prompts) - prompts.y_query
    last = trained.history.iloc[-1]
    assert last["loss"] == pytest.approx(error.square().mean().item(), rel=1e-5)
    population = task_moments(config.task).loss(step_matrix(trained.weights))
    assert last["eval_loss"] == pytest.approx(float(population), rel=1e-5)
    assert last["loss"] < last["eval_loss"]
    other = train_linear(override(config, "train.data_seed=1"))
    assert other.history["loss"].iloc[-1] != last["loss"]


@EACH
@pytest.mark.parametrize("optimizer", ["gradient_flow", "gradient_descent"])
def test_history_and_snapshots_are_those_of_other_models(config: ExperimentConfig, optimizer: str):
    trained = train_linear(override(config, f"train.optimizer={optimizer}"))
    n_heads = config.model.n_heads
    assert list(trained.snapshots) == [0, 150, 300]
    assert trained.history["step"].tolist() == np.repeat([0, 100, 200, 300, 400], n_heads).tolist()
    dynamics = history(trained.history)
    assert dynamics.omega.shape == (5, n_heads)
    third = trained.snapshots[300]
    assert dynamics.omega[3] == pytest.approx(third.omega.mean(1), rel=1e-5)
    assert dynamics.mu[3] == pytest.approx(third.mu[:, 0], rel=1e-5)
    assert np.all(np.diff(dynamics.eval_loss) < 0)
    first = linear_attention(initial_heads(config)).to(torch.float32)
    assert torch.equal(trained.snapshots[0].W_Q, first.W_Q)


# In a run.


@pytest.mark.slow
def test_a_run_of_both_kinds_leaves_a_checkpoint_each(tmp_path: Path):
    adam = override(preset("softmax-h1"), "train.steps=20", "train.n_eval_prompts=16")
    seen = []
    models = {"merged": MERGED, "adam": adam, "separate": SEPARATE}
    summary = train_models(models, tmp_path, on_log=seen.append)
    assert [file.name for file in summary.checkpoints] == ["merged", "adam", "separate"]
    assert summary.steps == 820
    assert {progress.steps for progress in seen} == {400, 20}
    for name, config in models.items():
        assert load(tmp_path / name).config == config
    checkpoint = load(tmp_path / "merged")
    assert checkpoint.weights.model.merged_qk
    assert list(checkpoint.snapshots) == [0, 150, 300]
    assert train_models(models, tmp_path, resume=True).steps == 0


def test_descent_that_diverges_is_named_and_the_others_are_saved(tmp_path: Path):
    wild = override(SEPARATE, "train.optimizer=gradient_descent", "train.learning_rate=30")
    models = {"wild": wild, "tame": SEPARATE}
    summary = train_models(models, tmp_path)
    assert summary.diverged == {"wild": None}
    with refused("wild", "train.learning_rate 30", error=CheckpointError):
        require_no_divergence(models, tmp_path, summary)
    assert load(tmp_path / "tame").step == 400
    assert not (tmp_path / "wild").exists()
