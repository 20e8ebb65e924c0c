"""Compiled attention under automatic gradients, against plain tensor operations in float64."""

from dataclasses import replace

import pytest
import torch

from mechinterp.config import ModelConfig
from mechinterp.models.run import general as weights_alone
from mechinterp.training.general.attention import attend
from mechinterp.training.lanes import LANES

MODEL = ModelConfig(context_only=True, score_slope=1.5)
COMPILED = ("linear", "linear/L", "relu/L", "softmax")


def heads(n_rows: int, n_prompts: int = LANES + 5) -> list[torch.Tensor]:
    """Queries of the last rows, keys and values of 7 positions, [batch, position, head, d]."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(n_prompts, rows, 2, 3) for rows in (n_rows, 7, 7)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def read_and_gradients(attention, inputs: list[torch.Tensor], model: ModelConfig):
    leaves = [each.clone().requires_grad_() for each in inputs]
    z = attention(*leaves, model)
    along = torch.sin(torch.arange(z.numel(), dtype=torch.float64)).view(z.shape).to(z)
    return [z, *torch.autograd.grad(z, leaves, along)]


@pytest.mark.parametrize("attend_to_self", [False, True])
@pytest.mark.parametrize("n_rows", [1, 7])
@pytest.mark.parametrize("score", COMPILED)
def test_compiled_attention_equals_tensor_operations(score: str, n_rows: int, attend_to_self: bool):
    model = replace(MODEL, score=score, attend_to_self=attend_to_self)
    inputs = heads(n_rows)
    expected = read_and_gradients(weights_alone.attend, inputs, model)
    compiled = read_and_gradients(attend, [each.float() for each in inputs], model)
    assert compiled[0].grad_fn.name() == "_AttendedBackward"
    for one, other in zip(compiled, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()
    if not attend_to_self:
        assert not compiled[2][:, -1].any()


def test_a_prompt_reads_the_same_whatever_stands_beside_it():
    inputs = [each.float() for each in heads(7, 2 * LANES)]
    whole = attend(*inputs, MODEL)
    part = attend(*(each[3:9] for each in inputs), MODEL)
    assert torch.equal(part, whole[3:9])


@pytest.mark.parametrize("model", [ModelConfig(), replace(MODEL, score="1+tanh")])
def test_what_the_kernel_does_not_compute_is_left_to_tensor_operations(model: ModelConfig):
    inputs = [each.float() for each in heads(7)]
    assert torch.equal(attend(*inputs, model), weights_alone.attend(*inputs, model))
