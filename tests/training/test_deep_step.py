"""The step of a stack of layers, and attention under automatic gradients, compiled, against plain ones in float64."""

from dataclasses import replace

import pytest
import torch

from mechinterp.config import CONTEXT_ONLY_SCORES, ModelConfig, TaskConfig, override
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.run.attend import attend
from mechinterp.models.run.general import predict_deep
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.training.batches import LANES
from mechinterp.training.general import step
from mechinterp.training.general.step import attend_for_training, loss_and_gradients
from mechinterp.training.general.trainer import initial_deep_weights
from tests.deep_models import random_model

SCORES = ("linear", *CONTEXT_ONLY_SCORES)
TASK = TaskConfig(d_x=3, d_y=2, context_length=9)


def some_prompts(n_prompts: int = LANES + 5) -> Prompts:
    generator = generator_for(0, "train", 0)
    return draw_prompts(TASK, n_prompts, generator=generator, dtype=torch.float64)


def some_weights(score: str, n_layers: int, d_model: int | None) -> Weights:
    """Weights whose loss stays in the range of float32."""
    settings = {"score": score, "score_slope": 0.2, "context_only": True, "d_model": d_model}
    sizes = {"d_x": 3, "d_y": 2}
    return random_model(n_layers, 3, sizes=sizes, std=0.28, d_head=4, **settings).weights


def automatic(weights: Weights, prompts: Prompts) -> tuple[torch.Tensor, Weights]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.tensors.items()}
    error = predict_deep(weights.with_tensors(leaves), prompts) - prompts.y_query
    loss = error.square().mean()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return loss.detach(), weights.with_tensors(dict(zip(leaves, gradients, strict=True)))


def assert_close(actual: Weights, expected: Weights, tolerance: float):
    """Equal in every layer, relative to its largest entry."""
    for name, wanted in expected.tensors.items():
        flat = wanted.flatten(1) if name.startswith("attn.") else wanted.flatten()
        error = (actual.tensors[name].double() - wanted).abs().reshape(flat.shape)
        assert (error.amax(-1) <= tolerance * flat.abs().amax(-1)).all(), name
        assert flat.abs().amax(-1).min() > 1e-8, name


@pytest.mark.parametrize(("n_layers", "d_model"), [(1, None), (2, 12), (4, None)])
@pytest.mark.parametrize("score", SCORES)
def test_step_equals_automatic_differentiation(score: str, n_layers: int, d_model: int | None):
    weights, prompts = some_weights(score, n_layers, d_model), some_prompts()
    expected_loss, expected = automatic(weights, prompts)
    loss, gradients = loss_and_gradients(weights, prompts)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert_close(gradients, expected, 1e-12)
    loss, gradients = loss_and_gradients(weights.to(torch.float32), prompts.to(torch.float32))
    assert loss.dtype == gradients.W_Q.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=0)
    assert_close(gradients, expected, 1e-4)


MODEL = ModelConfig(context_only=True, score_slope=1.5)
EVERY = slice(0, None)
COMPILED = ("linear", "linear/L", "relu/L", "softmax")


def heads(n_rows: int, n_prompts: int = LANES + 5) -> list[torch.Tensor]:
    """Queries of the last rows, keys and values of 7 positions, [batch, position, head, d]."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(n_prompts, rows, 2, 3) for rows in (n_rows, 7, 7)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def read_and_gradients(attention, inputs: list[torch.Tensor], model: ModelConfig):
    leaves = [each.clone().requires_grad_() for each in inputs]
    z = attention(*leaves, model, slice(-inputs[0].shape[1], None))
    along = torch.sin(torch.arange(z.numel(), dtype=torch.float64)).view(z.shape).to(z)
    return [z, *torch.autograd.grad(z, leaves, along)]


@pytest.mark.parametrize("attend_to_self", [False, True])
@pytest.mark.parametrize("n_rows", [1, 7])
@pytest.mark.parametrize("score", COMPILED)
def test_compiled_attention_equals_tensor_operations(score: str, n_rows: int, attend_to_self: bool):
    model = replace(MODEL, score=score, attend_to_self=attend_to_self)
    inputs = heads(n_rows)
    expected = read_and_gradients(attend, inputs, model)
    compiled = read_and_gradients(attend_for_training, [each.float() for each in inputs], model)
    assert compiled[0].grad_fn.name() == "_AttendedBackward"
    for one, other in zip(compiled, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    if not attend_to_self:
        assert not compiled[2][:, -1].any()


def test_a_prompt_reads_the_same_whatever_stands_beside_it():
    inputs = [each.float() for each in heads(7, 2 * LANES)]
    whole = attend_for_training(*inputs, MODEL, EVERY)
    part = attend_for_training(*(each[3:9] for each in inputs), MODEL, EVERY)
    assert torch.equal(part, whole[3:9])


WAYS = [
    # settings of sparse-h4, dtype, what runs
    (("score=softmax",), torch.float32, {"written out", "compiled"}),
    (("score=relu/L",), torch.float32, {"written out", "compiled"}),
    (("score=1+tanh",), torch.float32, {"written out"}),
    (("score=1+Cx",), torch.float32, {"written out"}),
    (("score=(1+Cx)^2",), torch.float32, {"written out"}),
    (("score=softmax",), torch.float64, {"written out"}),
    (("score=softmax", "d_model=null", "d_head=4"), torch.float32, {"written out", "compiled"}),
    (("score=linear/L",), torch.float32, set()),
    (("score=linear/L", "norm=before"), torch.float32, {"compiled"}),
    (("score=softmax", "norm=before"), torch.float32, {"compiled"}),
    (("score=softmax", "d_mlp=32"), torch.float32, {"compiled"}),
    (("score=softmax", "biases=true"), torch.float32, {"compiled"}),
    (("score=1+tanh", "norm=before"), torch.float32, set()),
    (("score=softmax", "norm=before"), torch.float64, set()),
    (("score=softmax", "context_only=false"), torch.float32, set()),
]


@pytest.mark.parametrize(("settings", "dtype", "expected"), WAYS)
def test_passes_by_hand_and_compiled_attention_run_for(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], dtype: torch.dtype, expected: set
):
    used = set()

    def noting(name: str, function):
        return lambda *arguments: used.add(name) or function(*arguments)

    monkeypatch.setattr(step, "_Forward", noting("written out", step._Forward))
    by_kernel = step._Attention._by_kernel
    monkeypatch.setattr(step._Attention, "_by_kernel", noting("compiled", by_kernel))
    config = override(preset("sparse-h4"), *(f"model.{setting}" for setting in settings))
    weights = initial_deep_weights(config).to(dtype)
    prompts = draw_prompts(config.task, 4, seed=0, dtype=dtype, context_length=5)
    loss, _ = step.loss_and_gradients(weights, prompts)
    assert used == expected
    used.clear()
    torch.testing.assert_close(step.loss_of(weights, prompts), loss)
    assert used == expected
