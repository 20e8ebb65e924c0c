"""Streams and attention weights of hooked x-transformers are those that the library itself returns."""

import pytest
import torch

from mechinterp import TaskConfig, hook_module, predictor_of, probe
from mechinterp.icl.prompts import draw_prompts

library = pytest.importorskip("x_transformers", reason="`make test-peers` brings x-transformers")
TASK = TaskConfig(d_x=5, context_length=20)
VARIANTS = {
    "encoder": {},
    "rotary": {"rotary_pos_emb": True},
    "norms and gates": {"use_rmsnorm": True, "attn_qk_norm": True, "ff_glu": True},
    "gated values": {"attn_gate_values": True},
    "one key and value head": {"attn_kv_heads": 1},
}


def made(**settings):
    layers = library.Encoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
    return library.ContinuousTransformerWrapper(
        dim_in=TASK.d_x + 1,
        dim_out=1,
        max_seq_len=64,
        use_abs_pos_emb=False,
        attn_layers=layers,
    ).eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_streams_and_patterns_are_the_library_s_own(variant: str):
    model = made(**VARIANTS[variant])
    hooked = hook_module(model, n_heads=4, task=TASK)
    prompts = draw_prompts(TASK, 16, seed=0)
    output, own = model(prompts.tokens, return_intermediates=True)
    predictions, cache = hooked.model.run_with_cache(prompts.tokens)
    assert torch.equal(predictions, output)
    # The library lists the stream before each sublayer and after the last one.
    ours = [cache[f"blocks.{n}.hook_resid_pre"] for n in (0, 1)] + [
        cache["blocks.1.hook_resid_post"]
    ]
    torch.testing.assert_close(ours, own.layer_hiddens[::2], rtol=0, atol=1e-6)
    for layer, attention in enumerate(own.attn_intermediates):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        torch.testing.assert_close(pattern, attention.post_softmax_attn, rtol=0, atol=1e-6)
    streams = predictor_of(hooked).streams(prompts)[:, :, 0]
    torch.testing.assert_close(
        streams, torch.stack(own.layer_hiddens[::2])[:, :, -1], rtol=0, atol=1e-6
    )
    read = model.project_out(model.attn_layers.final_norm(streams[-1]))
    torch.testing.assert_close(read, hooked.predict(prompts), rtol=0, atol=1e-6)


def test_the_stream_is_probed():
    prompts = draw_prompts(TASK, 64, seed=0)
    found = probe(hook_module(made(), n_heads=4, task=TASK), prompts)
    assert len(found.to_frame()["layer"].unique()) == 3
