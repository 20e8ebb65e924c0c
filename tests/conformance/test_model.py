"""Checks of a hooked model by itself: masks, hooks, caches, ablations, and decompositions that must add up."""

from functools import partial

import pytest
import torch
from torch import Tensor
from transformer_lens import ActivationCache
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.transformer import ICLTransformer
from tests.conformance.conftest import (
    assert_close,
    replace_at,
    require_sum,
    sample_inputs,
    switched_on,
)

SETTINGS = {
    *("n_layers", "n_heads", "d_model", "d_vocab", "n_ctx", "device", "dtype", "attn_only"),
    *("normalization_type", "n_key_value_heads"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"),
}
"""What TransformerLens' tools read from `model.cfg`."""


def read_out(model: ICLTransformer, stream: Tensor) -> Tensor:
    """Output of a model for its last stream: last norm, if there is one, then W_U and b_U."""
    normed = model.ln_final(stream) if model.cfg.model.final_norm else stream
    return normed @ model.W_U + model.b_U


def test_caches_have_the_axes_and_filters_of_hooked_transformer(model: ICLTransformer):
    inputs, _ = sample_inputs(model)
    cfg, n_pos = model.cfg, inputs.shape[1]
    assert {name for name in SETTINGS if hasattr(cfg, name)} == SETTINGS
    logits, cache = model.run_with_cache(inputs)
    assert isinstance(cache, ActivationCache)
    assert torch.equal(logits, model(inputs))
    for name in "qkvz":
        assert cache[name, 0].shape[:-1] == (3, n_pos, cfg.n_heads)
    assert cache["pattern", 0].shape == (3, cfg.n_heads, n_pos, n_pos)
    names = {f"blocks.{layer}.attn.hook_z" for layer in range(cfg.n_layers)}
    _, one = model.run_with_cache(inputs[:1], names_filter=list(names), remove_batch_dim=True)
    assert set(one.keys()) == names
    assert one["z", 0].ndim == 3


def test_a_hook_is_gone_after_an_exception(model: ICLTransformer):
    def stop(values: Tensor, hook: HookPoint) -> None:
        raise InterruptedError

    inputs, _ = sample_inputs(model)
    with pytest.raises(InterruptedError):
        model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.hook_resid_pre", stop)])
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_each_position_reads_what_it_may(model: ICLTransformer):
    """Earlier positions, and itself if `attend_to_self`; with `context_only` all but the query."""
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    both_sides, itself = model.cfg.model.context_only, model.cfg.model.attend_to_self
    for layer in range(model.cfg.n_layers):
        pattern = cache["pattern", layer]
        if both_sides:
            assert itself or not pattern[..., -1].any()
        else:
            assert not pattern.triu(1).any()
            assert itself or not pattern.diagonal(dim1=-2, dim2=-1).any()
        assert pattern[..., -1, :-1].any()
        assert bool(pattern[..., -1, -1].any()) == itself
    if not (both_sides and itself):
        later = inputs.clone()
        later[:, -1] += 1
        assert_close(model(later)[:, :-1], logits[:, :-1])


def test_an_edit_of_the_scores_changes_the_pattern_and_an_empty_row_is_no_nan(
    model: ICLTransformer,
):
    inputs, _ = sample_inputs(model)
    caches = {}
    for rows in (slice(1, None), slice(None)):
        mask = replace_at((..., rows, slice(0, 2 if rows.start is None else 1)), -torch.inf)
        with model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", mask)]):
            _, caches[rows.start] = model.run_with_cache(inputs)
    assert not caches[1]["pattern", 0][..., 1:, 0].any()
    assert all(
        torch.isfinite(caches[None]["z", layer]).all() for layer in range(model.cfg.n_layers)
    )


def test_gradients_are_finite_also_at_the_scores_of_the_first_row(model: ICLTransformer):
    inputs, _ = sample_inputs(model)
    gradients: dict[str, Tensor] = {}

    def keep(gradient: Tensor, hook: HookPoint) -> None:
        gradients[hook.name] = gradient.detach().clone()

    names = [f"blocks.0.attn.hook_{name}" for name in ("attn_scores", "pattern")]
    with model.hooks(bwd_hooks=[(name, keep) for name in names]):
        model(inputs.requires_grad_()).square().sum().backward()
    named = {"inputs": inputs, **dict(model.named_parameters())}
    gradients |= {name: each.grad for name, each in named.items() if each.grad is not None}
    assert {*names, "inputs"} < gradients.keys()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_a_head_is_masked_by_its_z_its_result_or_its_weights(model: ICLTransformer):
    inputs, _ = sample_inputs(model)
    full, moved = model(inputs), 0.0
    for layer in range(model.cfg.n_layers):
        W_O = model.blocks[layer].attn.W_O
        for head in range(model.cfg.n_heads):
            hook = replace_at((slice(None), slice(None), head), 0.0)
            at_z = model.run_with_hooks(inputs, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", hook)])
            with switched_on(model, "use_attn_result"):
                hooks = [(f"blocks.{layer}.attn.hook_result", hook)]
                assert_close(model.run_with_hooks(inputs, fwd_hooks=hooks), at_z)
            with torch.no_grad():
                kept = W_O[head].clone()
                W_O[head] = 0
                assert_close(model(inputs), at_z)
                W_O[head] = kept
            moved = max(moved, (at_z - full).abs().max().item())
    assert moved > 0


def test_parts_of_the_stream_add_up_to_it(model: ICLTransformer):
    require_sum(model)
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    stream = cache.accumulated_resid()[-1]
    decompose = partial(cache.get_full_resid_decomposition, expand_neurons=False)
    for parts in (cache.decompose_resid().sum(0), stream, decompose().sum(0)):
        assert_close(read_out(model, parts), logits)
    projected = decompose(project_output_onto=model.W_U)
    assert_close(projected.sum(0), stream @ model.W_U)
    assert_close(cache.logit_lens(positions=None).values[-1], logits)


def test_heads_and_the_remainder_add_up_to_the_output(model: ICLTransformer):
    """With a last norm, attributions are those of the stream that is centred and divided by the norm's scale."""
    require_sum(model)
    inputs, _ = sample_inputs(model)
    logits, cache = model.run_with_cache(inputs)
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels == [*model.all_head_labels, "remainder"]
    stream = heads.sum(0)
    assert_close(read_out(model, stream), logits)
    if model.cfg.normalization_type is None:
        expected = logits[..., 0] - model.b_U[0]
    elif not model.cfg.model.final_norm:
        pytest.skip("logit_attrs divides by the scale of a last norm, of which there is none")
    else:
        centred = stream - stream.mean(-1, keepdim=True)
        expected = centred / cache["ln_final.hook_scale"] @ model.W_U[:, 0]
    assert_close(cache.logit_attrs(heads, tokens=0).sum(0), expected)
