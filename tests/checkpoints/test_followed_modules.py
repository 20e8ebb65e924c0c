"""Hooks within attention that others wrote: patterns are those that torch and Hugging Face return themselves."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    attention_entropy,
    attention_patterns,
    hook_module,
    sample_prompts,
)
from mechinterp.icl.prompts import Prompts
from tests.checkpoints.test_plain_modules import (
    HEADS,
    LAYERS,
    TASK,
    WIDTH,
    Bare,
    Packed,
    Separate,
    Torchs,
    random_stack,
)
from tests.deep_models import small_gpt2

POINTS = ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern")
LAST = {"read": lambda output: output[:, -1, -1:]}


@pytest.fixture
def prompts() -> Prompts:
    return sample_prompts(TASK, 32, seed=0, dtype=torch.float64)


def encoder(**settings: object) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, **settings)
    stack = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).double().eval()
    return stack.requires_grad_(False)


class Masked(nn.Module):
    """Torch's encoder with a mask, on tokens of [batch, pos, width]."""

    def __init__(self, mask: torch.Tensor, *, batch_first: bool):
        super().__init__()
        self.encoder = encoder(batch_first=batch_first)
        self.register_buffer("mask", mask)

    def forward(self, x):
        turned = x if self.encoder.layers[0].self_attn.batch_first else x.transpose(0, 1)
        output = self.encoder(turned, mask=self.mask[: x.shape[1], : x.shape[1]])
        return output if turned is x else output.transpose(0, 1)


BEFORE = torch.ones(32, 32).tril().bool()
MASKS = {
    "true is not read": ~BEFORE,
    "added": torch.zeros(32, 32).double().masked_fill(~BEFORE, -torch.inf),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_patterns_of_torchs_encoder_are_those_it_returns(mask, batch_first, prompts):
    module = Masked(MASKS[mask], batch_first=batch_first)
    hooked = hook_module(module, task=TASK, **LAST)
    assert not hooked.model.unfollowed
    _, cache = hooked.model.run_with_cache(prompts.tokens)
    attention = module.encoder.layers[0].self_attn
    x = prompts.tokens if batch_first else prompts.tokens.transpose(0, 1)
    n = prompts.tokens.shape[1]
    settings = {"attn_mask": MASKS[mask][:n, :n], "average_attn_weights": False}
    _, expected = attention(x, x, x, **settings)
    torch.testing.assert_close(cache["blocks.0.attn.hook_pattern"], expected)
    assert not cache["blocks.0.attn.hook_pattern"][:, :, 0, 1:].any()
    patterns = attention_patterns(hooked, prompts, shown=len(prompts))
    np.testing.assert_allclose(patterns.pattern[:, :HEADS], expected[:, :, -1].numpy(), rtol=1e-10)
    torch.testing.assert_close(hooked.predict(prompts), module(prompts.tokens)[:, -1, -1:])


@pytest.mark.parametrize("attention", [Separate, Packed, Torchs])
def test_queries_keys_values_and_scores_are_the_products_of_the_weights(attention, prompts):
    stack = random_stack(attention)
    hooked = hook_module(stack, heads=HEADS, task=TASK, **LAST)
    _, cache = hooked.model.run_with_cache(prompts.tokens)
    Q, K, V, _ = stack.layer[1].matrices()
    stream = cache["blocks.1.hook_resid_pre"]
    rows = slice(WIDTH // HEADS, 2 * WIDTH // HEADS)
    for name, W in (("hook_q", Q), ("hook_k", K), ("hook_v", V)):
        expected = stream @ W[rows].mT
        torch.testing.assert_close(cache[f"blocks.1.attn.{name}"][:, :, 1], expected)
    scores = (stream @ Q[rows].mT) @ (stream @ K[rows].mT).mT / math.sqrt(WIDTH // HEADS)
    torch.testing.assert_close(cache["blocks.1.attn.hook_attn_scores"][:, 1], scores)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"][:, 1], scores.softmax(-1))


@pytest.mark.parametrize("attention", [Separate, Packed, Torchs])
@pytest.mark.parametrize("point", POINTS)
def test_a_change_at_any_of_the_points_changes_the_prediction(attention, point, prompts):
    hooked = hook_module(random_stack(attention), heads=HEADS, task=TASK, **LAST)
    changed = [(f"blocks.0.attn.{point}", lambda values, hook: 0.5 * values)]
    with hooked.model.hooks(fwd_hooks=changed):
        other = hooked.predict(prompts)
    assert (other - hooked.predict(prompts)).abs().max() > 1e-4


def test_zero_scores_are_uniform_attention(prompts):
    hooked = hook_module(random_stack(Separate), heads=HEADS, task=TASK, **LAST)
    even = [(f"blocks.{n}.attn.hook_attn_scores", lambda s, hook: 0 * s) for n in range(LAYERS)]
    with hooked.model.hooks(fwd_hooks=even):
        entropy = attention_entropy(hooked, prompts)
    np.testing.assert_allclose(entropy.entropy, math.log(6), rtol=1e-12)


class HuggingFace(nn.Module):
    def __init__(self, implementation: str):
        super().__init__()
        self.read_in, self.backbone = nn.Linear(WIDTH, 8), small_gpt2()
        self.backbone.set_attn_implementation(implementation)

    def forward(self, x):
        return self.backbone(inputs_embeds=self.read_in(x)).last_hidden_state


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_patterns_of_hugging_faces_gpt2_are_those_it_returns(implementation, prompts):
    torch.manual_seed(2)
    module = HuggingFace(implementation).double().eval()
    hooked = hook_module(module, task=TASK, **LAST)
    assert not hooked.model.unfollowed
    _, cache = hooked.model.run_with_cache(prompts.tokens)
    module.backbone.set_attn_implementation("eager")
    inputs = module.read_in(prompts.tokens)
    expected = module.backbone(inputs_embeds=inputs, output_attentions=True).attentions
    for layer in range(2):
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_pattern"], expected[layer])
    assert np.all(attention_entropy(hooked, prompts).entropy < math.log(6))


class Linear(Bare):
    def forward(self, x):
        return self.o(self.q(x) @ self.k(x).mT @ self.v(x))


class Turned(Bare):
    """Queries and keys that are turned by their position before they meet."""

    def forward(self, x):
        angle = torch.arange(x.shape[1]).to(x)
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        q, k = (
            torch.stack((a[..., 0] * c - a[..., 1] * s, a[..., 0] * s + a[..., 1] * c), -1)
            for a, c, s in ((q, angle.cos(), angle.sin()), (k, angle.cos(), angle.sin()))
        )
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(z.transpose(1, 2).flatten(-2))


def test_what_cannot_be_followed_is_left_out_and_said(prompts):
    torch.manual_seed(0)
    hooked = hook_module(Linear().double(), heads=HEADS, task=TASK, **LAST)
    assert not any(
        name in hooked.model.hook_dict for name in map("blocks.0.attn.{}".format, POINTS)
    )
    with pytest.raises(ValueError, match=r"hook_pattern, .*: it has no softmax, and .*\.$"):
        attention_patterns(hooked, prompts)
    turned = hook_module(Turned().double(), heads=HEADS, task=TASK, **LAST)
    assert turned.model.unfollowed == {
        0: "scores are not products of what its queries and keys put out"
    }
    assert "blocks.0.attn.hook_q" not in turned.model.hook_dict
    rows = attention_patterns(turned, prompts).pattern.sum(-1)
    np.testing.assert_allclose(rows, 1, rtol=1e-12)


def test_a_task_of_other_sizes_is_no_matter():
    task = TaskConfig(
        d_x=3, context_length=2
    )  # as many prompts, heads and positions as may be mistaken
    hooked = hook_module(random_stack(Torchs), heads=HEADS, task=task, **LAST)
    assert not hooked.model.unfollowed
