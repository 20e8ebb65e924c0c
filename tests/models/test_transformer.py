"""The hooked model: same numbers as the functional one, strict mask, TransformerLens' contract."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mechinterp.config import SCORES, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models import heads as functional
from mechinterp.models.constructions.one_layer import kernel_head, one_layer
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import is_normalised
from mechinterp.models.weights import Weights
from tests import deep_models
from tests.conftest import (
    ROUNDING,
    assert_close_to_rounding,
    assert_same,
    by_head,
    changed,
    refused,
)

TASK = TaskConfig(d_x=3, d_y=2, context_length=8)
D_HEAD = 4


def random_weights(
    *, n_heads: int = 3, d_y: int = 2, score: str = "softmax", dtype: torch.dtype = torch.float64
) -> Weights:
    generator = generator_for(1, "init", n_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype) / 2

    d_model = TASK.d_x + d_y
    return one_layer(
        W_Q=normal(n_heads, d_model, D_HEAD),
        W_K=normal(n_heads, d_model, D_HEAD),
        W_V=normal(n_heads, d_model, D_HEAD),
        W_O=normal(n_heads, D_HEAD, d_y),
        scale=0.3,
        score=score,
        # So small that 1 + C s, which has no lower bound, stays positive.
        score_slope=0.2,
    )


def random_prompts(
    length: int, *, d_y: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Prompts:
    task = replace(TASK, d_y=d_y, context_length=length)
    return sample_prompts(task, 6, seed=seed, dtype=dtype)


def random_model(n_layers: int = 1, score: str = "softmax") -> ICLTransformer:
    """A model in float64; all weights random, the x columns of W_O among them if it is deep."""
    if n_layers == 1:
        return ICLTransformer.from_weights(random_weights(score=score), task=TASK)
    sizes = {"d_x": 3, "d_y": 2, "n_ctx": 10}
    return deep_models.random_model(n_layers, 3, sizes=sizes, std=0.5, d_head=D_HEAD)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("n_heads", "d_y", "length"), [(1, 1, 8), (3, 2, 1), (3, 2, 40)])
@pytest.mark.parametrize("score", SCORES)
def test_hooked_model_agrees_with_functional_one(
    score: str, n_heads: int, d_y: int, length: int, dtype: torch.dtype
):
    weights = random_weights(n_heads=n_heads, d_y=d_y, score=score, dtype=dtype)
    model = ICLTransformer.from_weights(weights, task=replace(TASK, d_y=d_y))
    prompts = random_prompts(length, d_y=d_y, dtype=dtype)
    _, cache = model.run_with_cache(prompts.tokens)
    head_outputs = cache.stack_head_results(layer=1)[:, :, -1] @ model.W_U
    for values, expected in (
        (model.predict(prompts), functional.predict(weights, prompts)),
        (head_outputs.transpose(0, 1), functional.head_outputs(weights, prompts)),
    ):
        assert_close_to_rounding(values.detach(), expected)


def biased_weights(attend_to_self: bool, score: str) -> Weights:
    generator = torch.Generator().manual_seed(5)
    shapes = {"b_Q": (3, D_HEAD), "b_K": (3, D_HEAD), "b_V": (3, D_HEAD), "b_O": (2,)}
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    biases = {name: draw(*shape) for name, shape in shapes.items()}
    weights = changed(random_weights(score=score), **biases)
    return weights.with_model(attend_to_self=attend_to_self)


@pytest.mark.parametrize("attend_to_self", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_biases_and_attention_to_oneself_agree_with_the_functional_model(
    score: str, attend_to_self: bool
):
    weights = biased_weights(attend_to_self, score)
    model = ICLTransformer.from_weights(weights, task=TASK)
    prompts = random_prompts(8)
    expected = functional.predict(weights, prompts)
    assert_close_to_rounding(model.predict(prompts).detach(), expected)
    plain = functional.predict(weights.with_model(attend_to_self=not attend_to_self), prompts)
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()
    _, cache = model.run_with_cache(prompts.tokens)
    results = cache.stack_head_results(layer=1, incl_remainder=True)[:, :, -1] @ model.W_U
    torch.testing.assert_close(results.sum(0), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.accumulated_bias(0), torch.zeros(5).double())
    assert torch.equal(model.accumulated_bias(1)[3:], weights.output_bias)
    assert_same(model.weights, weights)


def test_biases_follow_the_formula():
    weights = biased_weights(attend_to_self=True, score="softmax")
    prompts = random_prompts(8)
    keys, query, of = prompts.tokens, prompts.tokens[:, -1], by_head(weights)
    expected = of["b_O"].clone()
    for head in range(3):
        q = query @ of["W_Q"][head] + of["b_Q"][head]
        k = keys @ of["W_K"][head] + of["b_K"][head]
        v = keys @ of["W_V"][head] + of["b_V"][head]
        pattern = torch.softmax(weights.scale * (k * q[:, None]).sum(-1), dim=1)
        expected = expected + (pattern[..., None] * v).sum(1) @ of["W_O"][head]
    assert_close_to_rounding(functional.predict(weights, prompts), expected)


def test_every_position_is_a_query_of_the_pairs_before_it():
    omega, mu = 0.4, 1.5
    task = TaskConfig(d_x=3, context_length=8)
    model = ICLTransformer.from_weights(kernel_head(omega, mu, d_x=3), task=task)
    tokens = random_prompts(8, d_y=1).tokens
    x, y = tokens[..., :3], tokens[..., 3:]
    logits = model(tokens)
    for position in range(9):
        expected = y[:, position].clone()  # the token itself stays in the residual stream
        if position > 0:
            scores = omega * (x[:, :position] * x[:, position, None]).sum(-1, keepdim=True)
            expected += mu * (torch.softmax(scores, dim=1) * y[:, :position]).sum(1)
        torch.testing.assert_close(logits[:, position], expected, rtol=1e-12, atol=1e-12)


def test_two_layers_follow_the_formula():
    model = random_model(n_layers=2)
    tokens = random_prompts(8).tokens
    resid = tokens.clone()
    for attn in (block.attn for block in model.blocks):
        read = resid.clone()
        for head in range(3):
            q, k, v = (read @ W[head] for W in (attn.W_Q, attn.W_K, attn.W_V))
            for i in range(1, 9):
                scores = (k[:, :i] * q[:, i, None]).sum(-1) / 2  # sqrt(d_head) = 2
                z = (torch.softmax(scores, dim=1)[..., None] * v[:, :i]).sum(1)
                resid[:, i] += z @ attn.W_O[head]
    assert_close_to_rounding(model(tokens).detach(), resid[..., 3:].detach())


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("score", SCORES)
def test_mask_is_strict_at_any_length_and_after_loading_and_copying(score: str, length: int):
    model = random_model(score=score)
    tokens = random_prompts(length).tokens
    config = ModelConfig(n_heads=3, d_head=D_HEAD, score=score, score_slope=0.2)
    loaded = ICLTransformer(config, d_x=3, d_y=2, scale=0.3, n_ctx=4).to(torch.float64)
    loaded.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(loaded(tokens), model(tokens))
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for m in (model, loaded, copied, pickled):
        _, cache = m.run_with_cache(tokens)
        pattern = cache["pattern", 0]
        assert pattern.shape == (6, 3, length + 1, length + 1)
        assert torch.equal(pattern.triu(0), torch.zeros_like(pattern))
        below = torch.ones(length + 1, length + 1).tril(-1) == 1
        assert (pattern[..., below] != 0).all()
        if is_normalised(score):
            sums = torch.ones(6, 3, length).double()
            torch.testing.assert_close(pattern[..., 1:, :].sum(-1), sums)
        assert (cache["attn_scores", 0][..., ~below] == -torch.inf).all()


def test_x_columns_of_one_layers_output_are_zero_and_frozen():
    model, deep = random_model(), random_model(n_layers=2)
    for m in (model, deep):
        # A loss that reads the whole residual stream, x included.
        m.set_use_attn_result(m is model)
        (m(random_prompts(8).tokens, stop_at_layer=m.cfg.n_layers) ** 2).sum().backward()
    assert torch.equal(model.W_O[..., :3], torch.zeros(1, 3, 4, 3).double())
    gradient = model.blocks[0].attn.W_O.grad
    assert torch.equal(gradient[..., :3], torch.zeros(3, 4, 3).double())
    assert (gradient[..., 3:].abs() > 0).all()
    assert (deep.blocks[0].attn.W_O.grad.abs() > 0).all()


MISFITS = {
    "size": (lambda: ICLTransformer(ModelConfig(), d_x=3, d_y=0), ("d_y", ">= 1", 0)),
    "task": (
        lambda: ICLTransformer.from_weights(random_weights(), task=replace(TASK, d_x=4)),
        ("d_x", "3 and 4"),
    ),
    "dtype": (lambda: random_model()(torch.zeros(2, 9, 5)), ("torch.float64", "torch.float32")),
    "width": (lambda: random_model()(torch.zeros(2, 9, 6).double()), ("pos, 5]", "[2, 9, 6]")),
    "stream": (
        lambda: random_model()(torch.zeros(2, 9, 6).double(), start_at_layer=0),
        ("pos, 5]", "[2, 9, 6]"),
    ),
}


@pytest.mark.parametrize(("use", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_weights_is_refused(use, words):
    with refused(*words):
        use()


def test_composed_circuits_carry_the_scale():
    weights = random_weights()
    model = ICLTransformer.from_weights(weights, task=TASK)
    torch.testing.assert_close(model.QK.AB[0] * weights.scale, weights.QK, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.OV.AB[0] @ model.W_U, weights.OV, rtol=1e-12, atol=1e-12)
