"""Training that starts from a checkpoint: Adam by hand, heads that stay zero, what the new checkpoint says, and a resumed run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig, override
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.models.run.general import predict_deep
from mechinterp.presets import preset
from mechinterp.training.train import train
from tests.conftest import CHECKPOINTS, Run, refused
from tests.deep_models import wide_checkpoint

TASK = TaskConfig(d_x=4, context_length=9)
TRAIN = TrainConfig(
    steps=20,
    data_seed=7,
    batch_size=64,
    learning_rate=1e-2,
    shortest_context=5,
    schedule="cosine",
    clip_norm=0.5,
    log_every=5,
    n_eval_prompts=16,
)
GONE = [(1, 1), (1, 2), (1, 3)]


@pytest.fixture
def pruned(tmp_path: Path) -> Checkpoint:
    """Three layers of four heads, of which layer 1 has lost all but one."""
    full = wide_checkpoint(tmp_path / "full", TRAIN)
    weights = full.weights.without(GONE)
    config = ExperimentConfig(TASK, weights.model, TRAIN)
    save(tmp_path / "pruned", config, weights, step=5, origin={"pruned_from": "full"})
    return load(tmp_path / "pruned")


def by_hand(weights, steps: int):
    """Adam on prompts of lengths 5 to 9, gradients cut to norm 0.5, the step size along half a cosine."""
    trained = {name: t.detach().clone().requires_grad_() for name, t in weights.tensors.items()}
    optimizer = torch.optim.Adam(trained.values(), lr=1e-2)
    for step in range(steps):
        generator = generator_for(7, "train", step)
        length = int(torch.randint(5, 10, (), generator=generator))
        drawn = draw_prompts(
            TASK, 64, generator=generator, context_length=length, dtype=torch.float64
        )
        optimizer.zero_grad()
        error = predict_deep(weights.with_tensors(trained), drawn) - drawn.y_query
        error.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + np.cos(np.pi * step / steps)) / 2
        optimizer.step()
    return weights.with_tensors({name: tensor.detach() for name, tensor in trained.items()})


@pytest.mark.slow
def test_it_is_training_by_hand_from_these_weights(pruned: Checkpoint, tmp_path: Path):
    found = train(pruned.config, out=tmp_path / "longer", start=pruned)
    expected = by_hand(pruned.weights, 20)
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(found.weights.tensors[name], tensor, rtol=1e-7, atol=1e-9)
    assert (found.step, found.weights.dtype) == (20, torch.float64)
    assert found.origin == {
        "pruned_from": "full",
        "started_from": "pruned",
        "started_at_step": 5,
    }
    assert found.history["step"].unique().tolist() == [0, 5, 10, 15, 20]


@pytest.mark.slow
def test_heads_without_circuits_stay_zero(pruned: Checkpoint, tmp_path: Path):
    weights = pruned.weights.compact()  # zeros fill layer 1 up to the four heads of the others
    save(tmp_path / "small", pruned.config, weights, step=0)
    found = train(pruned.config, out=tmp_path / "longer", start=load(tmp_path / "small"))
    assert found.weights.heads_per_layer == ((0, 1, 2, 3), (0,), (0, 1, 2, 3))
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert not getattr(found.weights, name)[1, 1:].any()
    assert not torch.equal(found.weights.W_O[1, 0], weights.W_O[1, 0])


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(pruned: Checkpoint, tmp_path: Path):
    whole = train(pruned.config, out=tmp_path / "whole", start=pruned)

    def stop(progress):
        if progress.step == 10:
            raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        train(pruned.config, out=out, start=pruned, on_log=stop)
    with refused("start", "'full'", error=CheckpointError):
        train(pruned.config, out=out, start=load(tmp_path / "full"), resume=True)
    resumed = train(pruned.config, out=out, resume=True)
    assert resumed.origin == whole.origin
    for name, tensor in whole.weights.tensors.items():
        assert torch.equal(resumed.weights.tensors[name], tensor)


def test_one_layer_starts_from_a_shipped_model(tmp_path: Path, run: Run):
    shipped = load(CHECKPOINTS / "softmax-h2-s0")
    few = ("train.steps=4", "train.n_eval_prompts=64", "train.log_every=2")
    found = train(override(shipped.config, *few), out=tmp_path / "longer", start=shipped)
    prompts = draw_prompts(shipped.task, 64, seed=5)
    before, after = (each.predictor.predict(prompts) for each in (shipped, found))
    assert 0 < (after - before).abs().max() < 0.2  # four steps of 1e-3 from a trained model
    given = [word for each in few for word in ("--set", each)]
    run("train", "--start", shipped.path, *given, "--out", tmp_path / "command", "--quiet")
    for name, tensor in found.weights.tensors.items():
        assert torch.equal(load(tmp_path / "command").weights.tensors[name], tensor)


def test_a_start_that_does_not_fit_is_refused(pruned: Checkpoint, tmp_path: Path):
    other = replace(pruned.config, model=replace(pruned.config.model, n_heads=2))
    with refused("n_heads", 2, 4, error=CheckpointError):
        train(other, out=tmp_path / "other", start=pruned)
    with refused("start", "checkpoint", "Weights"):
        train(pruned.config, out=tmp_path / "other", start=pruned.weights)
    linear = preset("linear-separate")
    with refused("start", "adam", "flow"):
        train(linear, out=tmp_path / "linear", start=pruned)
