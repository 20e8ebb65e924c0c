"""Attention on prompts is that of the hooked model, and of a kernel head a function of likeness alone."""

import numpy as np
import pytest
import torch

from mechinterp.analysis.one_layer.attention import attention_patterns
from mechinterp.checkpoints.checkpoint import load
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.one_layer import kernel_head
from tests.conftest import CHECKPOINTS, refused
from tests.deep_models import random_gpt2, random_model


@pytest.mark.parametrize("name", ["softmax-h2-s0", "tanh-h2-s0", "linear-separate-s0"])
def test_weights_are_those_of_the_hooked_model(name: str, generator: torch.Generator):
    checkpoint = load(CHECKPOINTS / name)
    prompts = draw_prompts(checkpoint.config.task, 4, generator=generator)
    found = attention_patterns(checkpoint, prompts)
    _, cache = checkpoint.model.run_with_cache(prompts.tokens)
    expected = cache["pattern", 0][:, :, -1, :-1].numpy(force=True)
    np.testing.assert_allclose(found.pattern, expected, rtol=1e-3, atol=1e-5)
    predicted = checkpoint.model.predict(prompts).numpy(force=True)
    np.testing.assert_allclose(found.prediction, predicted, rtol=1e-3, atol=1e-4)


def test_a_kernel_head_weighs_by_likeness_alone(prompts: Prompts):
    found = attention_patterns(kernel_head(0.5, 1.5, d_x=5), prompts[:3])
    weights = np.exp(0.5 * found.similarity)
    np.testing.assert_allclose(found.pattern[:, 0], weights / weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(found.target, prompts.y_query_clean[:3].numpy())
    frame = found.to_frame()
    assert len(frame) == 3 * 1 * 40
    assert frame["attention"].groupby(frame["prompt"]).sum().tolist() == pytest.approx([1, 1, 1])


def test_of_many_prompts_those_at_even_quantiles_of_the_error_are_kept(prompts: Prompts):
    weights = kernel_head(0.5, 1.5, d_x=5)
    every = attention_patterns(weights, prompts, shown=len(prompts))
    error = np.square(every.prediction - every.target).mean(1)
    found = attention_patterns(weights, prompts, shown=3)
    order = error.argsort(kind="stable")
    places = [0, round((len(prompts) - 1) / 2), len(prompts) - 1]
    np.testing.assert_array_equal(found.pattern, every.pattern[order[places]])
    assert (found.typical, found.n_prompts) == (1, len(prompts))
    assert "Rank correlation with the weight: head 0 1.00" in found.sentences()[1]
    drawn = np.asarray(found.plot().frames[1].data[0].z)  # sorted by likeness, weights rise
    np.testing.assert_allclose(drawn, np.sort(found.pattern[1], axis=1), atol=1e-7)
    with refused("shown", 0):
        attention_patterns(weights, prompts, shown=0)


# Entropy.


def short_prompts() -> Prompts:
    return draw_prompts(TaskConfig(d_x=4, context_length=9), 16, seed=0, dtype=torch.float64)


def entropy_of(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1)


def test_entropy_of_uniform_of_one_hot_and_of_kernel_attention(prompts: Prompts):
    found = attention_patterns(kernel_head(0.0, 1.5, d_x=5), prompts)
    np.testing.assert_allclose(found.entropy, np.log(40), rtol=1e-14)
    np.testing.assert_allclose(found.entropy_sem, 0, atol=1e-15)
    # The gap between the two most similar keys is multiplied by 1e6: all others underflow.
    assert attention_patterns(kernel_head(1e6, 1.5, d_x=5), prompts).entropy.item() < 1e-12
    found = attention_patterns(kernel_head(0.5, 1.5, d_x=5), prompts)
    scores = 0.5 * np.einsum("blx,bx->bl", prompts.x.numpy(), prompts.x_query.numpy())
    weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    each = np.log(np.exp(scores).sum(1)) - (weights * scores).sum(1)  # log Z - <s>
    np.testing.assert_allclose(found.entropy.item(), each.mean(), rtol=1e-12)
    sem = each.std(ddof=1) / len(each) ** 0.5
    np.testing.assert_allclose(found.entropy_sem.item(), sem, rtol=1e-9)


@pytest.mark.parametrize(
    "kind",
    [
        {"context_only": True},
        {"norm": "before", "d_mlp": 8, "d_model": 8, "d_head": 4, "biases": True},
        {"layout": "in_turn", "d_model": 8, "d_head": 4, "attend_to_self": True},
    ],
)
def test_heads_of_several_layers_are_those_of_the_hooks(kind: dict):
    model = random_model(**kind)
    prompts = short_prompts()
    _, cache = model.run_with_cache(model.tokens(prompts))
    found = attention_patterns(model, prompts)
    for layer in range(3):
        expected = entropy_of(cache["pattern", layer][:, :, -1].numpy(force=True)).mean(0)
        np.testing.assert_allclose(found.entropy[layer], expected, rtol=1e-10)
    n_keys = {"context_only": 9, "norm": 9, "layout": 19}[next(iter(kind))]
    assert np.all(found.entropy < np.log(n_keys))
    frame = found.to_frame().groupby(["layer", "head"])[["entropy", "entropy_sem"]].first()
    np.testing.assert_allclose(frame["entropy"].to_numpy(), found.entropy.ravel())
    np.testing.assert_allclose(frame["entropy_sem"].to_numpy(), found.entropy_sem.ravel())


def test_a_bridge_has_entropies():
    gpt2, prompts = random_gpt2(), short_prompts()
    found = attention_patterns(gpt2, prompts)
    _, cache = gpt2.model.run_with_cache(gpt2.embed(prompts))
    pattern = cache["blocks.2.attn.hook_pattern"][:, :, -1].numpy(force=True)
    np.testing.assert_allclose(found.entropy[2], entropy_of(pattern).mean(0), rtol=1e-10)
    assert found.entropy.size == 6


def test_a_hook_of_the_user_counts(prompts: Prompts):
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    model, few = checkpoint.model, prompts[:8].to(torch.float32)
    even = [
        ("blocks.0.attn.hook_attn_scores", lambda scores, hook: 0 * scores.nan_to_num(neginf=0))
    ]
    with model.hooks(fwd_hooks=even):
        found = attention_patterns(model, few)
    np.testing.assert_allclose(found.entropy, np.log(41), rtol=1e-6)


@pytest.mark.parametrize(
    "name", ["linear-separate-s0", "sparse-h1-noise0.1-s0", "affine-0.8-h2-s0"]
)
def test_weights_that_are_no_distribution_have_no_entropy(name: str):
    found = attention_patterns(load(CHECKPOINTS / name), n_prompts=64)
    assert np.isnan([found.entropy, found.entropy_sem]).all()
    assert "Entropy" not in " ".join(found.sentences())
