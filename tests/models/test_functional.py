"""The batched forward pass against the published formula, written out token by token."""

import pytest
import torch

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.heads import attend, head_outputs, predict, stack
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import assert_close_to_rounding, by_head, predictions_of_each, refused

TASK = TaskConfig(d_x=3, d_y=2, context_length=6)


def random_weights(n_heads: int, *, seed: int = 0, d_head: int = 4) -> Weights:
    model = ModelConfig(n_heads=n_heads, d_head=d_head)
    config = ExperimentConfig(task=TASK, model=model, seed=seed)
    weights = initial_weights(config).to(torch.float64)
    return weights.with_tensors({name: 2 * tensor for name, tensor in weights.tensors.items()})


@pytest.fixture
def some_prompts() -> Prompts:
    return sample_prompts(TASK, 16, dtype=torch.float64)


def written_out(weights: Weights, prompts: Prompts) -> torch.Tensor:
    """Outputs of every head, one prompt, head and token at a time."""
    outputs = torch.zeros(len(prompts), weights.n_heads, weights.d_y, dtype=torch.float64)
    W_Q, W_K, W_V, W_O = (by_head(weights)[name] for name in NAMES)
    for b, tokens in enumerate(prompts.tokens):
        for h in range(weights.n_heads):
            q = tokens[-1] @ W_Q[h]
            scores = torch.stack([weights.scale * q @ (z @ W_K[h]) for z in tokens[:-1]])
            for z, share in zip(tokens[:-1], scores.exp() / scores.exp().sum(), strict=True):
                outputs[b, h] += share * z @ W_V[h] @ W_O[h]
    return outputs


def test_head_outputs_and_predictions_equal_the_formula(some_prompts: Prompts):
    weights = random_weights(3)
    expected = written_out(weights, some_prompts)
    assert expected.abs().mean() > 0.1
    assert_close_to_rounding(head_outputs(weights, some_prompts), expected)
    assert_close_to_rounding(predict(weights, some_prompts), expected.sum(1))


def test_other_scores_reach_the_pattern(some_prompts: Prompts):
    weights = random_weights(2).with_model(score="1+Cx", score_slope=0.3)
    query = torch.einsum("bd,hde->bhe", some_prompts.tokens[:, -1], weights.W_Q[0])
    key = torch.einsum("bld,hde->blhe", some_prompts.context_tokens, weights.W_K[0])
    values = 1 + 0.3 * weights.scale * torch.einsum("bhe,blhe->blh", query, key)
    pattern, *_ = attend(weights, some_prompts.context_tokens, some_prompts.x_query)
    assert_close_to_rounding(pattern, values / values.sum(1, keepdim=True))


def test_replicas_predict_as_they_do_alone(some_prompts: Prompts):
    models = [random_weights(n_heads, seed=n_heads) for n_heads in (1, 2, 3)]
    packed = predictions_of_each(stack(models), some_prompts, (1, 2, 3))
    assert packed.shape == (16, 3, 2)
    for index, model in enumerate(models):
        assert_close_to_rounding(packed[:, index], predict(model, some_prompts))


def test_circuits_are_products_of_the_weights():
    weights = random_weights(3)
    assert weights.scale == 0.5
    W_Q, W_K, W_V, W_O = (by_head(weights)[name] for name in NAMES)
    for h in range(3):
        expected = weights.scale * W_Q[h] @ W_K[h].T
        assert_close_to_rounding(weights.QK[h], expected)
        assert_close_to_rounding(weights.OV[h], W_V[h] @ W_O[h])
        assert weights.omega[h].tolist() == [weights.QK[h, i, i].item() for i in range(3)]
        assert weights.mu[h].tolist() == [weights.OV[h, 3 + n, n].item() for n in range(2)]
    assert (weights.n_heads, weights.d_x, weights.d_y) == (3, 3, 2)


def test_shares_of_diagonal_and_last_entry():
    heads = diagonal_heads([0.2, 0.0], [-3.0, 0.0], d_x=2)
    assert heads.qk_diagonal.tolist() == pytest.approx([1, 0])
    assert heads.ov_last_entry.tolist() == pytest.approx([1, 0])
    tilted = heads.with_tensors({"attn.W_Q": heads.W_Q.clone(), "attn.W_V": heads.W_V.clone()})
    # x block (a, a; 0, a): sqrt(2/3) lies on the diagonal.
    tilted.W_Q[0, 0, 0, 1] = tilted.W_Q[0, 0, 0, 0]
    tilted.W_V[0, 0, 0, 2] = 1.0  # reads x_0 as strongly as y
    assert tilted.qk_diagonal[0].item() == pytest.approx((2 / 3) ** 0.5)
    assert tilted.ov_last_entry[0].item() == pytest.approx(0.5**0.5)


@pytest.mark.parametrize(
    "other",
    [random_weights(1, d_head=5), random_weights(1).with_model(score_slope=2.0)],
    ids=["d_head", "score_slope"],
)
def test_models_of_different_kinds_are_not_stacked(other: Weights):
    with refused("head shape, scale and score", "2 kinds"):
        stack([random_weights(1), other])
