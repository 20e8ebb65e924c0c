"""Training on pools of tasks: in every trainer, several pools in one run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.training.one_layer.pack import packs
from mechinterp.training.train import train_models

TASK = TaskConfig(d_x=2, context_length=4, beta_var=1.0, noise_var=0.1)
TRAIN = TrainConfig(steps=40, batch_size=32, n_eval_prompts=64, log_every=20, learning_rate=0.02)
MODELS = {
    "one layer": ModelConfig(n_heads=2),
    "linear stack": ModelConfig(
        n_layers=2, n_heads=2, score="linear/L", context_only=True, d_model=8
    ),
    "norm and MLP": ModelConfig(n_layers=2, n_heads=2, d_model=8, d_mlp=8, norm="before"),
}


def of_pools(model: str) -> dict[str, ExperimentConfig]:
    config = ExperimentConfig(task=TASK, model=MODELS[model], train=TRAIN)
    return {
        f"m{n_tasks}": replace(config, task=replace(TASK, n_tasks=n_tasks))
        for n_tasks in (1, 3, None)
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_run_holds_several_pools_and_each_model_is_what_it_is_alone(model: str, tmp_path: Path):
    configs = of_pools(model)
    train_models(configs, tmp_path / "together")
    for name, config in configs.items():
        train_models({name: config}, tmp_path / f"alone-{name}")
        here, alone = (load(tmp_path / run / name) for run in ("together", f"alone-{name}"))
        assert here.config.task == config.task
        for key, tensor in here.weights.tensors.items():
            assert torch.equal(tensor, alone.weights.tensors[key])
    weights = [load(tmp_path / "together" / name).weights.W_O for name in configs]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_models_of_one_pool_share_a_pack():
    configs = {
        f"m{n_tasks}-s{seed}": replace(config, seed=seed)
        for n_tasks, config in of_pools("one layer").items()
        for seed in (0, 1)
    }
    assert sorted(sorted(pack) for pack in packs(configs)) == [
        ["mm1-s0", "mm1-s1"],
        ["mm3-s0", "mm3-s1"],
        ["mmNone-s0", "mmNone-s1"],
    ]


def test_one_task_is_learned_from_its_loss(tmp_path: Path):
    config = of_pools("norm and MLP")["m1"]
    config = replace(config, train=replace(TRAIN, steps=600, batch_size=64, learning_rate=0.01))
    train_models({"one": config}, tmp_path)
    losses = load(tmp_path / "one").history["eval_loss"]
    # beta.x_query is a linear function of the query: no pair is needed, and the noise alone is left.
    assert losses.iloc[-1] < 0.2 * losses.iloc[0]
