"""Hooked modules of architectures that others write: heads, patterns, entropies and edges equal separate computations."""

import math
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    ablate,
    attention_patterns,
    attribute_edges,
    classify,
    hook_module,
    load,
    predictor_of,
    write_report,
)
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.runner import masked
from tests.checkpoints import strange_modules as strange
from tests.checkpoints.files import loaded
from tests.checkpoints.strange_modules import EACH, HEADS, WIDTH, Stack, random
from tests.checkpoints.strangers import Kind, joins
from tests.conftest import CHECKPOINTS

TASK = TaskConfig(d_x=3, context_length=6)
TWO = range(2)
STACKS = {
    "grouped": lambda: Stack(*(strange.Grouped() for _ in TWO), norm=True),
    "grouped, fused": lambda: Stack(*(strange.Grouped("is_causal") for _ in TWO)),
    "fused, masks": lambda: Stack(strange.Grouped("boolean"), strange.Grouped("additive")),
    "context keys": lambda: Stack(*(strange.ContextKeys() for _ in TWO), norm=True),
    "linear": lambda: Stack(*(strange.LinearAttention() for _ in TWO), norm=True),
    "strict linear": lambda: Stack(strange.LinearAttention(strict=True)),
    "torch": lambda: Stack(*(strange.Torchs() for _ in TWO)),
    "positions first": lambda: Stack(*(strange.Torchs(batch_first=False) for _ in TWO)),
    "rotary": lambda: Stack(*(strange.Rotary() for _ in TWO)),
    "parameters": lambda: Stack(*(strange.Parameters() for _ in TWO), norm=True),
    "heads": lambda: Stack(*(strange.Heads() for _ in TWO)),
    "two softmaxes": lambda: Stack(*(strange.Differential() for _ in TWO)),
    "looped block": lambda: Stack(strange.Rotary(), runs=3, norm=True),
    "looped blocks": lambda: Stack(strange.Grouped(), strange.Parameters(), runs=2),
}
WITHOUT_PATTERNS = ("heads", "two softmaxes")
RENAMED = {".norm.": ".norm1.", "mlp.0": "norm2", "mlp.1": "mlp.0", "mlp.3": "mlp.2"}
"""Words of a stack's names, and words for them that files are read by."""
POINTS = ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern")
HAND = ("exp over sum", "less the largest", "log_softmax", "logsumexp", "in place", "times the inverse", "normalize", "heads in the batch")  # fmt: skip


@pytest.fixture
def prompts():
    return draw_prompts(TASK, 16, seed=0, dtype=torch.float64)


def hooked_stack(kind: str, **settings: object):
    """A stack of this kind, and the same with hooks."""
    stack = random(STACKS[kind]())
    return stack, hook_module(stack, task=TASK, **settings)


def streams_of(stack: Stack, prompts) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    stack.by_hand(prompts.tokens, seen=seen)
    return seen


def require_patterns(stack: Stack, hooked, prompts) -> None:
    """Shown patterns are those computed head by head."""
    patterns = attention_patterns(hooked, prompts, shown=len(prompts)).pattern
    blocks = [block for _ in range(stack.runs) for block in stack.blocks]
    for layer, (block, x) in enumerate(zip(blocks, streams_of(stack, prompts), strict=True)):
        for head in range(HEADS):
            weights = block.attention.pattern(block.norm(x), head)[:, -1]
            got = patterns[:, layer * HEADS + head]
            np.testing.assert_allclose(got, weights[:, : got.shape[1]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", STACKS)
def test_rises_patterns_and_streams_are_those_computed_head_by_head(kind, prompts):
    stack, hooked = hooked_stack(kind)
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    n_layers = stack.runs * len(stack.blocks)
    assert (hooked.hooked.n_layers, hooked.hooked.n_heads) == (n_layers, HEADS)
    heads = list(np.ndindex(n_layers, HEADS))
    masks = [[], *([head] for head in heads), [heads[0], heads[-1]]]
    expected = torch.stack([stack.by_hand(prompts.tokens, mask) for mask in masks])
    predictor, close = predictor_of(hooked), {"rtol": 1e-9, "atol": 1e-10}
    torch.testing.assert_close(predictor.run(prompts, masks), expected, **close)
    with masked(hooked, masks[-1]):
        torch.testing.assert_close(hooked.predict(prompts), expected[-1], **close)
    torch.testing.assert_close(hooked.predict(prompts), expected[0], **close)
    assert (expected[1:] - expected[0]).abs().amax((1, 2)).min() > 1e-6
    risks = (expected - prompts.y_query_clean).square().mean((1, 2))
    rises = (risks[1:-1] - risks[0]).reshape(n_layers, HEADS)
    np.testing.assert_allclose(
        ablate(hooked, prompts, what="heads").rise, rises, rtol=1e-7, atol=1e-12
    )
    streams = torch.stack(streams_of(stack, prompts))[:, :, -1]
    torch.testing.assert_close(predictor.streams(prompts)[:-1, :, 0], streams)
    if kind in WITHOUT_PATTERNS:
        assert hooked.model.unfollowed
    else:
        require_patterns(stack, hooked, prompts)
    assert stack.state_dict().keys() == before.keys()  # the module itself is left as it was
    assert all(torch.equal(stack.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", HAND)
def test_a_softmax_written_by_hand_shows_its_patterns(kind, prompts):
    stack = random(Stack(*(strange.ByHand(kind) for _ in TWO), norm=True))
    hooked = hook_module(stack, task=TASK, n_heads=HEADS)
    require_patterns(stack, hooked, prompts)
    with hooked.model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda p, hook: 0 * p)]):
        got = hooked.predict(prompts)
    torch.testing.assert_close(got, stack.by_hand(prompts.tokens, [(1, h) for h in range(HEADS)]))


@pytest.mark.parametrize("kind", ["grouped", "torch"])
def test_queries_keys_values_and_scores_are_the_products_of_the_weights(kind, prompts):
    stack, hooked = hooked_stack(kind)
    assert not hooked.model.unfollowed
    _, cache = hooked.model.run_with_cache(prompts.tokens)
    block = stack.blocks[1]
    read = block.norm(cache["blocks.1.hook_resid_pre"])
    *reads, _ = block.attention.parts(1)
    q, k, v = (read @ W for W in reads)
    for name, expected in (("q", q), ("k", k), ("v", v)):
        torch.testing.assert_close(cache[f"blocks.1.attn.hook_{name}"][:, :, 1], expected)
    scores = cache["blocks.1.attn.hook_attn_scores"][:, 1]
    torch.testing.assert_close(scores.tril(), (q @ k.mT / math.sqrt(EACH)).tril())
    full = hooked.predict(prompts)
    for point in POINTS:
        changed = [(f"blocks.0.attn.{point}", lambda values, hook: 0.5 * values)]
        with hooked.model.hooks(fwd_hooks=changed):
            assert (hooked.predict(prompts) - full).abs().max() > 1e-4, point


@pytest.mark.parametrize("kind", ["grouped", "grouped, fused", "context keys"])
@pytest.mark.parametrize("point", ["hook_k", "hook_v"])
def test_keys_and_values_that_heads_share_are_changed_for_one_of_them(kind, point, prompts):
    (stack, hooked), head = hooked_stack(kind), 1

    def other(values, hook):
        assert values.shape[2] == HEADS
        values = values.clone()
        values[:, :, head] *= 0.5
        return values

    with hooked.model.hooks(fwd_hooks=[(f"blocks.1.attn.{point}", other)]):
        changed = hooked.predict(prompts)
    block, x = stack.blocks[1], streams_of(stack, prompts)[1]
    read = block.norm(x)
    written = [block.attention.written(read, h) for h in range(HEADS)]
    if point == "hook_v":
        written[head] = 0.5 * written[head]
    else:
        half = type(block.attention)().double()
        half.load_state_dict(block.attention.state_dict())
        half.q_proj.weight.data *= 0.5  # half the key is half the query
        written[head] = half.written(read, head)
    x = x + sum(written)
    expected = stack.read_out(x + block.mlp(x))[:, -1]
    torch.testing.assert_close(changed, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_edges_between_heads_with_rotary_positions_are_those_of_the_file_of_the_module(
    prompts, tmp_path
):
    """The file is read as a model of ours, whose edges are computed by other code."""
    stack = random(Stack(*(strange.Rotary() for _ in TWO), norm=True))
    state = {}
    for name, tensor in stack.state_dict().items():
        for theirs, known in RENAMED.items():
            name = name.replace(theirs, known)
        state[name] = tensor
    said = joins(Kind(norm="layer", mlp=True, positions="halves")) | {"context_keys": True}
    hints = {"n_heads": HEADS, "score": "softmax", "attend_to_self": True, "scale": EACH**-0.5}
    own = loaded(tmp_path, state, task={"context_length": 6}, model=said, **hints)
    hooked = hook_module(stack, task=TASK)
    torch.testing.assert_close(own.predictor.predict(prompts), hooked.predict(prompts))
    one, other = (
        attribute_edges(each, prompts[:8], corrupted=prompts[8:16]) for each in (own, hooked)
    )
    for field in ("patched", "estimate"):
        found, expected = getattr(other, field), getattr(one, field)
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-10)


def test_a_block_is_masked_in_one_run_or_in_all(prompts):
    stack, hooked = hooked_stack("looped blocks")
    assert hooked.hooked.blocks == (0, 1, 0, 1)
    with masked(hooked, [(1, 2)], runs="all"):
        got = hooked.predict(prompts)
    expected = stack.by_hand(prompts.tokens, [(1, 2), (3, 2)])
    torch.testing.assert_close(got, expected)
    every = ablate(hooked, prompts, what="blocks").rise
    assert every.shape == (2, HEADS)
    risk, full = (
        (each - prompts.y_query_clean).square().mean()
        for each in (expected, stack.by_hand(prompts.tokens))
    )
    assert every[1, 2] == pytest.approx((risk - full).item(), rel=1e-7)
    with (
        pytest.raises(ValueError, match=r"runs must be .*, got 'some'"),
        masked(hooked, [(1, 2)], runs="some"),
    ):
        hooked.predict(prompts)


def test_the_hooks_of_a_module_are_no_model_and_the_line_says_what_to_pass(prompts):
    _, hooked = hooked_stack("looped blocks")
    with pytest.raises(ValueError, match=r"got Stack with hooks; pass what hook_module returned"):
        ablate(hooked.model, prompts)


def test_weights_without_a_softmax_are_signed_and_said_to_be_no_distribution(prompts):
    _, hooked = hooked_stack("linear")
    patterns = attention_patterns(hooked, prompts)
    assert patterns.pattern.min() < 0
    assert "do not sum to 1" in " ".join(patterns.sentences())
    assert np.isnan(patterns.entropy).all()


def test_patterns_of_torchs_encoder_are_those_it_returns(prompts):
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    hooked = hook_module(encoder.to(prompts.x).eval().requires_grad_(False), task=TASK)
    patterns = attention_patterns(hooked, prompts, shown=len(prompts)).pattern
    inputs = (prompts.tokens,) * 3
    _, expected = encoder.layers[0].self_attn(*inputs, average_attn_weights=False)
    np.testing.assert_allclose(patterns[:, :2], expected[:, :, -1], rtol=1e-10)
    torch.testing.assert_close(hooked.predict(prompts), encoder(prompts.tokens)[:, -1, -1:])


# What cannot be followed, and what would give wrong heads.


UNTOLD = {strange.Parameters: "modules of the usual names", strange.ByHand: "no output of torch.softmax"}  # fmt: skip


@pytest.mark.parametrize("make", UNTOLD)
def test_edges_that_cannot_be_told_apart_are_refused_in_one_line(make, prompts):
    hooked = hook_module(random(Stack(*(make() for _ in TWO))), task=TASK, n_heads=HEADS)
    assert UNTOLD[make] in hooked.model.unfollowed[0]
    assert "blocks.0.attn.hook_q" not in hooked.model.hook_dict
    with pytest.raises(ValueError, match=r"blocks\.[01]\.attn\.hook_[qkv]; ") as caught:
        attribute_edges(hooked, prompts[:4], corrupted=prompts[4:8])
    assert "\n" not in str(caught.value)


class Bare(nn.Module):
    """One layer of attention whose weights show no number of heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x):
        return self.o(torch.sigmoid(self.q(x) @ self.k(x).mT) @ self.v(x))


def test_what_has_no_softmax_or_more_keys_than_there_are_has_an_exact_pattern_and_no_hook_on_it(
    prompts,
):
    sink = random(Stack(strange.WithSink()))
    hooked = hook_module(sink, task=TASK)
    assert "over 8 keys" in hooked.model.unfollowed[0]
    assert ablate(hooked, prompts, what="heads").rise.shape == (1, HEADS)
    bare = hook_module(Bare().double(), n_heads=2, task=TASK)
    # One layer without a module of its own is the module.
    assert predictor_of(bare).streams(prompts).shape == (2, len(prompts), 1, 4)
    assert not any(f"blocks.0.attn.{point}" in bare.model.hook_dict for point in POINTS)
    own = bare.model.module
    weights = torch.sigmoid(own.q(prompts.tokens) @ own.k(prompts.tokens).mT)[:, -1]
    found = attention_patterns(bare, prompts, shown=len(prompts)).pattern
    for head in range(2):
        np.testing.assert_allclose(found[:, head], weights.numpy(force=True), rtol=1e-10)
    # The sink, one more key without a value, takes the rest.
    sums = attention_patterns(hooked, prompts).pattern.sum(2)
    assert (sums > 0).all()
    assert (sums < 1).all()


class AllParameters(strange.Parameters):
    def __init__(self):
        super().__init__()
        self.W_o = nn.Parameter(torch.randn(WIDTH, WIDTH))
        del self.o_proj

    def forward(self, x):
        q, k, v = (torch.einsum("bti,hid->bhtd", x, W) for W in (self.W_q, self.W_k, self.W_v))
        return strange.joined(strange.attend(q, k, v)) @ self.W_o


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


class Idle(Bare):
    def forward(self, x):
        return x


class Twice(Bare):
    def forward(self, x):
        return super().forward(super().forward(x))


class SideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.one, self.two = (nn.Linear(4, 4) for _ in "12345")

    def forward(self, x):
        return self.two(self.one(x))


class Pairs(nn.Module):
    """Called with x and y, as Garg et al. call theirs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, y):
        tokens = torch.cat([x, y], dim=-1)
        return self.attention(tokens, tokens, tokens)[0]


class Split(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens[..., : TASK.d_x], tokens[..., TASK.d_x :])


def layers(*heads: int) -> nn.Module:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(4, each, 8, batch_first=True) for each in heads)
    )


GROUPED, TWO_HEADS = STACKS["grouped"], {"n_heads": 2}
REFUSED = [
    (GROUPED, {"outputs": ["blocks.0.attention"]}, "the residual stream"),
    (GROUPED, {"outputs": ["blocks.0.mlp"]}, "the residual stream"),
    (GROUPED, {"outputs": ["blocks.0.mlp.3"]}, "hidden units"),
    (GROUPED, {"n_heads": 8}, "n_heads must be 4, .*, got 8"),
    (STACKS["parameters"], TWO_HEADS, "n_heads must be 4, .*the softmax.*, got 2"),
    (STACKS["linear"], TWO_HEADS, "n_heads must be 4, .*n_heads.*, got 2"),
    (STACKS["heads"], TWO_HEADS, "n_heads must be 4, .*the modules beside.*, got 2"),
    (STACKS["two softmaxes"], {"n_heads": 8}, "n_heads must be 4, .*the softmax.*, got 8"),
    (lambda: layers(2), {"n_heads": 4}, r"n_heads must be 2, .*self_attn\.num_heads.*, got 4"),
    (lambda: layers(2, 4), {}, "n_heads must be the same number in every layer, got 2, 4"),
    (lambda: Stack(strange.ByEntry()), {}, r"side by side.*\(d_head head\)"),
    (lambda: Stack(AllParameters()), {}, r"Parameter blocks\.0\.attention\.W_o.*nn\.Linear"),
    (lambda: nn.Linear(4, 1), {}, "outputs must name the modules"),
    (Bare, {}, "heads must be given: .* states no number"),
    (Bare, {"n_heads": 3}, "n_heads must divide .*, 4, got 3"),
    (Idle, TWO_HEADS, "o must run for a prediction, got 0 times"),
    (Twice, TWO_HEADS, "o must lie in a separate module"),
    (SideBySide, {"n_heads": 2, "outputs": ["one", "two"]}, "one must lie in a separate module"),
    (lambda: Outputs("odd"), {}, r"read must be given.*\[2, 4\]"),
    (Bare, {"n_heads": 2, "read": lambda output: output}, r"read must give \[batch, d_y\]"),
    (Pairs, {"embed": lambda prompts: (prompts.x, prompts.y)}, "embed must return one tensor"),
    (lambda: nn.TransformerEncoderLayer(6, 2, 8), {}, "use embed= .* task= "),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "words"), REFUSED)
def test_what_cannot_be_hooked_is_refused_in_one_line(make, settings, words):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=words) as caught:
        hook_module(make(), task=TASK, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrapped", [Pairs, lambda: Split(Pairs())])
def test_a_module_of_two_inputs_is_called_with_xs_and_ys(prompts, wrapped):
    module = wrapped().to(prompts.x)
    hooked = hook_module(module, task=TASK)
    pairs, tokens = getattr(module, "module", module), prompts.tokens
    expected = pairs(tokens[..., : TASK.d_x], tokens[..., TASK.d_x :])[:, -1, -1:]
    torch.testing.assert_close(hooked.predict(prompts), expected)
    # Parts that are not known by name are not called norms: its own predictions prove the reading of its random weights.
    assert classify(hooked, n_prompts=16).label == "unstructured"


def test_layers_are_taken_in_the_order_in_which_they_run(prompts):
    class Backwards(Stack):
        def forward(self, x):
            x = self.read_in(x)
            for block in reversed(self.blocks):
                x = block(x)
            return self.read_out(x)

    hooked = hook_module(random(Backwards(strange.Rotary(), strange.Rotary())), task=TASK)
    assert hooked.outputs == ("blocks.1.attention.proj", "blocks.0.attention.proj")


@pytest.mark.slow
def test_a_report_is_written_in_one_call(tmp_path):
    hooked = hook_module(random(STACKS["torch"]()).float(), task=TASK)
    report = write_report(hooked, tmp_path / "page", n_prompts=64)
    assert {"ablation.csv", "probes.csv", "pruning.csv"} <= {file.name for file in report.tables}


@pytest.mark.slow
def test_threads_get_the_numbers_of_one(prompts):
    _, hooked = hooked_stack("looped blocks")
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    own, model = draw_prompts(checkpoint.task, 32, seed=0), checkpoint.model

    def by_hooks(head: int) -> torch.Tensor:
        with masked(model, [(0, head)]):
            return model.predict(own)

    calls = [
        *(lambda head=head: by_hooks(head) for head in TWO),
        lambda: predictor_of(checkpoint).run(own, [[(0, 0)], [(0, 1)]]),
        lambda: torch.tensor(ablate(hooked, prompts[:8], what="heads").rise.copy()),
        lambda: hooked.predict(prompts),
    ]
    expected = [call() for call in calls]
    wrong: list[object] = []

    def work() -> None:
        for number in range(15):
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


def test_hooked_modules_and_used_checkpoints_are_pickled(prompts):
    stack, hooked = hooked_stack("looped blocks")
    expected = hooked.predict(prompts)
    assert torch.equal(pickle.loads(pickle.dumps(hooked)).predict(prompts), expected)
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    own = draw_prompts(checkpoint.task, 32, seed=0)
    expected = predictor_of(checkpoint).predict(own)
    copy = pickle.loads(pickle.dumps(checkpoint))
    assert torch.equal(predictor_of(copy).predict(own), expected)
    with_lambda = hook_module(stack, task=TASK, read=lambda output: output[:, -1])
    with pytest.raises(ValueError, match=r"read must be a function .*pickled"):
        pickle.dumps(with_lambda)
