"""Steps, sampling and masking on a GPU, as far as they can be checked without one.

The pretended device of these tests has numbers, raises where devices mix, and counts what makes the host wait.
"""

from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

from mechinterp.config import SCORES, ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.task import CovarianceConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from mechinterp.training.general import attention as deep_attention
from mechinterp.training.general import forward as deep_forward
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer import pack as pack_module
from mechinterp.training.one_layer.pack import Pack
from mechinterp.training.one_layer.step import by_tensors
from mechinterp.training.run import Run
from tests.conftest import assert_close_to_rounding
from tests.pretended import DEVICE, fused_adam, generators, pretended

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


def two_models(score: str) -> dict[str, ExperimentConfig]:
    sizes = {f"h{n}": ModelConfig(score=score, n_heads=n) for n in (1, 2)}
    return {name: ExperimentConfig(SMALL, model, TRAIN) for name, model in sizes.items()}


def deep_experiment(kind: str, shortest: int | None = None) -> ExperimentConfig:
    train = replace(TRAIN, shortest_context=shortest, clip_norm=1.0)
    return ExperimentConfig(SMALL, ModelConfig(n_layers=2, n_heads=2, **DEEP[kind]), train)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_drawn_on_the_device(task: str):
    with pretended() as seen:
        generator = generator_for(0, "train", 0, device=DEVICE)
        prompts = sample_prompts(TASKS[task], 4, generator=generator)
        assert {getattr(prompts, f.name).device.type for f in fields(prompts)} == {DEVICE}
        assert seen == {"generator": 1}


def random_weights(kind: str) -> Weights:
    model = ModelConfig() if kind == "one layer" else deep_experiment(kind).model
    return initial_deep_weights(ExperimentConfig(SMALL, model, TRAIN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [("one layer", "zero"), ("one layer", "mean"), ("one layer", "resample"), ("linear", "zero")],
)
def test_masking_stays_on_the_device(kind: str, method: str):
    weights, prompts = random_weights(kind), sample_prompts(SMALL, 4)
    masks = [[], [(0, 1)], [(0, 0), (weights.n_layers - 1, 1)]]
    expected = predictor_of(weights).run(prompts, masks, method=method)
    with pretended():
        moved, predictor = prompts.to(DEVICE), predictor_of(weights.to(DEVICE))
        predictions = predictor.run(moved, masks, method=method)
        assert predictions.device.type == DEVICE
        assert_close_to_rounding(predictions.cpu(), expected)


@pytest.mark.parametrize("kind", DEEP)
def test_automatic_gradients_stay_on_the_device(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Run, "_record", lambda *_: 0.0)
    with generators(Counter()), fused_adam():
        run = DeepRun({"model": deep_experiment(kind)}, device="meta")
        run.update(0)
    held = [run.flat, run.gradient, run.loss_sum, *run.moments.values()]
    assert {tensor.device.type for tensor in held} == {"meta"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_step_waits_for_nothing_and_gives_the_numbers_of_the_processor(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    for module in (deep_forward, deep_attention):
        monkeypatch.setattr(module, "is_compiled", lambda *_: False)
    models = {"model": deep_experiment(kind)}
    expected = DeepRun(models)
    with pretended() as seen:
        run = DeepRun(models, device=DEVICE)
        seen.clear()
        run.update(0)
        assert seen == {"generator": 1}
        loss = run.advance()
        weights = run.results()["model"].weights
    expected.update(0)
    assert loss == expected.advance()
    _require_equal(weights, expected.results()["model"].weights)


@pytest.mark.parametrize("score", SCORES)
def test_a_step_of_a_pack_waits_for_nothing_and_gives_the_numbers_of_the_processor(
    score: str, monkeypatch: pytest.MonkeyPatch
):
    models = two_models(score)
    with pretended() as seen:
        pack = Pack(models, device=DEVICE)
        seen.clear()
        pack.update(0)
        assert seen == {"generator": 1}
        loss = pack.advance()
        results = pack.results()
    monkeypatch.setattr(pack_module, "loss_and_gradients", by_tensors)
    expected = Pack(models)
    expected.update(0)
    assert loss == expected.advance()
    for name, model in expected.results().items():
        _require_equal(results[name].weights, model.weights)


def test_a_step_of_drawn_length_waits_for_nothing_and_has_the_processors_length():
    models = {"model": deep_experiment("linear", shortest=2)}
    on_processor = DeepRun(models)
    longest = on_processor.config.task.context_length
    expected = [
        on_processor._length(step, generator_for(0, "train", step), longest) for step in range(8)
    ]
    assert len(set(expected)) > 2
    with pretended() as seen:
        run = DeepRun(models, device=DEVICE)
        seen.clear()
        run.update(0)
        assert seen == {"generator": 1}
        seeded = [generator_for(0, "train", step, device=DEVICE) for step in range(8)]
        drawn = [run._length(step, generator, longest) for step, generator in enumerate(seeded)]
    assert drawn == expected


def _require_equal(weights: Weights, expected: Weights) -> None:
    for name, tensor in expected.tensors.items():
        assert torch.equal(weights.tensors[name], tensor), name
