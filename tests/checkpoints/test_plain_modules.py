"""A plain module with hooks predicts and masks as a computation by hand does, whatever its parts are called."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    ablate_heads,
    classify,
    hook_module,
    predictor_of,
    probe_layers,
    sample_prompts,
    write_report,
)
from mechinterp.models.hooked.runner import masked
from tests.conformance.check import check_conformance

TASK = TaskConfig(d_x=3, d_y=1, context_length=5)
WIDTH, HEADS, LAYERS = 4, 2, 2
MASKS = [[], [(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(0, 0), (1, 1)]]


def attended(q, k, v):
    """What the heads have averaged, side by side."""
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    pattern = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
    return (pattern @ v).transpose(1, 2).flatten(-2)


class Separate(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.to_out(attended(self.to_q(x), self.to_k(x), self.to_v(x)))

    def matrices(self):
        return *(p.weight for p in (self.to_q, self.to_k, self.to_v)), self.to_out


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads = HEADS
        self.c_attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(attended(*self.c_attn(x).chunk(3, -1)))

    def matrices(self):
        return *self.c_attn.weight.chunk(3), self.proj


class Torchs(nn.Module):
    def __init__(self, batch_first: bool = True):
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, bias=batch_first, batch_first=batch_first)

    def forward(self, x):
        return self.mha(x, x, x)[0]

    def matrices(self):
        return *self.mha.in_proj_weight.chunk(3), self.mha.out_proj


class PositionFirst(Torchs):
    def __init__(self):
        super().__init__(batch_first=False)

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Stack(nn.Module):
    """Layers of attention with a residual and an MLP, and a read-out."""

    def __init__(self, attention):
        super().__init__()
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layer = nn.ModuleList(attention() for _ in range(LAYERS))
        self.answer = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for attention, mlp in zip(self.layer, self.after, strict=True):
            x = x + attention(x)
            x = x + torch.relu(mlp(x))
        return self.answer(x)


def by_hand(stack, tokens, mask):
    """The prediction of a stack, head by head, without those of a mask; [batch, 1]."""
    x, each = tokens, WIDTH // HEADS
    for layer, (attention, mlp) in enumerate(zip(stack.layer, stack.after, strict=True)):
        Q, K, V, out = attention.matrices()
        added = torch.zeros_like(x) if out.bias is None else out.bias.expand_as(x)
        for head in range(HEADS):
            if (layer, head) in mask:
                continue
            rows = slice(each * head, each * (head + 1))
            scores = (x @ Q[rows].mT) @ (x @ K[rows].mT).mT / math.sqrt(each)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            added = added + weights @ (x @ V[rows].mT) @ out.weight[:, rows].mT
        x = x + added
        x = x + torch.relu(x @ mlp.weight.mT + mlp.bias)
    return (x @ stack.answer.weight.mT + stack.answer.bias)[:, -1]


def random_stack(attention) -> Stack:
    stack = Stack(attention).double()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in stack.named_parameters():
        if "in_proj_bias" not in name:  # zero, as torch makes it
            nn.init.normal_(parameter, std=0.5, generator=generator)
    return stack.requires_grad_(False)


@pytest.fixture
def prompts():
    return sample_prompts(TASK, 8, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("attention", [Separate, Packed, Torchs, PositionFirst])
def test_predictions_and_masks_are_those_computed_by_hand(attention, prompts):
    stack = random_stack(attention)
    before = {name: tensor.clone() for name, tensor in stack.state_dict().items()}
    hooked = hook_module(stack, heads=HEADS, read=lambda output: output[:, -1], task=TASK)
    expected = torch.stack([by_hand(stack, prompts.tokens, mask) for mask in MASKS])
    predictions = predictor_of(hooked).run(prompts, MASKS)
    torch.testing.assert_close(predictions, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(hooked.predict(prompts), expected[0], rtol=1e-12, atol=1e-12)
    with masked(hooked, [(1, 0)]):
        torch.testing.assert_close(hooked.predict(prompts), expected[3], rtol=1e-12, atol=1e-12)
    assert (expected[1:] - expected[0]).abs().amax((1, 2)).min() > 1e-3
    assert stack.state_dict().keys() == before.keys()  # the module itself is left as it was
    assert all(torch.equal(stack.state_dict()[name], tensor) for name, tensor in before.items())


class Layer(nn.Module):
    """One layer of a stack, its sums with the stream included."""

    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(x)
        return x + torch.relu(self.mlp(x))


def whole_layers(stack) -> nn.Module:
    """A stack with a module for each layer."""
    return nn.Sequential(*map(Layer, stack.layer, stack.after), stack.answer)


@pytest.mark.parametrize("attention", [Separate, PositionFirst])
def test_streams_are_those_before_and_after_the_layers(attention, prompts):
    whole = whole_layers(random_stack(attention))
    hooked = hook_module(whole, heads=HEADS, task=TASK)
    streams = predictor_of(hooked).streams(prompts)
    assert streams.shape == (LAYERS + 1, len(prompts), 1, WIDTH)
    x = prompts.tokens
    for layer, stream in enumerate(streams):
        torch.testing.assert_close(stream[:, 0], x[:, -1])
        x = whole[layer](x)
    torch.testing.assert_close(hooked.predict(prompts), x[:, -1])


def test_layers_are_taken_in_the_order_in_which_they_run(prompts):
    class Backwards(Stack):
        def forward(self, x):
            for attention in reversed(self.layer):
                x = x + attention(x)
            return self.answer(x)

    stack = Backwards(Packed).double()
    assert hook_module(stack, task=TASK).outputs == ("layer.1.proj", "layer.0.proj")


def test_torchs_encoder_is_hooked_under_its_fused_layer(prompts):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True), 2
    )
    encoder.eval().requires_grad_(False)
    prompts = prompts.to(torch.float32)
    hooked = hook_module(encoder, task=TASK)
    torch.testing.assert_close(hooked.predict(prompts), encoder(prompts.tokens)[:, -1, -1:])
    ablation = ablate_heads(hooked, prompts)
    assert ablation.rise.shape == (2, HEADS)
    assert np.all(ablation.rise != 0)
    assert probe_layers(hooked, prompts).to_frame().layer.nunique() == 3


@pytest.mark.slow
def test_what_a_module_lacks_is_named():
    conformance = check_conformance(hook_module(random_stack(Packed), task=TASK).model)
    assert {"blocks.0.hook_attn_out", "Heads.W_O"} <= set(conformance.lacking)
    assert not any("hook_pattern" in name for name in conformance.lacking)
    passed = {"no hook left after an exception", "caller's input untouched", "evaluation mode"}
    assert not passed & conformance.failures.keys()
    assert "hook_module" in check_conformance(nn.Linear(2, 2)).lacking[0]


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        return self.o(attended(self.q(x), self.k(x), self.v(x)))


def test_one_layer_without_a_module_of_its_own_is_the_module(prompts):
    hooked = hook_module(Bare().double(), heads=2, task=TASK)
    assert predictor_of(hooked).streams(prompts).shape == (2, len(prompts), 1, WIDTH)


class Idle(Bare):
    def forward(self, x):
        return x


class Twice(Bare):
    def forward(self, x):
        return super().forward(super().forward(x))


class Gated(Bare):
    """Attention whose weights show no number of heads."""

    def forward(self, x):
        return self.o(torch.sigmoid(self.q(x) @ self.k(x).mT) @ self.v(x))


class SideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.one, self.two = (
            nn.Linear(WIDTH, WIDTH) for _ in "12345"
        )

    def forward(self, x):
        return self.two(self.one(x))


class Pairs(nn.Module):
    """Called with x and y, as Garg et al. call theirs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x, y):
        tokens = torch.cat([x, y], dim=-1)
        return self.attention(tokens, tokens, tokens)[0]


class Split(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, tokens):
        return self.module(tokens[..., : TASK.d_x], tokens[..., TASK.d_x :])


@pytest.mark.parametrize(
    ("wrapped", "name"), [(Pairs, "attention"), (lambda: Split(Pairs()), "module.attention")]
)
def test_a_module_of_two_inputs_is_called_with_xs_and_ys(prompts, wrapped, name):
    module = wrapped().to(prompts.x)
    hooked = hook_module(module, task=TASK)
    pairs = getattr(module, "module", module)
    tokens = prompts.tokens
    expected = pairs(tokens[..., : TASK.d_x], tokens[..., TASK.d_x :])[:, -1, -1:]
    torch.testing.assert_close(hooked.predict(prompts), expected)
    assert hooked.outputs == (name,)


def test_what_is_not_known_by_name_is_not_called_a_norm():
    result = classify(hook_module(Split(Pairs()), task=TASK), n_prompts=16)
    assert result.pattern == "undetermined"
    assert result.reason.startswith(
        "parts that are not known by name lie between the heads and the"
    )


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (nn.Linear(WIDTH, 1), {}, "outputs must name the modules .* a Linear has no"),
        (Gated(), {}, "heads must be given: the module around o states no number"),
        (Gated(), {"heads": 3}, "heads must divide the width of the heads' outputs, 4, got 3"),
        (Bare(), {"heads": 4}, "heads must be 2, the number in the softmax in Bare, got 4"),
        (Idle(), {"heads": 2}, "o must run for a prediction, got 0 times"),
        (Twice(), {"heads": 2}, "o must lie in a separate module, the layer"),
        (
            SideBySide(),
            {"heads": 2, "outputs": ["one", "two"]},
            "one must lie in a separate module",
        ),
        (Bare(), {"heads": 2, "read": lambda output: output}, r"read must give \[batch, d_y\]"),
        (
            Pairs(),
            {"embed": lambda prompts: (prompts.x, prompts.y)},
            "embed must return one tensor, got tuple; wrap a module of several inputs",
        ),
        (
            nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
            {},
            r"module must run on the input \[2, 6, 4\] of 2 prompts, got: .*; use embed= to make .* task= to state d_x",
        ),
    ],
)
def test_what_cannot_be_hooked_is_refused_in_one_line(module, settings, message):
    with pytest.raises(ValueError, match=message):
        hook_module(module, task=TASK, **settings)


def test_layers_of_different_numbers_of_heads_are_refused():
    mixed = nn.Sequential(*(nn.TransformerEncoderLayer(4, heads, 4) for heads in (2, 4)))
    with pytest.raises(ValueError, match="heads must be the same number in every layer, got 2, 4"):
        hook_module(mixed, task=TASK)


@pytest.mark.slow
def test_a_report_is_written_in_one_call(tmp_path):
    hooked = hook_module(whole_layers(random_stack(Torchs)).float(), task=TASK)
    report = write_report(hooked, tmp_path / "page", n_prompts=64)
    text = report.page.read_text(encoding="utf-8")
    assert "2 layers of 2 heads, a PyTorch module with hooks, d_x 3" in text
    assert {"ablation.csv", "probes.csv", "pruning.csv"} <= {file.name for file in report.tables}


def test_the_task_is_told_whole_and_called_assumed_only_where_it_is():
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    whole = TaskConfig().assuming(())
    stated, assumed = hook_module(layer, task=whole), hook_module(layer)
    assert f"task: {whole.in_words})" in repr(stated)
    assert repr(hook_module(layer, task=TaskConfig(d_x=5))) == repr(
        hook_module(layer, task={"d_x": 5})
    )
    assert repr(assumed).endswith(
        "beta_var 0.2 (1/d_x), noise_var 0.1, query_noise yes; assumed: d_x, d_y, context_length, covariance, "
        "beta_var, noise_var, query_noise)"
    )
    results = classify(assumed, n_prompts=16), classify(stated, n_prompts=16)
    assert [bool(each.task.assumed) for each in results] == [True, False]
    assert f"Task: {TaskConfig().in_words}." in repr(results[0])
