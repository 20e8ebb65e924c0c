"""Hooked modules of architectures that others write: heads, patterns, entropies and edges equal separate computations."""

import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    ablate_heads,
    attention_entropy,
    attention_patterns,
    attribute_edges,
    hook_module,
    load,
    predictor_of,
    sample_prompts,
)
from mechinterp.models.hooked.runner import masked
from tests.checkpoints import strange_modules as strange
from tests.checkpoints.strange_modules import HEADS, WIDTH, random
from tests.conftest import CHECKPOINTS

TASK = TaskConfig(d_x=3, context_length=6)
STACKS = {
    "grouped": lambda: strange.Stack(*(strange.Grouped() for _ in range(2)), norm=True),
    "grouped, fused": lambda: strange.Stack(*(strange.Grouped(sdpa=True) for _ in range(2))),
    "linear": lambda: strange.Stack(*(strange.LinearAttention() for _ in range(2)), norm=True),
    "strict linear": lambda: strange.Stack(strange.LinearAttention(strict=True)),
    "rotary": lambda: strange.Stack(*(strange.Rotary() for _ in range(2))),
    "parameters": lambda: strange.Stack(*(strange.Parameters() for _ in range(2)), norm=True),
    "looped block": lambda: strange.Stack(strange.Rotary(), runs=3, norm=True),
    "looped blocks": lambda: strange.Stack(strange.Grouped(), strange.Parameters(), runs=2),
}


@pytest.fixture
def prompts():
    return sample_prompts(TASK, 16, seed=0, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STACKS)
def test_rises_patterns_and_streams_are_those_computed_head_by_head(kind, prompts):
    stack = random(STACKS[kind]())
    hooked = hook_module(stack, task=TASK)
    n_layers = stack.runs * len(stack.blocks)
    assert (hooked.hooked.n_layers, hooked.hooked.n_heads) == (n_layers, HEADS)
    seen: list[torch.Tensor] = []
    full = stack.by_hand(prompts.tokens, seen=seen)
    masks = [[], *([(layer, head)] for layer in range(n_layers) for head in range(HEADS))]
    expected = torch.stack([stack.by_hand(prompts.tokens, mask) for mask in masks])
    predictor = predictor_of(hooked)
    torch.testing.assert_close(predictor.run(prompts, masks), expected, rtol=1e-9, atol=1e-10)
    risks = (expected - prompts.y_query_clean).square().mean((1, 2))
    rises = ablate_heads(hooked, prompts).rise
    np.testing.assert_allclose(rises, (risks[1:] - risks[0]).reshape(n_layers, HEADS), rtol=1e-7)
    torch.testing.assert_close(predictor.streams(prompts)[:-1, :, 0], torch.stack(seen)[:, :, -1])
    patterns = attention_patterns(hooked, prompts, shown=len(prompts)).pattern
    of_layers = [block for _ in range(stack.runs) for block in stack.blocks]
    for layer, (block, x) in enumerate(zip(of_layers, seen, strict=True)):
        for head in range(HEADS):
            weights = block.attention.pattern(block.norm(x), head)[:, -1]
            got = patterns[:, layer * HEADS + head]
            np.testing.assert_allclose(
                got, weights[:, : got.shape[1]].numpy(), rtol=1e-9, atol=1e-12
            )
    assert (expected[1:] - full).abs().amax((1, 2)).min() > 1e-6


def test_entropies_of_grouped_heads_are_those_of_all_heads(prompts):
    stack = random(STACKS["grouped"]())
    seen: list[torch.Tensor] = []
    stack.by_hand(prompts.tokens, seen=seen)
    entropy = attention_entropy(hook_module(stack, task=TASK), prompts).entropy
    for layer, block in enumerate(stack.blocks):
        for head in range(HEADS):
            p = block.attention.pattern(block.norm(seen[layer]), head)[:, -1]
            expected = -(p * p.log()).sum(-1).mean()
            assert entropy[layer, head] == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("kind", ["grouped", "grouped, fused"])
@pytest.mark.parametrize("point", ["hook_k", "hook_v"])
def test_keys_and_values_that_heads_share_are_changed_for_one_of_them(kind, point, prompts):
    stack = random(STACKS[kind]())
    hooked, head = hook_module(stack, task=TASK), 1
    assert not hooked.model.unfollowed

    def other(values, hook):
        assert values.shape[2] == HEADS
        values = values.clone()
        values[:, :, head] *= 0.5
        return values

    with hooked.model.hooks(fwd_hooks=[(f"blocks.1.attn.{point}", other)]):
        changed = hooked.predict(prompts)
    seen: list[torch.Tensor] = []
    stack.by_hand(prompts.tokens, seen=seen)
    block, x = stack.blocks[1], seen[1]
    read = block.norm(x)
    written = [block.attention.written(read, h) for h in range(HEADS)]
    if point == "hook_v":
        written[head] = 0.5 * written[head]
    else:
        half = strange.Grouped().double()
        half.load_state_dict(block.attention.state_dict())
        half.q_proj.weight.data *= 0.5  # half the key is half the query
        written[head] = half.written(read, head)
    x = x + sum(written)
    expected = stack.read_out(x + block.mlp(x))[:, -1]
    torch.testing.assert_close(changed, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_edges_of_grouped_heads_are_those_of_heads_of_their_own(prompts):
    grouped = random(strange.Stack(*(strange.Grouped() for _ in range(2)), norm=True))
    own = random(strange.Stack(*(strange.Grouped() for _ in range(2)), norm=True))
    for layer in own.blocks:
        layer.attention.groups = HEADS
    own.load_state_dict(grouped.state_dict())
    for layer in own.blocks:
        for name in ("k_proj", "v_proj"):
            weight = getattr(layer.attention, name).weight
            repeated = weight.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
            setattr(layer.attention, name, nn.Linear(WIDTH, WIDTH, bias=False).double())
            getattr(layer.attention, name).weight.data = repeated
    for layer in (*grouped.blocks, *own.blocks):
        layer.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).double()
        nn.init.eye_(layer.mlp[1].weight)
        nn.init.zeros_(layer.mlp[1].bias)
    results = [
        attribute_edges(hook_module(each, task=TASK), prompts[:4], prompts[4:8])
        for each in (grouped, own)
    ]
    np.testing.assert_allclose(results[0].patched, results[1].patched, rtol=1e-7, atol=1e-10)
    np.testing.assert_allclose(results[0].estimate, results[1].estimate, rtol=1e-7, atol=1e-10)


def test_a_block_is_masked_in_one_run_or_in_all(prompts):
    stack = random(STACKS["looped blocks"]())
    hooked = hook_module(stack, task=TASK)
    assert hooked.hooked.blocks == (0, 1, 0, 1)
    with masked(hooked, [(1, 2)], runs="all"):
        got = hooked.predict(prompts)
    expected = stack.by_hand(prompts.tokens, [(1, 2), (3, 2)])
    torch.testing.assert_close(got, expected)
    every = ablate_heads(hooked, prompts, runs="all").rise
    assert every.shape == (2, HEADS)
    risks = [
        (stack.by_hand(prompts.tokens, mask) - prompts.y_query_clean).square().mean()
        for mask in ([], [(1, 2), (3, 2)])
    ]
    assert every[1, 2] == pytest.approx((risks[1] - risks[0]).item(), rel=1e-7)
    with pytest.raises(ValueError, match="runs must be 'one' or 'all', got 'some'"):
        ablate_heads(hooked, prompts, runs="some")


def test_weights_without_a_softmax_are_signed_and_said_to_be_no_distribution(prompts):
    hooked = hook_module(random(STACKS["linear"]()), task=TASK)
    patterns = attention_patterns(hooked, prompts)
    assert patterns.pattern.min() < 0
    assert "do not sum to 1" in " ".join(patterns.sentences())
    with pytest.raises(ValueError, match="weights >= 0 that add up to 1"):
        attention_entropy(hooked, prompts)
    zero = [("blocks.1.attn.hook_pattern", lambda values, hook: 0 * values)]
    with hooked.model.hooks(fwd_hooks=zero):
        got = hooked.predict(prompts)
    every = [(1, head) for head in range(HEADS)]
    torch.testing.assert_close(got, predictor_of(hooked).run(prompts, [every])[0])


class Outputs(nn.Module):
    """A stack whose output has another shape."""

    def __init__(self, shape: str):
        super().__init__()
        self.stack, self.shape = random(STACKS["rotary"]()), shape

    def forward(self, x):
        numbers = self.stack(x)[..., 0]
        return {"each": numbers, "one": numbers[:, -1], "odd": numbers[:, 1:5]}[self.shape]


@pytest.mark.parametrize("shape", ["each", "one"])
def test_a_number_for_each_prompt_or_position_is_read(shape, prompts):
    module = Outputs(shape)
    expected = module.stack.by_hand(prompts.tokens)
    torch.testing.assert_close(hook_module(module, task=TASK).predict(prompts), expected)


def refused(module: nn.Module, *words: str, **settings: object) -> None:
    """`hook_module` refuses the module in one line with these words."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        hook_module(module, task=TASK, **settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_what_would_give_wrong_heads_is_refused():
    grouped = random(STACKS["grouped"]())
    for name in ("blocks.0.attention", "blocks.0.mlp", "blocks.0.mlp.1"):
        refused(grouped, "outputs", name, "the residual stream", outputs=[name])
    refused(grouped, "outputs", "hidden units", outputs=["blocks.0.mlp.3"])
    refused(grouped, "heads must be 4", "got 8", heads=8)
    refused(random(STACKS["parameters"]()), "heads must be 4", "the softmax", "got 2", heads=2)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    refused(encoder, "heads must be 2", "self_attn.num_heads", "got 4", heads=4)
    linear = random(STACKS["linear"]())
    refused(linear, "heads must be 4", "n_heads", "got 2", heads=2)
    refused(Outputs("odd"), "read must be given", "[2, 4]")


def test_heads_that_are_modules_are_counted_by_name(prompts):
    module = random(strange.Stack(strange.Heads(), strange.Heads()))
    hooked = hook_module(module, task=TASK)
    rise = ablate_heads(hooked, prompts).rise

    def risk(*mask: tuple[int, int]) -> float:
        error = module.by_hand(prompts.tokens, mask) - prompts.y_query_clean
        return float(error.square().mean())

    for at in np.ndindex(2, HEADS):
        assert rise[at] == pytest.approx(risk(at) - risk(), rel=1e-9)
    refused(module, "heads must be 4", "the modules beside", "got 2", heads=2)
    assert "softmax of all heads at once" in hooked.model.unfollowed[0]


def test_two_softmaxes_for_each_head_are_one_head(prompts):
    module = random(strange.Stack(strange.Differential(), strange.Differential()))
    hooked = hook_module(module, task=TASK)
    masks = [[(layer, head)] for layer, head in np.ndindex(2, HEADS)]
    expected = torch.stack([module.by_hand(prompts.tokens, mask) for mask in masks])
    torch.testing.assert_close(predictor_of(hooked).run(prompts, masks), expected)
    refused(module, "heads must be 4", "the softmax", "got 8", heads=8)


HAND = ("exp over sum", "less the largest", "log_softmax", "logsumexp", "in place", "times the inverse", "normalize", "heads in the batch")  # fmt: skip


@pytest.mark.parametrize("kind", HAND)
def test_a_softmax_written_by_hand_shows_its_patterns(kind, prompts):
    stack = random(strange.Stack(*(strange.ByHand(kind) for _ in range(2)), norm=True))
    hooked = hook_module(stack, task=TASK, heads=HEADS)
    seen: list[torch.Tensor] = []
    stack.by_hand(prompts.tokens, seen=seen)
    patterns = attention_patterns(hooked, prompts, shown=len(prompts)).pattern
    for layer, (block, x) in enumerate(zip(stack.blocks, seen, strict=True)):
        for head in range(HEADS):
            weights = block.attention.pattern(block.norm(x), head)[:, -1]
            got = patterns[:, layer * HEADS + head]
            np.testing.assert_allclose(got, weights[:, : got.shape[1]], rtol=1e-9, atol=1e-12)
    zero = [("blocks.1.attn.hook_pattern", lambda values, hook: 0 * values)]
    with hooked.model.hooks(fwd_hooks=zero):
        got = hooked.predict(prompts)
    every = [(1, head) for head in range(HEADS)]
    torch.testing.assert_close(got, stack.by_hand(prompts.tokens, every))


@pytest.mark.parametrize("kind", ["rotary", "parameters", "by hand"])
def test_edges_that_cannot_be_told_apart_are_refused_in_one_line(kind, prompts):
    by_hand = lambda: strange.Stack(*(strange.ByHand() for _ in range(2)))  # noqa: E731
    hooked = hook_module(random((STACKS | {"by hand": by_hand})[kind]()), task=TASK, heads=HEADS)
    with pytest.raises(
        ValueError, match=r"must have the hook blocks\.[01]\.attn\.hook_[qkv]; "
    ) as caught:
        attribute_edges(hooked, prompts[:4], prompts[4:8])
    assert "\n" not in str(caught.value)


def test_heads_that_lie_entry_by_entry_are_refused():
    refused(random(strange.Stack(strange.ByEntry())), "side by side", "(d_head head)")


def test_a_softmax_over_more_keys_than_there_are_shows_no_pattern(prompts):
    hooked = hook_module(random(strange.Stack(strange.WithSink())), task=TASK)
    assert "over 8 keys" in hooked.model.unfollowed[0]
    assert ablate_heads(hooked, prompts).rise.shape == (1, HEADS)
    with pytest.raises(ValueError, match="hook_pattern"):
        attention_patterns(hooked, prompts)


class AllParameters(strange.Parameters):
    def __init__(self):
        super().__init__()
        self.W_o = nn.Parameter(torch.randn(WIDTH, WIDTH))
        del self.o_proj

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
        return joined_output(q, k, v) @ self.W_o


def joined_output(q, k, v):
    return strange.joined(nn.functional.scaled_dot_product_attention(q, k, v))


def test_an_output_parameter_gets_one_cure_that_works(prompts):
    module = random(strange.Stack(AllParameters()))
    for settings in ({}, {"outputs": ["blocks.0.attention.W_o"]}):
        refused(module, "Parameter blocks.0.attention.W_o", "nn.Linear", "self.W_o(z)", **settings)
    attention = module.blocks[0].attention
    cured = nn.Linear(WIDTH, WIDTH, bias=False).double()
    cured.weight.data = attention.W_o.T

    class Cured(strange.Parameters):
        def forward(self, x):
            q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
            return self.W_o(joined_output(q, k, v))

    new = Cured()
    new.W_q, new.W_k, new.W_v = attention.W_q, attention.W_k, attention.W_v
    del new.o_proj
    new.W_o = cured
    expected = module(prompts.tokens)[:, -1]
    module.blocks[0].attention = new
    hooked = hook_module(module, task=TASK)
    torch.testing.assert_close(hooked.predict(prompts), expected)
    assert ablate_heads(hooked, prompts).rise.shape == (1, HEADS)


def test_reasons_say_what_is_there(prompts):
    rotary = hook_module(random(STACKS["rotary"]()), task=TASK)
    assert set(rotary.model.unfollowed.values()) == {
        "scores are not products of what its queries and keys put out"
    }
    parameters = hook_module(random(STACKS["parameters"]()), task=TASK)
    assert "modules of the usual names" in parameters.model.unfollowed[0]
    assert "blocks.0.attn.hook_pattern" in parameters.model.hook_dict


@pytest.mark.slow
def test_threads_get_the_numbers_of_one(prompts):
    hooked = hook_module(random(STACKS["looped blocks"]()), task=TASK)
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    own = sample_prompts(checkpoint.task, 32, seed=0)
    model = checkpoint.model
    masks = [[(0, 0)], [(0, 1)]]

    def by_hooks(head: int) -> torch.Tensor:
        with masked(model, [(0, head)]):
            return model.predict(own)

    calls = [
        *(lambda head=head: by_hooks(head) for head in range(2)),
        lambda: predictor_of(checkpoint).run(own, masks),
        lambda: torch.as_tensor(ablate_heads(hooked, prompts[:4]).rise),
        lambda: hooked.predict(prompts),
    ]
    expected = [call() for call in calls]
    wrong: list[object] = []

    def work() -> None:
        for number in range(40):
            at = number % len(calls)
            try:
                torch.testing.assert_close(calls[at](), expected[at], rtol=1e-6, atol=1e-9)
            except Exception as error:  # whatever comes of it
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_hooked_modules_and_used_checkpoints_are_pickled(prompts):
    stack = random(STACKS["looped blocks"]())
    hooked = hook_module(stack, task=TASK)
    rises = ablate_heads(hooked, prompts).rise
    again = pickle.loads(pickle.dumps(hooked))
    np.testing.assert_array_equal(ablate_heads(again, prompts).rise, rises)
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    own = sample_prompts(checkpoint.task, 32, seed=0)
    expected = (predictor_of(checkpoint).predict(own), checkpoint.model.predict(own))
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert torch.equal(predictor_of(copy).predict(own), expected[0])
    with_lambda = hook_module(stack, task=TASK, read=lambda output: output[:, -1])
    with pytest.raises(ValueError, match=r"read must be a function .*pickled.*hook_module again\."):
        pickle.dumps(with_lambda)
