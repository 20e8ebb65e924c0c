"""Training on pools of tasks: in every trainer, several pools in one run."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig, override
from mechinterp.training.one_layer.pack import Pack, packs
from mechinterp.training.train import train_models
from tests.conftest import assert_same
from tests.training.test_trainer import finished

TASK = TaskConfig(d_x=2, context_length=4, beta_var=1.0, noise_var=0.1)
TRAIN = TrainConfig(steps=40, batch_size=32, n_eval_prompts=64, log_every=20, learning_rate=0.02)
DEEP = ModelConfig(n_layers=2, n_heads=2, d_model=8)
MODELS = {
    "one layer": ModelConfig(n_heads=2),
    "linear stack": replace(DEEP, score="linear/L", context_only=True),
    "norm and MLP": replace(DEEP, d_mlp=8, norm="before"),
}


def of_pools(model: str) -> dict[str, ExperimentConfig]:
    config = ExperimentConfig(task=TASK, model=MODELS[model], train=TRAIN)
    return {f"m{n}": replace(config, task=replace(TASK, n_tasks=n)) for n in (1, 3, None)}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_run_holds_several_pools_and_each_model_is_what_it_is_alone(model: str, tmp_path: Path):
    configs = of_pools(model)
    train_models(configs, tmp_path / "together")
    for name, config in configs.items():
        train_models({name: config}, tmp_path / f"alone-{name}")
        mixed, alone = (load(tmp_path / run / name) for run in ("together", f"alone-{name}"))
        assert mixed.config.task == config.task
        assert_same(mixed.weights, alone.weights)
    weights = [load(tmp_path / "together" / name).weights.W_O for name in configs]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_models_of_several_pools_share_a_pack_and_have_the_bits_of_their_own(tmp_path: Path):
    mixed = {
        f"{name}-s{seed}": override(config, f"seed={seed}", f"model.n_heads={heads}")
        for seed, heads in ((0, 1), (1, 3))
        for name, config in of_pools("one layer").items()
    }
    other = replace(TASK, n_tasks=3, task_seed=1)
    mixed["other pool"] = replace(mixed["m3-s0"], task=other)
    assert packs(mixed) == [mixed]
    together, file = Pack(mixed), tmp_path / "state.safetensors"
    together.advance()
    together.save(file)
    together = Pack.restore(file)
    together.advance()
    results = together.results()
    assert together.finished
    assert results.keys() == mixed.keys()
    for name, config in mixed.items():
        expected = finished(Pack({name: config})).results()[name]
        assert results[name].config == config
        assert_same(results[name].weights, expected.weights)
        pd.testing.assert_frame_equal(results[name].history, expected.history, check_exact=True)
    first, second = (results[name].history["eval_loss"] for name in ("m3-s0", "other pool"))
    assert (first != second).all()
