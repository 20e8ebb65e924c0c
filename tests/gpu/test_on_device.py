"""All that depends on the device, held against the processor: sampling in law, the rest to rounding."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mechinterp.config import (
    SCORES,
    ExperimentConfig,
    ModelConfig,
    TaskConfig,
    TrainConfig,
    override,
)
from mechinterp.config.covariance import CovarianceConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.run.predictor import predictor_of
from mechinterp.presets import preset
from mechinterp.training import batches
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer.step import Pack, initial_weights, loss_and_gradients, membership
from mechinterp.training.run import TrainingRun
from tests.conftest import ROUNDING, sampled
from tests.gpu.bench import replayed
from tests.training.test_trainer import finished

TRAIN = TrainConfig(steps=4, batch_size=8, log_every=4, n_eval_prompts=8)
SMALL = TaskConfig(d_x=3, context_length=6)
DEEP = {
    "linear": {"score": "linear/L", "context_only": True},
    "softmax": {"context_only": True, "d_model": 8, "d_head": 4},
    "norms and MLPs": {"norm": "before", "d_mlp": 16, "biases": True},
    "norms and MLPs, context alone": {"norm": "before", "d_mlp": 16, "context_only": True},
}
TASKS = {
    "default": SMALL,
    "correlated": TaskConfig(d_x=3, context_length=6, covariance=CovarianceConfig("kms", rho=0.5)),
    "sparse": TaskConfig(d_x=3, context_length=6, sparsity=2, nonzeros="signs"),
    "supports": TaskConfig(d_x=3, d_y=2, context_length=6, supports=((0, 1), (1, 2))),
}

Record = Callable[..., None]
STEPS = 20
AFTER_STEPS = 1e-3
"""Relative distance after STEPS updates by Adam, which divides by gradients that are nearly 0 at first."""
STANDARD_ERRORS = 5.0
"""Of several dozen means at most one in ten thousand draws goes further."""


def distance(values: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    values = values.detach().cpu()
    return ((values - expected.detach()).abs().max() / expected.abs().max()).item()


def moments(prompts: Prompts) -> Tensor:
    """Numbers of every prompt whose means tell its law, in float64 on the processor; [prompt, number]."""
    first = [prompts.x[:, 0], prompts.x_query, prompts.y[:, 0], prompts.y_query]
    numbers = torch.cat([*first, prompts.y_query_clean, prompts.beta.flatten(1)], 1).double().cpu()
    products = numbers[:, :, None] * numbers[:, None]
    return torch.cat([numbers, products.flatten(1), numbers**4], 1)


@pytest.mark.parametrize("task", sampled(TASKS, keep="supports".__eq__))
def test_prompts_have_the_law_of_the_processors(task: str, device: str, record: Record):
    generators = generator_for(0, "eval", 0), generator_for(1, "eval", 0, device=device)
    expected, drawn = (moments(draw_prompts(TASKS[task], 20_000, generator=g)) for g in generators)
    sem = ((expected.var(0) + drawn.var(0)) / len(expected)).sqrt()
    gap = (expected.mean(0) - drawn.mean(0)).abs()
    assert (gap[sem == 0] == 0).all()
    record("moments apart (standard errors)", (gap / sem)[sem > 0].max().item(), STANDARD_ERRORS)


@pytest.mark.parametrize(
    ("score", "dtype"), sampled(product(SCORES, ROUNDING), keep=("softmax", torch.float32).__eq__)
)
def test_a_step_has_the_processors_gradients(
    score: str, dtype: torch.dtype, device: str, record: Record
):
    config = ExperimentConfig(TaskConfig(), ModelConfig(n_heads=3, score=score))
    weights = initial_weights(config).to(dtype)
    prompts, members = draw_prompts(config.task, 256, seed=1, dtype=dtype), membership([1, 2])
    expected = loss_and_gradients(weights, prompts, members)
    on_device = loss_and_gradients(weights.to(device), prompts.to(device), members.to(device))
    record("loss", distance(on_device[0], expected[0]), ROUNDING[dtype])
    for name, gradient in expected[1].tensors.items():
        record(name, distance(on_device[1].tensors[name], gradient), ROUNDING[dtype])


def pack_models(n_models: int) -> dict[str, ExperimentConfig]:
    train = replace(TRAIN, steps=STEPS, log_every=5, batch_size=64, n_eval_prompts=256)
    base = ExperimentConfig(TaskConfig(), ModelConfig(), train)
    return {f"s{seed}": replace(base, seed=seed) for seed in range(n_models)}


def deep_models(kind: str) -> dict[str, ExperimentConfig]:
    model = ModelConfig(n_layers=2, n_heads=2, **DEEP[kind])
    train = replace(TRAIN, steps=STEPS, log_every=5, shortest_context=2, clip_norm=1.0)
    return {"model": ExperimentConfig(SMALL, model, train)}


KINDS: dict[str, tuple[type[TrainingRun], dict[str, ExperimentConfig]]] = {
    "pack": (Pack, pack_models(3)),
    **{kind: (DeepRun, deep_models(kind)) for kind in DEEP},
}


@pytest.fixture
def processors_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training draws the prompts on the processor, and then moves them: the same on every device."""

    def drawn(
        task: TaskConfig, n_prompts: int, *, generator: torch.Generator, **asked: object
    ) -> Prompts:
        own = torch.Generator().manual_seed(generator.initial_seed())
        return draw_prompts(task, n_prompts, generator=own, **asked).to(generator.device)

    monkeypatch.setattr(batches, "draw_prompts", drawn)


def trained(run: TrainingRun) -> Tensor:
    return finished(run).flat.detach().cpu()


@pytest.mark.parametrize("kind", sampled(KINDS, keep=("pack", "softmax").__contains__))
def test_training_on_the_same_prompts_gives_the_processors_weights(
    kind: str, device: str, record: Record, processors_prompts: None
):
    build, models = KINDS[kind]
    expected, run = trained(build(models)), build(models, device=device)
    record("weights", distance(trained(run), expected), AFTER_STEPS)


def test_training_on_its_own_prompts_comes_to_the_processors_loss(device: str, record: Record):
    losses = []
    for index, where in enumerate(("cpu", device)):
        changes = ("train.steps=200", "train.log_every=200", "train.learning_rate=0.01")
        changes += (f"train.data_seed={index}",)
        models = {name: override(each, *changes) for name, each in pack_models(16).items()}
        pack = Pack(models, device=where)
        trained(pack)
        losses.append(pack.rows["eval_loss"][-1].double())
    expected, own = losses
    sem = ((expected.var() + own.var()) / len(expected)).sqrt()
    gap = (expected.mean() - own.mean()).abs() / sem
    record("loss apart (standard errors)", gap.item(), STANDARD_ERRORS)


def test_a_model_of_a_pack_trains_as_it_does_alone(device: str, record: Record):
    models = pack_models(3)
    pack = Pack(models, device=device)
    trained(pack)
    alone = Pack({"s1": models["s1"]}, device=device)
    trained(alone)
    packed, expected = pack.results()["s1"].weights, alone.results()["s1"].weights
    for name, tensor in expected.tensors.items():
        record(name, distance(packed.tensors[name], tensor), AFTER_STEPS)


@pytest.mark.parametrize("kind", sampled(KINDS, keep=("pack", "softmax").__contains__))
def test_a_resumed_run_ends_with_the_same_bits(kind: str, device: str, tmp_path: Path):
    build, models = KINDS[kind]
    expected, stopped = trained(build(models, device=device)), build(models, device=device)
    stopped.advance()
    stopped.advance()
    stopped.save(tmp_path / "state.safetensors")
    resumed = build.restore(tmp_path / "state.safetensors", device=device)
    assert (resumed.step, resumed.flat.device.type) == (10, device)
    assert torch.equal(trained(resumed), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "method"),
    sampled(
        product(["one layer", *DEEP], ROUNDING, ["zero", "mean", "resample"]),
        keep=lambda case: case[1:] == (torch.float32, "mean"),
    ),
)
def test_masking_gives_the_processors_predictions(
    kind: str, dtype: torch.dtype, method: str, device: str, record: Record
):
    model = ModelConfig() if kind == "one layer" else next(iter(deep_models(kind).values())).model
    weights = initial_deep_weights(ExperimentConfig(SMALL, model, TRAIN)).to(dtype)
    prompts = draw_prompts(SMALL, 300, dtype=dtype)
    masks = [[], [(0, 1)], [(0, 0), (weights.n_layers - 1, 1)]]
    expected = predictor_of(weights).run(prompts, masks, method=method)
    moved = predictor_of(weights.to(device))
    predictions = moved.run(prompts, masks, method=method)
    assert predictions.device.type == "cpu"
    record("predictions", distance(predictions, expected), ROUNDING[dtype])
    streams = moved.streams(prompts, heads=masks[1])
    wanted = predictor_of(weights).streams(prompts, heads=masks[1])
    record("streams", distance(streams, wanted), ROUNDING[dtype])


@pytest.mark.parametrize("n_models", sampled([1, 64, 1024], keep=(1).__eq__))
def test_memory_of_a_step(n_models: int, device: str, record: Record):
    n_models, batch_size = n_models if device == "cuda" else 1, 256
    fields = (f"train.batch_size={batch_size}", "train.steps=2", "train.log_every=2")
    base = override(preset("softmax-h2"), *fields, "train.n_eval_prompts=256")
    pack = Pack({f"s{s}": replace(base, seed=s) for s in range(n_models)}, device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pack.advance()
    held = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    # Of every head and prompt: L scores and what comes of them, eight times at once at the very most.
    limit = 8 * 4 * batch_size * base.task.context_length * 2 * n_models + 2**28
    record(f"bytes of a step of {n_models} models, {batch_size} prompts", held, limit)
    assert torch.isfinite(pack.rows["eval_loss"]).all()


def test_a_recorded_step_replayed_trains_as_the_step_itself(device: str, record: Record):
    pack = Pack(pack_models(3), device=device)
    recorded = replayed(pack, STEPS, device)()
    for step in range(STEPS):
        pack.update(step)
    record("weights", distance(recorded.flat, pack.flat.cpu()), AFTER_STEPS)
