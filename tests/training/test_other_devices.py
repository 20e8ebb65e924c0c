"""Steps, sampling and masking on a GPU, as far as they can be checked without one.

PyTorch's FakeTensorMode has "cuda" tensors of shapes alone: it raises where devices mix and where a number is asked
for. The pretended device of these tests has numbers, too, and counts what a step makes the host wait for.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from mechinterp.config import SCORES, ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.task import CovarianceConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from mechinterp.training.general import attention as deep_attention
from mechinterp.training.general import step as deep_step
from mechinterp.training.general.trainer import DeepRun, initial_deep_weights
from mechinterp.training.one_layer import pack as pack_module
from mechinterp.training.one_layer.pack import Pack
from mechinterp.training.one_layer.step import by_tensors
from mechinterp.training.run import Run
from tests.pretended import DEVICE, fused_adam, generators, pretended

aten = torch.ops.aten
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


DTYPES = {Tensor.double: torch.float64, Tensor.float: torch.float32}


class WithoutCuda(TorchFunctionMode):
    """Methods that ask a PyTorch built without CUDA for the device itself, as the operations that they stand for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.to:
            return moved(*args, **kwargs or {})
        if function in DTYPES:
            return moved(*args, DTYPES[function])
        if function is Tensor.copy_:
            return aten.copy_(*args)
        if function is Tensor.contiguous:
            return aten.clone(*args, memory_format=torch.contiguous_format)
        if function in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type == "cuda":
            view, lists = indexed(*args[:2])
            if function is Tensor.__getitem__:
                return aten.index(view, lists) if lists else view
            value = torch.as_tensor(args[2], dtype=view.dtype)
            return aten.index_put_(view, lists, value) if lists else aten.copy_(view, value)
        return function(*args, **kwargs or {})


def moved(tensor: Tensor, *targets: object, **named: object) -> Tensor:
    """`tensor.to(...)`."""
    wanted = {"device": tensor.device, "dtype": tensor.dtype} | named
    for target in targets:
        if isinstance(target, Tensor):
            wanted |= {"device": target.device, "dtype": target.dtype}
        elif isinstance(target, torch.dtype):
            wanted["dtype"] = target
        elif isinstance(target, str | torch.device):
            wanted["device"] = torch.device(target)
    if (wanted["device"], wanted["dtype"]) == (tensor.device, tensor.dtype):
        return tensor
    return aten._to_copy(tensor, **wanted)


def indexed(tensor: Tensor, index: object) -> tuple[Tensor, list[Tensor | None]]:
    """The view by the slices and numbers of an index, and its lists, by the dimensions of that view."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is ... for part in parts):
        at = next(i for i, part in enumerate(parts) if part is ...)
        n_named = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - n_named)
    dim, lists = 0, {}
    for part in parts:
        if isinstance(part, int):
            tensor = aten.select(tensor, dim, part)
            continue
        if part is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        else:
            lists[dim] = torch.as_tensor(part, dtype=torch.long if len(part) == 0 else None)
        dim += 1
    return tensor, [lists.get(i) for i in range(max(lists) + 1)] if lists else []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a device whose tensors have shapes alone; runs record no rows on it."""
    monkeypatch.setattr(Run, "_record", lambda *_: 0.0)
    with FakeTensorMode(allow_non_fake_inputs=False), WithoutCuda(), generators(Counter()):
        yield "cuda"


def test_the_fake_device_refuses_what_a_gpu_would(cuda: str):
    on_gpu = torch.zeros(3, device=cuda)
    with pytest.raises(RuntimeError, match="device"):
        on_gpu + torch.zeros(3)
    with pytest.raises(DataDependentOutputException):
        on_gpu.sum().item()


@pytest.mark.slow
@pytest.mark.parametrize("score", SCORES)
def test_a_step_of_a_pack_stays_on_the_gpu(score: str, cuda: str):
    pack = Pack(two_models(score), device=cuda)
    pack.update(0)
    held = [pack.flat, pack.gradient, pack.loss_sum, pack._n_updates, *pack.moments.values()]
    assert {tensor.device.type for tensor in held} == {"cuda"}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_drawn_on_the_gpu(task: str, cuda: str):
    prompts = sample_prompts(TASKS[task], 4, generator=generator_for(0, "train", 0, device=cuda))
    assert {getattr(prompts, f.name).device.type for f in fields(prompts)} == {"cuda"}


def random_weights(kind: str) -> Weights:
    model = ModelConfig() if kind == "one layer" else deep_experiment(kind).model
    return initial_deep_weights(ExperimentConfig(SMALL, model, TRAIN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [("one layer", "zero"), ("one layer", "mean"), ("one layer", "resample"), ("linear", "zero")],
)
def test_masking_stays_on_the_gpu(kind: str, method: str, cuda: str):
    prompts = sample_prompts(SMALL, 4, generator=generator_for(0, "eval", 0, device=cuda))
    predictor = predictor_of(random_weights(kind).to(cuda))
    masks = [[], [(0, 1)], [(0, 0), (predictor.n_layers - 1, 1)]]
    predictions = predictor.run(prompts, masks, method=method)
    assert (predictions.device.type, tuple(predictions.shape)) == ("cuda", (3, 4, 1))


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
    for module in (deep_step, deep_attention):
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


@pytest.mark.parametrize("score", ["softmax", "linear/L"])
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
    expected = [on_processor._length(step, generator_for(0, "train", step)) for step in range(8)]
    assert len(set(expected)) > 2
    with pretended() as seen:
        run = DeepRun(models, device=DEVICE)
        seen.clear()
        run.update(0)
        assert seen == {"generator": 1}
        seeded = [generator_for(0, "train", step, device=DEVICE) for step in range(8)]
        drawn = [run._length(step, generator) for step, generator in enumerate(seeded)]
    assert drawn == expected


def _require_equal(weights: Weights, expected: Weights) -> None:
    for name, tensor in expected.tensors.items():
        assert torch.equal(weights.tensors[name], tensor), name
