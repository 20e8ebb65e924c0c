"""The hooked model and the functional one: both are the published formula, agree, and keep TransformerLens' contract."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from mechinterp.config import CONTEXT_ONLY_SCORES, SCORES, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models import heads as functional
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import is_normalised
from mechinterp.models.run.general import predict_deep
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import initial_weights
from tests import deep_models
from tests.conformance.conftest import sample_inputs
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


def random_weights(n_heads: int = 3, *, d_y: int = 2, seed: int = 0, **architecture) -> Weights:
    """One layer with random weights, in float64."""
    model = ModelConfig(**{"n_heads": n_heads, "d_head": D_HEAD, "score_slope": 0.1} | architecture)
    config = ExperimentConfig(replace(TASK, d_y=d_y), model, seed=seed)
    weights = initial_weights(config).to(torch.float64)
    return weights.with_tensors({name: 2 * tensor for name, tensor in weights.tensors.items()})


def biased_weights(attend_to_self: bool, score: str) -> Weights:
    generator = torch.Generator().manual_seed(5)
    shapes = {"b_Q": (3, D_HEAD), "b_K": (3, D_HEAD), "b_V": (3, D_HEAD), "b_O": (2,)}
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    biases = {name: draw(*shape) for name, shape in shapes.items()}
    return changed(random_weights(score=score), **biases).with_model(attend_to_self=attend_to_self)


def random_prompts(length: int = 8, *, d_y: int = 2) -> Prompts:
    task = replace(TASK, d_y=d_y, context_length=length)
    return draw_prompts(task, 6, dtype=torch.float64)


def random_model(n_layers: int = 2, **architecture: object) -> ICLTransformer:
    """Random layers of three heads, which write x columns too, in float64."""
    sizes = {"d_x": 3, "d_y": 2, "n_ctx": 10}
    return deep_models.random_model(
        n_layers, 3, sizes=sizes, std=0.4, d_head=D_HEAD, **architecture
    )


# The formula, written out token by token.


def test_outputs_of_heads_and_predictions_follow_the_formula():
    weights, prompts = random_weights(), random_prompts()
    expected = torch.zeros(6, 3, 2, dtype=torch.float64)
    W_Q, W_K, W_V, W_O = (by_head(weights)[name] for name in NAMES)
    for b, tokens in enumerate(prompts.tokens):
        for h in range(3):
            q = tokens[-1] @ W_Q[h]
            scores = torch.stack([weights.scale * q @ (z @ W_K[h]) for z in tokens[:-1]])
            for z, share in zip(tokens[:-1], scores.exp() / scores.exp().sum(), strict=True):
                expected[b, h] += share * z @ W_V[h] @ W_O[h]
    assert expected.abs().mean() > 0.1
    assert_close_to_rounding(functional.head_outputs(weights, prompts), expected)
    assert_close_to_rounding(functional.predict(weights, prompts), expected.sum(1))


def test_biases_follow_the_formula():
    weights = biased_weights(attend_to_self=True, score="softmax")
    prompts = random_prompts()
    keys, query, of = prompts.tokens, prompts.tokens[:, -1], by_head(weights)
    expected = of["b_O"].clone()
    for head in range(3):
        q = query @ of["W_Q"][head] + of["b_Q"][head]
        k = keys @ of["W_K"][head] + of["b_K"][head]
        v = keys @ of["W_V"][head] + of["b_V"][head]
        pattern = torch.softmax(weights.scale * (k * q[:, None]).sum(-1), dim=1)
        expected = expected + (pattern[..., None] * v).sum(1) @ of["W_O"][head]
    assert_close_to_rounding(functional.predict(weights, prompts), expected)


def test_two_layers_follow_the_formula():
    model = random_model()
    tokens = random_prompts().tokens
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


# Both models agree.


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("n_heads", "d_y", "length"), [(1, 1, 8), (3, 2, 1), (3, 2, 40)])
@pytest.mark.parametrize("score", SCORES)
def test_hooked_model_agrees_with_functional_one(
    score: str, n_heads: int, d_y: int, length: int, dtype: torch.dtype
):
    weights = random_weights(n_heads, d_y=d_y, score=score).to(dtype)
    model = ICLTransformer.from_weights(weights, task=replace(TASK, d_y=d_y))
    prompts = random_prompts(length, d_y=d_y).to(dtype)
    _, cache = model.run_with_cache(prompts.tokens)
    head_outputs = cache.stack_head_results(layer=1)[:, :, -1] @ model.W_U
    for values, expected in (
        (model.predict(prompts), functional.predict(weights, prompts)),
        (head_outputs.transpose(0, 1), functional.head_outputs(weights, prompts)),
    ):
        assert_close_to_rounding(values.detach(), expected)


@pytest.mark.parametrize("attend_to_self", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_biases_and_attention_to_oneself_agree(score: str, attend_to_self: bool):
    weights, prompts = biased_weights(attend_to_self, score), random_prompts()
    model = ICLTransformer.from_weights(weights, task=TASK)
    expected = functional.predict(weights, prompts)
    assert_close_to_rounding(model.predict(prompts).detach(), expected)
    plain = functional.predict(weights.with_model(attend_to_self=not attend_to_self), prompts)
    assert (plain - expected).abs().max() > 1e-3 * expected.abs().max()
    _, cache = model.run_with_cache(prompts.tokens)
    results = cache.stack_head_results(layer=1, incl_remainder=True)[:, :, -1] @ model.W_U
    torch.testing.assert_close(results.sum(0), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(model.accumulated_bias(0), torch.zeros(5).double())
    for at, mlp_input in ((0, True), (1, False)):
        assert torch.equal(model.accumulated_bias(at, mlp_input)[3:], weights.output_bias)
    assert_same(model.weights, weights)


@pytest.mark.parametrize(("n_layers", "d_model"), [(1, None), (2, 5), (4, 12)])
@pytest.mark.parametrize("score", CONTEXT_ONLY_SCORES)
def test_layers_that_read_all_pairs_agree(score: str, n_layers: int, d_model: int | None):
    settings = {"score": score, "score_slope": 0.1, "context_only": True, "d_model": d_model}
    model, prompts = random_model(n_layers, **settings), random_prompts()
    predictions = predict_deep(model.weights, prompts)
    assert_close_to_rounding(predictions, model.predict(prompts).detach())
    assert predictions.abs().max() > 1e-3
    assert_same(ICLTransformer.from_weights(model.weights, task=TASK).weights, model.weights)


# Weights


def test_circuits_are_products_of_the_weights():
    weights = random_weights()
    assert weights.scale == 0.5
    W_Q, W_K, W_V, W_O = (by_head(weights)[name] for name in NAMES)
    for h in range(3):
        expected = weights.scale * W_Q[h] @ W_K[h].T
        assert_close_to_rounding(weights.QK[h], expected)
        assert_close_to_rounding(weights.OV[h], W_V[h] @ W_O[h])
        assert weights.omega[h].tolist() == [weights.QK[h, i, i].item() for i in range(3)]
        assert weights.mu[h].tolist() == [weights.OV[h, 3 + n, n].item() for n in range(2)]
    assert (weights.n_heads, weights.d_x, weights.d_y) == (3, 3, 2)
    model = ICLTransformer.from_weights(weights, task=TASK)
    assert_close_to_rounding(model.QK.AB[0].detach() * weights.scale, weights.QK)
    assert_close_to_rounding((model.OV.AB[0] @ model.W_U).detach(), weights.OV)


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


def test_zero_heads_are_named_and_taken_out():
    weights = random_model(3, score="linear/L", context_only=True, d_model=7).weights
    masked = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    masked["attn.W_O"][0, 1] = 0
    masked["attn.W_V"][1, :2] = 0
    assert weights.heads_per_layer == ((0, 1, 2),) * 3
    assert weights.with_tensors(masked).heads_per_layer == ((0, 2), (2,), (0, 1, 2))
    masked["attn.W_O"][2, 0] = 0
    pruned = weights.with_tensors(masked)
    small = pruned.compact()
    assert (small.n_heads, small.heads_per_layer) == (2, ((0, 1), (0,), (0, 1)))
    expected = predict_deep(pruned, random_prompts())
    assert_close_to_rounding(predict_deep(small, random_prompts()), expected)
    nothing = weights.with_tensors({"attn.W_V": torch.zeros_like(weights.W_V)})
    assert nothing.compact().n_heads == 1


@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("score", SCORES)
def test_mask_is_strict_at_any_length_and_after_loading_and_copying(score: str, length: int):
    weights, tokens = random_weights(score=score), random_prompts(length).tokens
    model = ICLTransformer.from_weights(weights, task=TASK)
    loaded = ICLTransformer(weights.model, d_x=3, d_y=2, n_ctx=4).to(torch.float64)
    loaded.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(loaded(tokens), model(tokens))
    for each in (model, loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _, cache = each.run_with_cache(tokens)
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
    model, deep = ICLTransformer.from_weights(random_weights(), task=TASK), random_model()
    for each in (model, deep):
        # A loss that reads the whole residual stream, x included.
        each.set_use_attn_result(each is model)
        (each(random_prompts().tokens, stop_at_layer=each.cfg.n_layers) ** 2).sum().backward()
    assert torch.equal(model.W_O[..., :3], torch.zeros(1, 3, 4, 3).double())
    gradient = model.blocks[0].attn.W_O.grad
    assert torch.equal(gradient[..., :3], torch.zeros(3, 4, 3).double())
    assert (gradient[..., 3:].abs() > 0).all()
    assert (deep.blocks[0].attn.W_O.grad.abs() > 0).all()


# What would go wrong without a word, and what is refused.


def test_zero_mlp_adds_nothing_and_lets_one_be_added():
    model = random_model()
    inputs, _ = sample_inputs(model)
    before = model(inputs)
    model.set_use_zero_mlp(True)
    assert torch.equal(model(inputs), before)
    model.set_use_hook_mlp_in(True)
    added = torch.arange(5.0).double()
    hooks = [("blocks.1.hook_mlp_out", lambda values, hook: values + added)]
    changed = model.run_with_hooks(inputs, fwd_hooks=hooks)
    torch.testing.assert_close(changed, before + added[3:], rtol=1e-12, atol=1e-12)

    def overwrite(values: Tensor, hook) -> None:
        values[:] = 7

    with torch.no_grad():
        kept = model.run_with_hooks(inputs, fwd_hooks=[("blocks.1.hook_mlp_in", overwrite)])
    assert torch.equal(kept, before)


def test_gradient_at_hook_embed_only_where_asked_for():
    model = random_model().requires_grad_(False)
    inputs, _ = sample_inputs(model)
    assert not model(inputs).requires_grad
    gradients = []
    with model.hooks(bwd_hooks=[("hook_embed", lambda gradient, hook: gradients.append(gradient))]):
        model(inputs)[:, -1, 0].sum().backward()
        with torch.no_grad():
            model(inputs)
    assert len(gradients) == 1
    asked = inputs.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(asked)[:, -1, 0].sum(), asked)
    torch.testing.assert_close(gradients[0], expected, rtol=1e-12, atol=1e-12)
    assert not inputs.requires_grad


def test_numbers_stand_for_prompts_within_the_block_only():
    model = random_model()
    clean, corrupted = sample_inputs(model)
    with model.numbered(clean, corrupted[:2, :4]) as (clean_ids, corrupted_ids):
        assert (clean_ids.shape, corrupted_ids.shape) == ((3, 7), (2, 4))
        assert not set(clean_ids.ravel().tolist()) & set(corrupted_ids.ravel().tolist())
        assert torch.equal(model(clean_ids), model(clean))
        assert torch.equal(model(corrupted_ids), model(corrupted[:2, :4]))
        assert torch.equal(model(clean_ids.flip(0)[:, :5]), model(clean.flip(0)[:, :5]))
        with model.numbered(corrupted) as (inner,):
            assert torch.equal(model(inner), model(corrupted))
        assert torch.equal(model(clean_ids), model(clean))
        assert model.to_tokens(clean_ids) is clean_ids
    with pytest.raises(InterruptedError), model.numbered(clean):
        raise InterruptedError
    with refused("torch.int64"):
        model(clean_ids)
    assert torch.equal(model(model.to_tokens(clean)), model(clean))  # these keep their numbers


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
    "d_head": (
        lambda: functional.stack([random_weights(), random_weights(d_head=5)]),
        ("head shape, scale and score", "2 kinds"),
    ),
    "slope": (
        lambda: functional.stack([random_weights(), random_weights(score_slope=2.0)]),
        ("head shape, scale and score", "2 kinds"),
    ),
}


@pytest.mark.parametrize(("use", "words"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_the_weights_is_refused(use, words):
    with refused(*words):
        use()
