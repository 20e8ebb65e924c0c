"""Modules that write into their input or stream, or cut gradients: right numbers, or one line with the cure."""

import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mechinterp import (
    TaskConfig,
    ablate,
    attribute_edges,
    hook_module,
    local_learning_coefficient,
    sample_prompts,
)
from tests.checkpoints.strange_modules import Grouped, Layer, Rotary, Stack, random

TASK = TaskConfig(d_x=3, context_length=6)


class Checkpointed(Stack):
    reentrant = False

    def forward(self, x):
        x = self.read_in(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.read_out(x)


class OlderCheckpointed(Checkpointed):
    reentrant = True


class WithoutGradients(Stack):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class AttentionWithoutGradients(Layer):
    def forward(self, x):
        with torch.no_grad():
            y = self.attention(self.norm(x))
        x = x + y
        return x + self.mlp(x)


class Detached(Layer):
    def forward(self, x):
        x = x.detach() + self.attention(self.norm(x.detach()))
        return x + self.mlp(x)


class Numpy(Layer):
    def forward(self, x):
        x = x + 0.1 * torch.from_numpy(self.norm(x).numpy())
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class InPlace(Layer):
    def forward(self, x):
        x += self.attention(self.norm(x))
        x += self.mlp(x)
        return x


def stack_of(block: type[Layer], attention: type[nn.Module] = Rotary) -> nn.Module:
    stack = Stack(attention(), attention(), norm=True)
    stack.blocks = nn.ModuleList(block(each.attention, norm=True) for each in stack.blocks)
    return random(stack)


def checkpointed(kind: type[Checkpointed]) -> nn.Module:
    return random(kind(Rotary(), Rotary(), norm=True))


CUT = "torch.no_grad"
KINDS = [
    (lambda: checkpointed(Checkpointed), "gradient_checkpointing_disable"),
    (lambda: checkpointed(OlderCheckpointed), "gradient_checkpointing_disable"),
    (lambda: checkpointed(WithoutGradients), CUT),
    (lambda: stack_of(AttentionWithoutGradients), CUT),
    (lambda: stack_of(Detached), CUT),
    (lambda: stack_of(Numpy), "not numpy"),
    (lambda: stack_of(InPlace), "x = x + y"),
]


@pytest.fixture
def prompts():
    return sample_prompts(TASK, 16, seed=0, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("make", "cure"), KINDS)
def test_edges_of_modules_without_gradients_name_the_cure_and_masks_need_none(
    make, cure, trained, prompts
):
    hooked = hook_module(make().requires_grad_(trained), task=TASK)
    assert ablate(hooked, prompts, what="heads").rise.shape == (2, 4)
    with pytest.raises(ValueError, match=re.escape(cure)) as caught:
        attribute_edges(hooked, prompts[:8], corrupted=prompts[8:])
    assert "\n" not in str(caught.value)


def test_the_learning_coefficient_names_the_cure(prompts):
    hooked = hook_module(stack_of(InPlace, Grouped), task=TASK)
    with pytest.raises(ValueError, match=r"x = x \+ y"):
        local_learning_coefficient(hooked, n_prompts=8)


def test_streams_of_a_module_that_adds_in_place_are_those_before_the_sum(prompts):
    plain = random(Stack(Rotary(), Rotary(), norm=True))
    one, other = (hook_module(each, task=TASK) for each in (stack_of(InPlace), plain))
    torch.testing.assert_close(one.predict(prompts), other.predict(prompts))
    (_, found), (_, expected) = (each.model.run_with_cache(prompts.tokens) for each in (one, other))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, msg=name)
    streams = [expected[f"blocks.{layer}.hook_resid_pre"] for layer in range(2)]
    assert (streams[1] - streams[0]).abs().min() > 1e-6
