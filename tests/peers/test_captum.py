"""captum attributes to our hook points as they are."""

from collections.abc import Callable

import pytest
import torch

from mechinterp.models.hooked.masks import mask_heads
from mechinterp.models.hooked.transformer import ICLTransformer

attr = pytest.importorskip("captum.attr", reason="`make test-peers` brings captum")


def test_example_attributes_to_heads(run_example: Callable[[str], dict]):
    names = run_example("captum")
    assert names["fall"].shape == (256, 4)
    # The page compares head by head; here: not with a mask that does nothing.
    assert (names["fall"].abs().amax(0) > 1e-4).all()


@pytest.mark.parametrize("layer", [0, 1])
def test_ablation_in_each_of_two_layers(
    layer: int, deep_model: ICLTransformer, tokens: torch.Tensor
):
    cfg = deep_model.cfg
    shape = (1, tokens.shape[1], cfg.n_heads, cfg.d_head)
    heads = torch.arange(cfg.n_heads)[None, None, :, None].expand(shape)
    hook_z = deep_model.blocks[layer].attn.hook_z
    ablation = attr.LayerFeatureAblation(lambda tokens: deep_model(tokens)[:, -1], hook_z)
    with torch.no_grad():
        fall = ablation.attribute(tokens, target=1, layer_mask=heads)[:, 0, :, 0]
        assert (fall.abs().amax(0) > 1e-3).all()
        full = deep_model(tokens)[:, -1, 1]
        for head in range(cfg.n_heads):
            masked = deep_model.run_with_hooks(tokens, fwd_hooks=mask_heads([(layer, head)]))
            torch.testing.assert_close(
                fall[:, head], full - masked[:, -1, 1], rtol=1e-12, atol=1e-12
            )
