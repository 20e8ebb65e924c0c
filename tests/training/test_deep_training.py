"""A context-only model trains, stops and resumes with the same bits, and is what its gradients say."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk
from mechinterp.models.stacks import predict_deep
from mechinterp.presets import preset
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.state import stored_models
from mechinterp.training.train import train_models
from tests.conftest import assert_same

CONFIG = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8, sparsity=1, nonzeros="signs"),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="linear/L", context_only=True),
    train=TrainConfig(
        steps=20,
        batch_size=16,
        log_every=10,
        snapshot_every=5,
        n_eval_prompts=40,
        data_seed=3,
        shortest_context=2,
        cosine=True,
        clip_norm=1.0,
    ),
    seed=2,
)


def finished(run: DeepRun) -> DeepRun:
    while not run.finished:
        run.advance()
    return run


def test_initial_weights_are_a_function_of_config_and_seed():
    first, again = (initial_deep_weights(CONFIG) for _ in range(2))
    assert_same(first, again)
    other = initial_deep_weights(replace(CONFIG, seed=3))
    assert not torch.equal(first.W_Q, other.W_Q)
    assert (first.model, first.d_x, first.d_y) == (CONFIG.model, 3, 1)
    assert first.scale == 3**-0.5
    # Uniform in +-1/sqrt(fan_in), W_in of fan_in d_x + d_y, the others of 6.
    stack = first.stack
    assert stack.W_in is not None
    assert 0.45 < stack.W_in.abs().max() <= 0.5
    assert all(0.37 < t.abs().max() <= 6**-0.5 for n, t in stack.tensors.items() if n != "W_in")


def test_one_update_is_adam_on_the_clipped_gradient_at_the_step_size_of_the_cosine():
    run, before = DeepRun({"m": CONFIG}), initial_deep_weights(CONFIG).stack
    for step in range(3):
        run.update(step)
    flat = torch.cat([t.flatten() for t in before.tensors.values()]).requires_grad_()
    adam = torch.optim.Adam([flat], lr=1e-3)
    for step in range(3):
        generator = generator_for(3, "train", step)
        length = int(torch.randint(2, 9, (), generator=generator))
        prompts = sample_prompts(CONFIG.task, 16, generator=generator, context_length=length)
        cut = flat.split([t.numel() for t in before.tensors.values()])
        named = zip(before.tensors.items(), cut, strict=True)
        weights = before.with_tensors({name: part.view(t.shape) for (name, t), part in named})
        loss = (predict_deep(weights, prompts) - prompts.y_query).square().mean()
        (gradient,) = torch.autograd.grad(loss, [flat])
        flat.grad = gradient / max(1.0, gradient.norm().item())
        adam.param_groups[0]["lr"] = 1e-3 * (1 + np.cos(np.pi * step / 20)) / 2
        adam.step()
    torch.testing.assert_close(run.flat, flat, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_contexts_of_all_lengths_are_seen_and_one_length_without_a_shortest(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[int | None] = []

    def record(*arguments: object, context_length: int | None = None, **rest: object):
        seen.append(context_length)
        return sample_prompts(*arguments, context_length=context_length, **rest)

    monkeypatch.setattr("mechinterp.training.batches.sample_prompts", record)
    run = DeepRun({"m": CONFIG})
    for step in range(200):
        run.update(step)
    assert set(seen) - {None} == set(range(2, 9))
    run, first = (
        DeepRun({"m": replace(CONFIG, train=replace(CONFIG.train, shortest_context=None))}),
        len(seen),
    )
    run.update(0)
    assert set(seen[first:]) - {None} == {8}


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path):
    whole = finished(DeepRun({"m": CONFIG})).results()["m"]
    run, file = DeepRun({"m": CONFIG}), tmp_path / "training-0.safetensors"
    run.save(file)
    run = DeepRun.restore(file)
    run.advance()
    run.save(file)
    assert stored_models(file) == {"m": CONFIG}
    resumed = finished(DeepRun.restore(file)).results()["m"]
    assert_same(resumed.weights, whole.weights)
    assert list(resumed.snapshots) == [0, 5, 10, 15, 20]
    for step, weights in whole.snapshots.items():
        assert_same(resumed.snapshots[step], weights)
    assert resumed.history.equals(whole.history)


def test_history_has_a_row_per_logged_step_layer_and_head():
    trained = finished(DeepRun({"m": CONFIG})).results()["m"]
    history = trained.history
    columns = ["step", "layer", "head", "loss", "eval_loss", "qk_norm", "ov_norm"]
    assert list(history) == columns
    assert history["step"].tolist() == [0] * 4 + [10] * 4 + [20] * 4
    assert history["layer"].tolist() == [0, 0, 1, 1] * 3
    assert history["head"].tolist() == [0, 1, 0, 1] * 3
    last, weights = history.iloc[-1], trained.weights
    QK = weights.scale * weights.W_Q[1, 1] @ weights.W_K[1, 1].T
    assert last["qk_norm"] == pytest.approx(QK.norm().item(), rel=1e-5)
    assert last["ov_norm"] == pytest.approx((weights.W_V[1, 1] @ weights.W_O[1, 1]).norm().item())
    prompts = sample_prompts(CONFIG.task, 40, generator=generator_for(3, "eval", 0))
    error = predict_deep(weights.stack, prompts) - prompts.y_query
    assert last["eval_loss"] == pytest.approx(error.square().mean().item(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["linear/L", "relu/L", "softmax"])
def test_training_learns(score: str):
    task = TaskConfig(d_x=2, context_length=16, noise_var=0.0, beta_var=0.5)
    model = replace(CONFIG.model, score=score, d_model=12)
    train = replace(CONFIG.train, steps=400, batch_size=64, log_every=400, learning_rate=1e-2)
    config = replace(CONFIG, task=task, model=model, train=train)
    run = finished(DeepRun({"m": config}))
    prompts = sample_prompts(task, 2000, generator=generator_for(9, "eval", 0))
    with torch.no_grad():
        risk = excess_risk(predict_deep(run.weights, prompts), prompts).mean().item()
    assert risk < 0.3  # predicting zero has risk 1


@pytest.mark.slow
def test_a_run_through_a_run_folder_with_a_stop_in_between(tmp_path: Path):
    plain = ExperimentConfig(train=TrainConfig(steps=10, batch_size=8, n_eval_prompts=8))
    models = {"deep": CONFIG, "plain": plain, "other": replace(CONFIG, seed=5)}

    def stop(progress: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        train_models(models, tmp_path / "run", on_log=stop)
    assert (tmp_path / "run" / "training-0.safetensors").exists()
    summary = train_models(models, tmp_path / "run", resume=True)
    assert [path.name for path in summary.checkpoints] == ["deep", "plain", "other"]
    assert not list((tmp_path / "run").glob("training-*"))
    checkpoint = load(tmp_path / "run" / "deep")
    whole = finished(DeepRun({"m": CONFIG})).results()["m"]
    assert_same(checkpoint.weights, whole.weights)
    assert checkpoint.config == CONFIG
    assert list(checkpoint.snapshots) == [0, 5, 10, 15, 20]
    assert_same(checkpoint.snapshots[5], whole.snapshots[5])
    assert checkpoint.history is not None
    assert checkpoint.history.equals(whole.history)


def test_a_model_that_diverges_is_reported_and_not_saved(tmp_path: Path):
    train = replace(CONFIG.train, learning_rate=1e30, clip_norm=None)
    summary = train_models({"m": replace(CONFIG, train=train)}, tmp_path / "run")
    assert summary.diverged == {"m": 10}
    assert not (tmp_path / "run" / "m" / "config.json").exists()


def test_a_broken_state_is_refused(tmp_path: Path):
    file = tmp_path / "training-0.safetensors"
    with pytest.raises(CheckpointError, match=r"not a training state .* \(does not exist\)"):
        DeepRun.restore(file)
    file.write_bytes(b"no state")
    with pytest.raises(CheckpointError, match="not a training state that can be resumed"):
        DeepRun.restore(file)


def test_models_train_alone():
    with pytest.raises(ValueError, match="trains alone, got 2 models"):
        DeepRun({"a": CONFIG, "b": CONFIG})


def test_presets_fit_the_construction_or_are_of_one_size():
    sizes = {
        sum(t.numel() for t in initial_deep_weights(preset(f"sparse-h{h}")).tensors.values())
        for h in (1, 4, 8)
    }
    assert len(sizes) == 1
    wide = preset("sparse-wide")
    assert wide.model.n_heads == wide.task.d_x
    assert wide.d_model >= 2 * wide.task.d_x + 1
    assert wide.task.d_x / wide.task.sparsity >= 16
