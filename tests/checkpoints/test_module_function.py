"""Modules whose prediction is not a function of the prompt alone are refused before anything is computed."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from mechinterp import TaskConfig, ablate, hook_module, sample_prompts
from mechinterp.checkpoints.modules.function import HALF_LIMIT, LIMIT, difference
from tests.checkpoints.strange_modules import WIDTH, Grouped, Layer, Stack, Torchs, joined, split
from tests.checkpoints.strange_modules import random as seeded

TASK = TaskConfig(d_x=3, context_length=6)


class Wrapped(nn.Module):
    """A stack whose stream before its layers is changed by `change`."""

    def __init__(self):
        super().__init__()
        self.stack = seeded(Stack(Grouped(), norm=True))

    def forward(self, tokens):
        return self.stack(self.change(tokens))


class DropoutInside(Grouped):
    """Dropout in the attention that knows no evaluation mode."""

    def forward(self, x):
        q, k, v = split(self.q_proj(x), 4), split(self.k_proj(x), 2), split(self.v_proj(x), 2)
        attend = functional.scaled_dot_product_attention
        return self.o_proj(joined(attend(q, k, v, dropout_p=0.1, enable_gqa=True)))


class NumpyNoise(Wrapped):
    def change(self, tokens):
        return tokens * np.random.normal(1, 0.01)


class PythonNoise(Wrapped):
    def change(self, tokens):
        return tokens + 0.01 * random.random()


class OwnGenerator(Wrapped):
    def change(self, tokens):
        if not hasattr(self, "numbers"):
            self.numbers = np.random.default_rng(0)
        return tokens * self.numbers.normal(1, 0.01)


class Counting(Wrapped):
    """A counter that every call moves on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def change(self, tokens):
        self.calls += 1
        return tokens * (1 + 0.01 * self.calls)


class Running(Wrapped):
    """A running mean that is updated in evaluation mode too, so that it depends on the last batch."""

    def change(self, tokens):
        self.mean = 0.9 * getattr(self, "mean", 0) + 0.1 * tokens.mean()
        return tokens - self.mean


class BatchNorm(Wrapped):
    """A batch norm that never leaves training mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def train(self, mode=True):
        super().train(mode)
        self.norm.training = True
        return self

    def change(self, tokens):
        return self.norm(tokens.mT).mT


class WithoutMean(Wrapped):
    def change(self, tokens):
        return tokens - tokens.mean(0)


class Neighbours(Wrapped):
    """Prompts in pairs, which halves of the batch do not part."""

    def change(self, tokens):
        others = tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) if len(tokens) > 3 else tokens
        return tokens + 0.1 * others


class OverPrompts(Torchs):
    """torch's attention that takes the prompts as positions."""

    def __init__(self):
        super().__init__(batch_first=False)

    def forward(self, x):
        return self.mha(x, x, x)[0]


RANDOM = [lambda: seeded(Stack(DropoutInside(), norm=True)), NumpyNoise, PythonNoise]
STATE = [Counting, Running, OwnGenerator]
BATCH = [BatchNorm, WithoutMean, Neighbours, lambda: seeded(Stack(OverPrompts()))]
KINDS = [
    *((make, "it draws random numbers") for make in RANDOM),
    *((make, "it keeps a state between calls") for make in STATE),
    *((make, "depends on the other prompts of the batch") for make in BATCH),
]


@pytest.mark.parametrize(("make", "words"), KINDS)
def test_a_prediction_that_is_no_function_of_the_prompt_is_refused_by_its_cause(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        hook_module(make(), task=TASK)
    assert "\n" not in str(caught.value)


class Drawing(Wrapped):
    """Random numbers of every kind that leave the prediction as it is; written into the input, too."""

    def change(self, tokens):
        unused = torch.rand(3).sum() + random.random() + np.random.rand()
        tokens[:, -1, -1] = 0
        return tokens + 0 * unused


@pytest.mark.parametrize("make", [Drawing, NumpyNoise])
def test_the_random_states_and_the_module_are_as_before(make):
    module = make()
    torch.manual_seed(1)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    if make is Drawing:
        hooked = hook_module(module, task=TASK)
    else:
        with pytest.raises(ValueError, match="random numbers"):
            hook_module(module, task=TASK)
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    if make is Drawing:
        prompts = sample_prompts(TASK, 16, seed=0, dtype=torch.float64)
        kept = prompts.tokens.clone()
        masks = [[], *([(0, head)] for head in range(4))]
        expected = torch.stack([module.stack.by_hand(prompts.tokens, mask) for mask in masks])
        torch.testing.assert_close(hooked.predict(prompts), expected[0])
        risks = (expected - prompts.y_query_clean).square().mean((1, 2))
        rises = ablate(hooked, prompts, what="heads").rise[0]
        np.testing.assert_allclose(rises, risks[1:] - risks[0], rtol=1e-7, atol=1e-12)
        assert torch.equal(prompts.tokens, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_in_other_precisions_are_functions_of_the_prompt(dtype):
    module = seeded(Stack(Grouped(), Grouped(), norm=True)).to(dtype)
    hooked = hook_module(module, task=TASK)
    prompts = sample_prompts(TASK, 4, seed=0, dtype=dtype)
    torch.testing.assert_close(hooked.predict(prompts), module(prompts.tokens)[:, -1])


def test_differences_are_in_standard_deviations_and_rounding_is_none():
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(16, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 100.0])
    other = own.clone()
    other[3, 1] += 0.5 * own[:, 1].std()
    assert difference(own, other, torch.float64) == pytest.approx(0.5)
    for dtype, limit in ((torch.float32, LIMIT), (torch.bfloat16, HALF_LIMIT)):
        for part, counts in ((0.9, False), (1.1, True)):
            moved = own + part * limit * own.std(0)
            assert (difference(own, moved, dtype) > 0) is counts
    constant = torch.full((16, 1), 7.0)
    assert difference(constant, constant * (1 + 2e-6), torch.float32) > 0
    assert not difference(constant, constant * (1 + 5e-7), torch.float32)
    assert difference(constant, constant + torch.nan, torch.float32) == float("inf")


def test_a_layer_alone_is_checked_too():
    module = nn.Sequential(nn.Linear(4, WIDTH), Layer(Grouped()), nn.Dropout(0.5))
    assert hook_module(module, task=TASK).hooked.n_layers == 1  # off in evaluation mode
