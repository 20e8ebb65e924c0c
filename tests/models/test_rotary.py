"""Rotary positions: the formula against other code, and all ways of running against hooks."""

import math

import pytest
import torch
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.layers import rotated
from mechinterp.models.run.general import masked_predictions, predict_deep, query_patterns
from tests.deep_models import random_model

HALVES = ModelConfig(rotary_dim=4, rotary_base=100.0)
PAIRS = ModelConfig(rotary_dim=4, rotary_base=100.0, rotary_adjacent_pairs=True)


def test_two_entries_turn_by_their_position():
    """With two entries both pairings are one rotation by the position itself, in radians."""
    heads = torch.tensor([1.0, 0.0]).expand(3, 1, 2)
    for adjacent in (False, True):
        turned = rotated(heads, ModelConfig(rotary_dim=2, rotary_adjacent_pairs=adjacent))
        expected = torch.tensor([[math.cos(t), math.sin(t)] for t in range(3)])
        torch.testing.assert_close(turned[:, 0], expected)


def test_halves_are_those_of_llama_and_pairs_those_of_gptj():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 5, 3, 4, generator=generator) for _ in "qk")
    angle = torch.arange(5)[:, None] * 100.0 ** -(torch.arange(0, 4, 2) / 4)
    both = torch.cat([angle, angle], -1)[None]
    theirs = llama.apply_rotary_pos_emb(q, k, both.cos(), both.sin(), unsqueeze_dim=2)
    for one, other in zip((q, k), theirs, strict=True):
        torch.testing.assert_close(rotated(one, HALVES), other)
    sin, cos = angle.sin()[None], angle.cos()[None]
    torch.testing.assert_close(rotated(q, PAIRS), gptj.apply_rotary_pos_emb(q, sin, cos))


def test_entries_behind_the_turned_ones_stay_and_later_rows_turn_further():
    heads = torch.randn(6, 1, 5)
    turned = rotated(heads, HALVES)
    assert torch.equal(turned[..., 4:], heads[..., 4:])
    torch.testing.assert_close(rotated(heads[4:], HALVES, first=4), turned[4:])
    assert rotated(heads, ModelConfig()) is heads


@pytest.mark.parametrize("adjacent", [False, True])
def test_weights_alone_run_as_the_hooked_model_does(adjacent: bool):
    settings = {"rotary_dim": 2, "rotary_base": 50.0, "rotary_adjacent_pairs": adjacent}
    model = random_model(2, 2, d_head=3, attend_to_self=True, **settings)
    plain = random_model(2, 2, d_head=3, attend_to_self=True)
    prompts = sample_prompts(TaskConfig(d_x=4, context_length=6), 8, seed=0, dtype=torch.float64)
    predicted = model.predict(prompts)
    torch.testing.assert_close(predict_deep(model.weights, prompts), predicted)
    assert (plain.predict(prompts) - predicted).abs().max() > 1e-3
    masked = masked_predictions(model.weights, prompts, [[], [(0, 1)]])
    torch.testing.assert_close(masked[0], predicted)
    _, cache = model.run_with_cache(model.tokens(prompts))
    patterns = torch.stack([cache["pattern", layer][:, :, -1] for layer in range(2)])
    torch.testing.assert_close(query_patterns(model.weights, prompts), patterns)
    q, turned = cache["blocks.0.attn.hook_q"], cache["blocks.0.attn.hook_rot_q"]
    torch.testing.assert_close(rotated(q, model.cfg.model), turned)


def test_sizes_are_checked():
    for wrong in ({"rotary_dim": 3}, {"rotary_base": 0.0}, {"rotary_dim": 2, "merged_qk": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ModelConfig(**wrong)
