"""Linear attention trained from a config: what is drawn, followed, kept, and refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.training.over_training import training_dynamics
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict, override
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.heads import AttentionWeights, predict
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.theory.linear import modes, population_moments
from mechinterp.theory.linear_heads import MergedHeads, merged_heads, separate_heads
from mechinterp.training.linear.descent import full_batch_descent, training_set
from mechinterp.training.linear.flow import flow
from mechinterp.training.linear.trainer import initial_heads, task_moments, train_linear
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.sweep_file import load_sweep
from mechinterp.training.train import require_finite, train_here, train_models
from tests.conftest import CHECKPOINTS, assert_close_to_rounding

SHORT = ("train.steps=400", "train.log_every=100", "train.snapshot_every=150", "train.init_std=0.1")
SEPARATE = override(preset("linear-separate"), *SHORT)
MERGED = override(preset("linear-merged"), *SHORT, "train.learning_rate=0.2")
RANK_TWO = override(preset("linear-rank-2"), *SHORT)
CONFIGS = {"rank 1": SEPARATE, "merged": MERGED, "rank 2": RANK_TWO}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def step_matrix(weights: AttentionWeights | Weights) -> np.ndarray:
    """M of weights of linear attention."""
    weights = weights if isinstance(weights, AttentionWeights) else weights.circuits
    d_x = weights.d_x
    blocks = weights.score_slope * weights.QK.double()[:, :d_x, :d_x]
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


@pytest.mark.slow
@EACH
def test_a_small_step_of_descent_follows_the_flow(config: ExperimentConfig):
    # Ten times as many steps of a tenth, so that both end at one time.
    rate = config.train.learning_rate / 100
    fine = override(config, f"train.learning_rate={rate}", "train.steps=4000")
    by_step = train_linear(override(fine, "train.optimizer=gradient_descent"))
    exact = train_linear(override(config, f"train.learning_rate={rate * 10}"))
    moved = step_matrix(exact.weights) - step_matrix(exact.snapshots[0])
    gap = step_matrix(by_step.weights) - step_matrix(exact.weights)
    assert np.abs(gap).max() < 0.02 * np.abs(moved).max()


def test_descent_on_a_training_set_descends_its_own_loss():
    config = override(SEPARATE, "train.optimizer=gradient_descent", "task.n_sequences=64")
    trained = train_linear(config)
    (prompts,) = training_set(config.task, 64, seed=0)
    error = predict(trained.weights.circuits.to(torch.float64), prompts) - prompts.y_query
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
    dynamics = training_dynamics(trained.history)
    assert dynamics.omega.shape == (5, n_heads)
    third = trained.snapshots[300].circuits
    assert dynamics.omega[3] == pytest.approx(third.omega.mean(1), rel=1e-5)
    assert dynamics.mu[3] == pytest.approx(third.mu[:, 0], rel=1e-5)
    assert np.all(np.diff(dynamics.eval_loss) < 0)
    first = linear_attention(initial_heads(config)).to(torch.float32)
    assert torch.equal(trained.snapshots[0].circuits.W_Q, first.W_Q)


def test_the_score_slope_changes_nothing_but_how_it_is_stored():
    plain, doubled = train_linear(SEPARATE), train_linear(override(SEPARATE, "model.score_slope=2"))
    assert torch.allclose(plain.weights.circuits.QK, 2 * doubled.weights.circuits.QK, rtol=1e-6)
    assert plain.history["loss"].equals(doubled.history["loss"])


@pytest.mark.slow
def test_the_basis_of_the_covariance_does_not_matter():
    kms = override(SEPARATE, 'task.covariance={"kind": "kms", "rho": 0.5}')
    config = override(kms, "train.learning_rate=0.05", "train.steps=20000")
    trained = train_linear(config)
    levels = modes(task_moments(config.task)).levels
    assert trained.history["loss"].iloc[-1] == pytest.approx(levels[-1], abs=1e-6)


def test_moments_of_a_task():
    task = TaskConfig(d_x=3, context_length=7, noise_var=0.3, beta_var=2.0)
    law = {"context_length": 7, "task_covariance": 2 * np.eye(3), "noise_var": 0.3}
    assert np.array_equal(task_moments(task).zz, population_moments(np.eye(3), **law).zz)
    for refused in (replace(task, d_y=2), replace(task, supports=((0, 1),))):
        with pytest.raises(ValueError, match=r"^Moments need one response on all coordinates, got"):
            task_moments(refused)


def test_models_that_adam_trains_have_no_such_heads():
    with pytest.raises(ValueError, match=r"^train\.optimizer must be gradient_descent or"):
        initial_heads(preset("softmax-h2"))


def test_steps_to_report_rise_to_the_last():
    heads, moments = initial_heads(SEPARATE), task_moments(SEPARATE.task)
    descend = partial(full_batch_descent, heads, moments, modes(moments), learning_rate=0.1)
    for at in ([0, 3], [0, 2, 2, 5], [-1, 5]):
        with pytest.raises(ValueError, match=r"^at must rise from 0 or later to steps = 5, got \["):
            descend(steps=5, at=np.array(at))


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
    assert checkpoint.weights.circuits.merged_qk
    assert list(checkpoint.snapshots) == [0, 150, 300]
    before = (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns
    again = train_models(models, tmp_path, resume=True)
    assert again.steps == 0
    assert (tmp_path / "merged" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="already exists and is not overwritten"):
        train_models(models, tmp_path)


@pytest.mark.slow
def test_a_seed_gives_the_same_bits_in_any_company(tmp_path: Path):
    train_models({"one": SEPARATE, "two": MERGED}, tmp_path / "together")
    train_models({"one": SEPARATE}, tmp_path / "alone")
    files = [tmp_path / run / "one" / "model.safetensors" for run in ("together", "alone")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_descent_that_diverges_is_named_and_the_others_are_saved(tmp_path: Path):
    wild = override(SEPARATE, "train.optimizer=gradient_descent", "train.learning_rate=30")
    models = {"wild": wild, "tame": SEPARATE}
    summary = train_models(models, tmp_path)
    assert summary.diverged == {"wild": None}
    with pytest.raises(CheckpointError, match=r"those of wild \(train\.learning_rate 30\) did not"):
        require_finite(models, tmp_path, summary)
    assert load(tmp_path / "tame").step == 400
    assert not (tmp_path / "wild").exists()


def test_a_flow_that_cannot_be_followed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stuck(config: ExperimentConfig):
        raise RuntimeError("The flow cannot be followed past time 3 tau: why.")

    monkeypatch.setattr("mechinterp.training.train.train_linear", stuck)
    with pytest.raises(CheckpointError, match=r"/one: The flow cannot be followed past time 3 tau"):
        train_models({"one": SEPARATE}, tmp_path)


def test_the_shipped_sweep_is_that_of_the_shipped_models():
    models = load_sweep(CHECKPOINTS.parent / "analyses" / "sweeps" / "linear.json")
    files = CHECKPOINTS.glob("linear-[mrs]*/config.json")
    stored = {file.parent.name: json.loads(file.read_text())["experiment"] for file in files}
    assert {name: from_dict(values) for name, values in stored.items()} == models


def test_training_on_moments_is_for_the_processor_and_counts_its_memory(tmp_path: Path):
    models = {"m": override(preset("linear-separate"), "train.steps=10")}
    for asked, words in (
        ({"device": "cuda"}, "--device must be auto or cpu where train.optimizer is"),
        ({"memory": 10**6}, "--memory allows 0.00 GB"),
    ):
        with pytest.raises(CheckpointError, match=words):
            train_models(models, tmp_path / "run", engine=partial(train_here, **asked))
    engine = partial(train_here, device="auto", memory=10**12)
    assert train_models(models, tmp_path / "run", engine=engine).steps == 10
