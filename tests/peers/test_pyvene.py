"""pyvene intervenes at our hook points as they are."""

from collections.abc import Callable

import pytest
import torch

from mechinterp.models.hooked.transformer import ICLTransformer

pyvene = pytest.importorskip("pyvene", reason="`make test-peers` brings pyvene")


def test_example_masks_a_head(run_example: Callable[[str], dict], assert_masked: Callable):
    assert_masked(run_example("pyvene"))


def test_heads_of_two_layers(
    deep_model: ICLTransformer, tokens: torch.Tensor, masked_in_both_layers: torch.Tensor
):
    def masking(head: int) -> Callable:
        return lambda z, source: z.index_fill(2, torch.tensor([head]), 0.0)

    deep_model.config = deep_model.cfg
    intervenable = pyvene.IntervenableModel(
        [
            {"component": "blocks[0].attn.hook_z.output", "intervention": masking(2)},
            {"component": "blocks[1].attn.hook_z.output", "intervention": masking(0)},
        ],
        model=deep_model,
    )
    with torch.no_grad():
        _, masked = intervenable({"input": tokens})
    torch.testing.assert_close(masked, masked_in_both_layers, rtol=1e-12, atol=1e-12)


def test_interchange_takes_the_activation_of_the_source(
    deep_model: ICLTransformer, tokens: torch.Tensor
):
    source = tokens.flip(0)
    with torch.no_grad():
        _, cache = deep_model.run_with_cache(source)
        take = ("blocks.0.attn.hook_z", lambda z, hook: cache["z", 0])
        expected = deep_model.run_with_hooks(tokens, fwd_hooks=[take])
        assert (deep_model(tokens) - expected).abs().max() > 0.1

    deep_model.config = deep_model.cfg
    intervenable = pyvene.IntervenableModel(
        {"component": "blocks[0].attn.hook_z.output", "intervention": lambda base, source: source},
        model=deep_model,
    )
    with torch.no_grad():
        _, patched = intervenable({"input": tokens}, [{"input": source}])
    torch.testing.assert_close(patched, expected, rtol=1e-12, atol=1e-12)
