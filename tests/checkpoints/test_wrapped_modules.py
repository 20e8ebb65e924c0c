"""Modules whose projections are wrapped, as fine-tuning and quantisation do it: numbers of the plain module of the same weights."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import weight_norm as old_weight_norm

from mechinterp import TaskConfig, ablate, hook_module, name_algorithm, predictor_of, sample_prompts
from tests.checkpoints.strange_modules import (
    EACH,
    HEADS,
    Grouped,
    Parameters,
    Rotary,
    Stack,
    random,
)

TASK = TaskConfig(d_x=3, context_length=6)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv", "proj")


class Lora(nn.Module):
    """A projection beside a product of two thin ones, with peft's names."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base_layer = base
        thin = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )
        self.lora_A, self.lora_B = (nn.ModuleDict({"default": each}) for each in thin)

    def forward(self, x):
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))


class Int8(nn.Module):
    """A projection whose weights are integers with a scale for each row; it has no parameter."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        scale = base.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_int8", (base.weight / scale).round().to(torch.int8))
        self.register_buffer("weight_scale", scale)

    def forward(self, x):
        return x @ (self.weight_int8.to(x.dtype) * self.weight_scale).T


def weight_norm(linear: nn.Linear) -> nn.Linear:
    return parametrizations.weight_norm(linear)


def old_norm(linear: nn.Linear) -> nn.Linear:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return old_weight_norm(linear.requires_grad_())


def pruned(linear: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(linear.requires_grad_(), "weight", amount=0.25)


WRAPS = {"LoRA": Lora, "int8": Int8, "weight_norm": weight_norm, "old weight_norm": old_norm, "pruned": pruned}  # fmt: skip


def wrapped(stack: Stack, wrap) -> Stack:
    """The stack with every projection of its attention wrapped, in place."""
    for block in stack.blocks:
        for name in PROJECTIONS:
            if hasattr(block.attention, name):
                setattr(block.attention, name, wrap(getattr(block.attention, name)))
    return stack


def unwrapped(stack: Stack, plain: Stack) -> Stack:
    """A plain stack with the matrices that the wrapped projections multiply by."""
    with torch.no_grad():
        for one, other in zip(plain.blocks, stack.blocks, strict=True):
            for name in PROJECTIONS:
                if hasattr(one.attention, name):
                    width = getattr(one.attention, name).in_features
                    product = getattr(other.attention, name)(torch.eye(width).double())
                    getattr(one.attention, name).weight.copy_(product.T)
    return plain


@pytest.mark.parametrize("attention", [Grouped, Rotary])
@pytest.mark.parametrize("wrap", WRAPS)
def test_wrapped_projections_are_found_and_masked_like_plain_ones(wrap, attention):
    def make() -> Stack:
        return random(Stack(attention(), attention(), norm=True))

    torch.manual_seed(0)
    stack = wrapped(make(), WRAPS[wrap]).double()
    plain = unwrapped(stack, make())
    hooked = hook_module(stack, task=TASK)
    assert hooked.outputs == hook_module(plain, task=TASK).outputs
    assert not hooked.model.unfollowed or attention is Rotary
    prompts = sample_prompts(TASK, 16, seed=0, dtype=torch.float64)
    heads = list(np.ndindex(2, HEADS))
    masks = [[], *([head] for head in heads)]
    expected = torch.stack([plain.by_hand(prompts.tokens, mask) for mask in masks])
    torch.testing.assert_close(predictor_of(hooked).run(prompts, masks), expected)
    assert ablate(hooked, prompts, what="heads").rise.shape == (2, HEADS)
    with torch.no_grad():
        torch.testing.assert_close(stack(prompts.tokens)[:, -1], expected[0])


def test_a_traced_module_is_refused_with_the_cure():
    stack = random(Stack(Grouped()))
    tokens = torch.zeros(2, 7, 4, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(stack, tokens)
    for module, where in ((traced, "this is"), (nn.Sequential(traced), "0 is")):
        with pytest.raises(ValueError, match=f"{where}: hook the Python module") as caught:
            hook_module(module, task=TASK)
        assert "\n" not in str(caught.value)
    again = random(Stack(Grouped()))
    again.load_state_dict(traced.state_dict())  # the cure
    prompts = sample_prompts(TASK, 4, seed=0, dtype=torch.float64)
    predicted = hook_module(again, task=TASK).predict(prompts)
    torch.testing.assert_close(predicted, stack(prompts.tokens)[:, -1])


class Keeping(Grouped):
    """Attention that stores its last output, as notebooks do, with its gradient or as numpy."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


def test_a_module_that_stores_tensors_with_gradients_is_hooked_and_left_as_it_was():
    stack = random(Stack(Keeping())).requires_grad_()
    prompts = sample_prompts(TASK, 8, seed=0, dtype=torch.float64)
    stack(prompts.tokens)
    last = stack.blocks[0].attention.last
    hooked = hook_module(stack, task=TASK)
    torch.testing.assert_close(hooked.predict(prompts), stack.by_hand(prompts.tokens))
    assert stack.blocks[0].attention.last is last


class Locked(Grouped):
    def __init__(self):
        super().__init__()
        import threading

        self.lock = threading.Lock()


class Pairs(nn.Module):
    """Called with xs and ys; its parts have names that nobody knows."""

    def __init__(self, attention: nn.Module | None = None):
        super().__init__()
        self.stack = Stack(attention or Grouped())

    def forward(self, xs, ys):
        return self.stack(torch.cat([xs, ys[..., None]], -1))


class Unknown(Parameters):
    def __init__(self):
        super().__init__()
        self.mixing = self.o_proj
        del self.o_proj

    def forward(self, x):
        return self.mixing(x)


@pytest.mark.parametrize(
    ("module", "settings", "words"),
    [
        (lambda: Stack(Locked()), {}, "copy.deepcopy copies"),
        (lambda: Pairs(Unknown()), {}, "a Pairs has no MultiheadAttention"),
        (
            Pairs,
            {"n_heads": 2},
            r"n_heads must be 4, the number in the softmax in stack\.blocks\.0",
        ),
        (Pairs, {"outputs": ["x"]}, r"as Pairs\.named_modules\(\)"),
    ],
)
def test_refusals_are_one_line_about_the_users_own_module(module, settings, words):
    with pytest.raises(ValueError, match=words) as caught:
        hook_module(random(module()), task=TASK, **settings)
    assert "\n" not in str(caught.value)


def test_a_module_of_xs_and_ys_has_the_numbers_of_the_stack_inside():
    pairs = random(Pairs())
    hooked = hook_module(pairs, task=TASK, outputs="stack.blocks.0.attention.o_proj")
    prompts = sample_prompts(TASK, 16, seed=0, dtype=torch.float64)
    masks = [[], *([(0, head)] for head in range(HEADS))]
    expected = torch.stack([pairs.stack.by_hand(prompts.tokens, mask) for mask in masks])
    torch.testing.assert_close(predictor_of(hooked).run(prompts, masks), expected)
    scale = 1 / math.sqrt(EACH)
    _, cache = hooked.model.run_with_cache(hooked.hooked.embed(prompts))
    q, k, scores = (cache[f"blocks.0.attn.hook_{name}"] for name in ("q", "k", "attn_scores"))
    torch.testing.assert_close(scores[:, 0].tril(), (q[:, :, 0] @ k[:, :, 0].mT * scale).tril())


class WithoutStream(nn.Module):
    """A step of gradient descent, bent a little, that puts out the prediction alone, without a stream."""

    def __init__(self):
        super().__init__()
        parts = (nn.Linear(4, 4, bias=False) for _ in "qkvo")
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = parts
        self.n_heads = 1
        x, y = torch.diag(torch.tensor([1.0, 1, 1, 0])), torch.diag(torch.tensor([0.0, 0, 0, 1]))
        for part, matrix in zip("qkvo", (x, x, y, 0.8 * y), strict=True):
            getattr(self, f"{part}_proj").weight.data = matrix

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x)[:, :-1], self.v_proj(x)[:, :-1]
        return 10 * (self.o_proj(q @ (k.mT @ v) / v.shape[1]) / 10).tanh()[:, -1, -1:]


def test_an_algorithm_is_named_for_a_layer_that_puts_out_the_prediction_alone():
    found = name_algorithm(hook_module(WithoutStream(), task=TASK), n_prompts=256)
    assert found.function == "gradient_descent"
