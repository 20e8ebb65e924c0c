"""Every architecture trains: by its own gradient, to the same bits after a stop, and to a lower loss."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

import mechinterp
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from mechinterp.training import run as running
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer.step import packs
from mechinterp.training.run import Progress, views
from mechinterp.training.train import train_models
from tests.conftest import assert_close_to_rounding, assert_same, refused, sampled
from tests.deep_models import GPT2
from tests.training.test_sweep import assert_same_folders

WIDE = ModelConfig(n_layers=2, n_heads=2, d_model=8)
MODELS = {
    "causal": WIDE,
    "context-only": replace(WIDE, context_only=True, score="relu/L"),
    "linear-stack": replace(WIDE, context_only=True, score="linear/L"),
    "all-read-all": replace(WIDE, context_only=True, attend_to_self=True),
    "norm-before": replace(WIDE, norm="before", final_norm=True),
    "norm-after": replace(WIDE, norm="after", attend_to_self=True),
    "MLP": replace(WIDE, d_mlp=12, activation="gelu", attend_to_self=True),
    "GPT-2": replace(WIDE, **GPT2, n_positions=17),
    "merged": replace(WIDE, merged_qk=True, d_head=8, score="linear/L", biases=True),
    "tokens-as-stream": ModelConfig(n_layers=3, n_heads=1, d_mlp=5),
    "one-layer-merged": ModelConfig(merged_qk=True),
    "one-layer-biases": ModelConfig(biases=True),
    "one-layer-self": ModelConfig(attend_to_self=True),
    "one-layer-context-only": ModelConfig(context_only=True, n_heads=2, score="1+tanh"),
}
TASK = TaskConfig(d_x=3, context_length=8)
TRAIN = TrainConfig(
    steps=12, batch_size=16, log_every=4, snapshot_every=3, n_eval_prompts=20, data_seed=3
)
CONFIGS = {
    name: ExperimentConfig(task=TASK, model=model, train=TRAIN, seed=seed)
    for seed, (name, model) in enumerate(MODELS.items())
}
FEW = ("linear-stack", "norm-after", "GPT-2", "merged", "one-layer-context-only")
FURTHER = pytest.mark.parametrize("name", sampled(CONFIGS, keep=FEW.__contains__))
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def train_prompts(config: ExperimentConfig, step: int) -> Prompts:
    generator = generator_for(config.train.data_seed, "train", step)
    size = config.train.batch_size
    return draw_prompts(config.task, size, generator=generator, dtype=torch.float64)


def plain_module(run: DeepRun) -> ICLTransformer:
    """The hooked model with the weights of a run."""
    return ICLTransformer.from_weights(run.results()["m"].weights, task=run.config.task)


def run_in_float64(config: ExperimentConfig) -> DeepRun:
    return DeepRun({"m": config}, start=initial_deep_weights(config).to(torch.float64))


def named(flat: torch.Tensor, run: DeepRun) -> dict[str, torch.Tensor]:
    """Numbers that lie as the weights of a run do, by the names of the weights."""
    return run._model(0, views(flat, run.weights)).by_name


def step_by_step(model: ICLTransformer, config: ExperimentConfig, steps: int) -> ICLTransformer:
    """PyTorch's own Adam on the plain module."""
    adam = torch.optim.Adam(model.parameters(), lr=config.train.learning_rate)
    for step in range(steps):
        prompts = train_prompts(config, step)
        adam.zero_grad()
        torch.nn.functional.mse_loss(model.predict(prompts), prompts.y_query).backward()
        adam.step()
    return model


@EACH
def test_a_step_goes_along_the_gradient_of_the_hooked_model(config: ExperimentConfig):
    run = run_in_float64(config)
    model, prompts = plain_module(run), train_prompts(config, 0)
    torch.nn.functional.mse_loss(model.predict(prompts), prompts.y_query).backward()
    run.update(0)
    gradients = named(run.gradient, run)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert largest > 0
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-12 * largest, name


@FURTHER
def test_training_is_adam_on_the_plain_module(name: str):
    config = CONFIGS[name]
    run = run_in_float64(config)
    model = step_by_step(plain_module(run), config, 5)
    before = run.flat.detach().clone()
    for step in range(5):
        run.update(step)
    assert (run.flat - before).abs().max() > 1e-3
    expected = model.state_dict()
    for name, weights in named(run.flat, run).items():
        if config.model.score == "softmax" and name.endswith("b_K"):
            continue  # adds the same to all scores of a query: its gradient is rounding, which Adam blows up
        assert_close_to_rounding(weights, expected[name])


@pytest.mark.slow
def test_a_run_of_every_kind_has_the_same_bits_after_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(running, "SAVE_SECONDS", 0.0)
    plain = ExperimentConfig(task=TASK, train=TRAIN)
    models = {name: CONFIGS[name] for name in FEW}
    models |= {"plain": plain, "other": replace(plain, seed=1)}
    assert len(train_models(models, tmp_path / "whole").checkpoints) == len(models)

    rows = count(1)

    def stop_at_every_third_row(progress: Progress) -> None:
        if next(rows) % 3 == 0:
            raise InterruptedError

    stops, finished = 0, False
    while not finished:
        try:
            train_models(models, tmp_path / "run", resume=True, on_log=stop_at_every_third_row)
            finished = True
        except InterruptedError:
            stops += 1
    assert stops > len(packs(models))
    assert_same_folders(tmp_path / "run", tmp_path / "whole")
    for name in models:
        assert list(load(tmp_path / "run" / name).snapshots) == [0, 3, 6, 9, 12]


# From Python.


@pytest.mark.slow
def test_train_gives_the_checkpoint_and_goes_on_with_resume(tmp_path: Path):
    config, out = CONFIGS["GPT-2"], tmp_path / "model"

    def stop(progress: Progress) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        mechinterp.train(config, out=out, on_log=stop)
    with refused(out, "already exists", error=CheckpointError):
        mechinterp.train(config, out=out)
    checkpoint = mechinterp.train(config, out=out, resume=True)
    assert (checkpoint.config, checkpoint.step) == (config, 12)
    mechinterp.train(config, out=tmp_path / "again")
    mechinterp.train(config, out=str(out), resume=True)
    assert_same_folders(out, tmp_path / "again")


# The initial weights, and what a schedule makes of the step.

CONTEXT_ONLY = ExperimentConfig(
    task=TaskConfig(d_x=3, context_length=8, sparsity=1, nonzeros="signs"),
    model=ModelConfig(n_layers=2, n_heads=2, d_model=6, score="linear/L", context_only=True),
    train=replace(
        TRAIN,
        **{"steps": 20, "log_every": 10, "snapshot_every": 5, "n_eval_prompts": 40},
        **{"shortest_context": 2, "schedule": "cosine", "clip_norm": 1.0, "warm_up": 2},
    ),
    seed=2,
)


def test_initial_weights_are_a_function_of_config_and_seed():
    first, again = (initial_deep_weights(CONTEXT_ONLY) for _ in range(2))
    assert_same(first, again)
    other = initial_deep_weights(replace(CONTEXT_ONLY, seed=3))
    assert not torch.equal(first.W_Q, other.W_Q)
    assert (first.model, first.d_x, first.d_y) == (CONTEXT_ONLY.model, 3, 1)
    assert first.scale == 3**-0.5
    # Uniform in +-1/sqrt(fan_in), W_in of fan_in d_x + d_y, the others of 6.
    tensors = dict(first.tensors)
    assert 0.45 < tensors.pop("W_in").abs().max() <= 0.5
    assert all(0.37 < tensor.abs().max() <= 6**-0.5 for tensor in tensors.values())


def test_one_update_is_adam_on_the_clipped_gradient_at_the_step_size_of_warm_up_and_cosine():
    run, before = DeepRun({"m": CONTEXT_ONLY}), initial_deep_weights(CONTEXT_ONLY)
    for step in range(3):
        run.update(step)
    flat = torch.cat([t.flatten() for t in before.tensors.values()]).requires_grad_()
    adam = torch.optim.Adam([flat], lr=1e-3)
    for step in range(3):
        generator = generator_for(3, "train", step)
        length = int(torch.randint(2, 9, (), generator=generator))
        prompts = draw_prompts(CONTEXT_ONLY.task, 16, generator=generator, context_length=length)
        cut = flat.split([t.numel() for t in before.tensors.values()])
        named = zip(before.tensors.items(), cut, strict=True)
        weights = before.with_tensors({name: part.view(t.shape) for (name, t), part in named})
        loss = (predict_deep(weights, prompts) - prompts.y_query).square().mean()
        (gradient,) = torch.autograd.grad(loss, [flat])
        flat.grad = gradient / max(1.0, gradient.norm().item())
        adam.param_groups[0]["lr"] = 1e-3 * (0.5, 1, 1)[step] * (1 + np.cos(np.pi * step / 20)) / 2
        adam.step()
    torch.testing.assert_close(run.flat, flat, rtol=1e-4, atol=1e-7)
