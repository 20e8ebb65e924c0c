"""Models of several layers: what is computed where it counts is what the hooked model computes everywhere."""

import pytest
import torch
from torch import Tensor

from mechinterp.config import CONTEXT_ONLY_SCORES, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.constructions.stack import stack_of_layers
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.general import predict_deep
from mechinterp.models.weights import Weights
from tests.conftest import assert_close_to_rounding, assert_same

TASK = TaskConfig(d_x=3, d_y=2, context_length=9)


def random_weights(
    *, n_layers: int = 3, score: str = "linear/L", d_model: int | None = 7
) -> Weights:
    generator = generator_for(3, "init", n_layers)

    def normal(*shape: int) -> Tensor:
        return 0.4 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = 5 if d_model is None else d_model
    return stack_of_layers(
        W_Q=normal(n_layers, 3, width, 4),
        W_K=normal(n_layers, 3, width, 4),
        W_V=normal(n_layers, 3, width, 4),
        W_O=normal(n_layers, 3, 4, width),
        reading=None if d_model is None else (normal(5, width), normal(width, 2)),
        d_y=2,
        scale=0.5,
        score=score,
        # So small that 1 + C s, which has no lower bound, stays positive.
        score_slope=0.2,
    )


@pytest.fixture
def prompts() -> Prompts:
    return sample_prompts(TASK, 6, dtype=torch.float64)


@pytest.mark.parametrize(("n_layers", "d_model"), [(1, None), (2, 5), (4, 12)])
@pytest.mark.parametrize("score", CONTEXT_ONLY_SCORES)
def test_functional_and_hooked_model_agree(
    prompts: Prompts, score: str, n_layers: int, d_model: int | None
):
    weights = random_weights(score=score, n_layers=n_layers, d_model=d_model)
    model = ICLTransformer.from_weights(weights, task=TASK)
    predictions = predict_deep(weights, prompts)
    assert_close_to_rounding(predictions, model.predict(prompts).detach())
    assert predictions.abs().max() > 1e-3
    assert_same(model.weights, weights)


def test_zero_heads_are_told_and_taken_out(prompts: Prompts):
    weights = random_weights()
    masked = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    masked["attn.W_O"][0, 1] = 0
    masked["attn.W_V"][1, :2] = 0
    pruned = weights.with_tensors(masked)
    assert weights.heads_per_layer == ((0, 1, 2),) * 3
    assert pruned.heads_per_layer == ((0, 2), (2,), (0, 1, 2))
    masked["attn.W_O"][2, 0] = 0
    pruned = weights.with_tensors(masked)
    small = pruned.compact()
    assert (small.n_heads, small.heads_per_layer) == (2, ((0, 1), (0,), (0, 1)))
    expected = predict_deep(pruned, prompts)
    torch.testing.assert_close(predict_deep(small, prompts), expected, rtol=1e-12, atol=1e-12)
    nothing = weights.with_tensors({"attn.W_V": torch.zeros_like(weights.W_V)})
    assert nothing.compact().n_heads == 1
