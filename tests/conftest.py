"""Fixtures with known answers."""

from pathlib import Path

import pytest
import torch

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.constructions import debiased_gradient_step, zero_head
from mechinterp.models.functional import NAMES, AttentionWeights, stack

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def assert_same(actual: AttentionWeights, expected: AttentionWeights):
    """Equal bits, and the same law of attention."""
    for name in NAMES:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    law = (expected.scale, expected.score, expected.score_slope)
    assert (actual.scale, actual.score, actual.score_slope) == law


@pytest.fixture
def generator() -> torch.Generator:
    return generator_for(0, "eval", 0)


@pytest.fixture
def prompts(generator: torch.Generator) -> Prompts:
    """256 prompts of the softmax paper's task, in float64."""
    return sample_prompts(TaskConfig(), 256, generator=generator, dtype=torch.float64)


@pytest.fixture
def gradient_step_weights() -> AttentionWeights:
    """Three heads, d_x = 5: heads 0 and 1 are one debiased step of size 0.88, head 2 is zero."""
    return stack([debiased_gradient_step(0.88, 0.02, d_x=5), zero_head(d_x=5)])
