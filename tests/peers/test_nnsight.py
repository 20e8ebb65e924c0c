"""nnsight reads and edits our hook points as they are."""

from collections.abc import Callable

import pytest
import torch

from mechinterp.models.hooked.transformer import ICLTransformer

nnsight = pytest.importorskip("nnsight", reason="`make test-peers` brings nnsight")


def test_example_masks_a_head(run_example: Callable[[str], dict], assert_masked: Callable):
    assert_masked(run_example("nnsight"))


def test_heads_of_two_layers(
    deep_model: ICLTransformer, tokens: torch.Tensor, masked_in_both_layers: torch.Tensor
):
    traced = nnsight.NNsight(deep_model)
    with torch.no_grad(), traced.trace(tokens):
        z = traced.blocks[0].attn.hook_z.output.clone()
        z[:, :, 2] = 0
        traced.blocks[0].attn.hook_z.output = z
        z = traced.blocks[1].attn.hook_z.output.clone()
        z[:, :, 0] = 0
        traced.blocks[1].attn.hook_z.output = z
        masked = traced.output.save()
    torch.testing.assert_close(masked, masked_in_both_layers, rtol=1e-12, atol=1e-12)


def test_reads_what_the_cache_holds(deep_model: ICLTransformer, tokens: torch.Tensor):
    with torch.no_grad():
        _, cache = deep_model.run_with_cache(tokens)
    traced = nnsight.NNsight(deep_model)
    with torch.no_grad(), traced.trace(tokens):
        scores = traced.blocks[1].attn.hook_attn_scores.output.save()
        pattern = traced.blocks[1].attn.hook_pattern.output.save()
    torch.testing.assert_close(scores, cache["attn_scores", 1], rtol=0, atol=0)
    torch.testing.assert_close(pattern, cache["pattern", 1], rtol=0, atol=0)
