"""Layered models with hooks compute what the libraries' modules do, masked heads too, and what a Bridge does."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from mechinterp.analysis.gates import learn_gates
from mechinterp.analysis.heads import ablate_heads
from mechinterp.analysis.masking import masked, masked_predictions
from mechinterp.analysis.p_probing import query_features
from mechinterp.analysis.probes import streams
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.adapter import HookedPredictor, as_predictor, gpt2_predictor
from mechinterp.models.hooked_layers import layered_predictor
from mechinterp.models.layered import LayeredModel, LayerLaw, encoder_model, gpt2_model, interleaved
from tests.models.test_layered_models import TASK, GargModel, encoder, garg, our_names

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def some_prompts() -> Prompts:
    return sample_prompts(TASK, 12, generator=generator_for(0, "eval", 0), dtype=torch.float64)


def gpt2(activation: str = "gelu_new") -> tuple[GargModel, LayeredModel]:
    published = garg().double()
    if activation == "relu":
        for block in published._backbone.h:
            block.mlp.act = nn.ReLU()
    return published, gpt2_model(our_names(published), LayerLaw(4, activation))


@pytest.mark.parametrize("activation", ["gelu_new", "relu"])
def test_a_gpt2_with_hooks_is_the_published_code(activation: str, some_prompts: Prompts):
    published, model = gpt2(activation)
    expected = published.at_query(some_prompts)
    assert expected.std() > 0.1
    predictor = layered_predictor(model)
    torch.testing.assert_close(predictor.predict(some_prompts), expected, **EXACT)
    torch.testing.assert_close(model.predict(some_prompts), expected, **EXACT)


@pytest.mark.parametrize("attend_to_self", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_with_hooks_is_torchs(
    norm_first: bool, attend_to_self: bool, some_prompts: Prompts
):
    stack = encoder(4, norm_first=norm_first).double()
    barred = torch.zeros(7, 7, dtype=torch.float64)
    barred[:, -1] = 0 if attend_to_self else -torch.inf
    with torch.no_grad():
        expected = stack(some_prompts.tokens, mask=barred)[:, -1, 3:]
    law = LayerLaw(2, "relu", norm_first=norm_first, attend_to_self=attend_to_self)
    model = encoder_model(stack.state_dict(), law, d_x=3, d_y=1)
    assert expected.std() > 0.01
    torch.testing.assert_close(layered_predictor(model).predict(some_prompts), expected, **EXACT)
    assert_masks_agree(model, some_prompts)


def assert_masks_agree(model: LayeredModel, prompts: Prompts) -> None:
    """Hooks on z, and the model's own masks."""
    full, each = model.predict_each_masked(prompts)
    heads = [(layer, head) for layer in range(model.n_layers) for head in range(model.n_heads)]
    masks = [[], *([head] for head in heads), heads[1:]]
    found = masked_predictions(layered_predictor(model), prompts, masks)
    torch.testing.assert_close(found[0], full, **EXACT)
    torch.testing.assert_close(found[1:-1], each.flatten(1, 2).transpose(0, 1), **EXACT)
    several = model.predict(prompts, masked_heads=heads[1:])
    torch.testing.assert_close(found[-1], several, **EXACT)
    assert (found[1:] - found[0]).abs().amax((1, 2)).min() > 1e-3


def test_a_gpt2s_hooks_mask_as_its_own_masks(some_prompts: Prompts):
    assert_masks_agree(gpt2()[1], some_prompts)


def bridge_of(published: GargModel) -> HookedPredictor:
    parts = copy.deepcopy(published)
    return gpt2_predictor(parts._backbone, parts._read_in, parts._read_out)


def test_a_bridge_says_the_same(some_prompts: Prompts):
    published, model = gpt2()
    bridge, hooked = bridge_of(published), layered_predictor(model)
    masks = [[], [(0, 2)], [(1, 0), (2, 3)]]
    for method in ("zero", "mean", "resample"):
        expected = masked_predictions(bridge, some_prompts, masks, method=method)
        found = masked_predictions(hooked, some_prompts, masks, method=method)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    places = [-1, -2, -13]
    expected = torch.from_numpy(streams(bridge, some_prompts, positions=places))
    found = torch.from_numpy(streams(hooked, some_prompts, positions=places))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    rise = ablate_heads(hooked, some_prompts).rise
    assert rise == pytest.approx(ablate_heads(bridge, some_prompts).rise, rel=1e-6, abs=1e-9)


def test_covariates_run_as_the_query_see_the_whole_context(some_prompts: Prompts):
    published, model = gpt2()
    found = query_features(layered_predictor(model), some_prompts, layer=1)
    assert found.shape == (12, 7, 16)
    tokens = interleaved(some_prompts)
    tokens[:, -1] = some_prompts.x[:, 2]
    backbone = published._backbone
    positions = backbone.wpe(torch.arange(13))
    with torch.no_grad():
        stream = backbone.h[0](published._read_in(tokens) + positions, attention_mask=causal(13))
    torch.testing.assert_close(found[:, 2], stream[:, -1], **EXACT)
    at_start = query_features(layered_predictor(model), some_prompts, layer=0)
    with torch.no_grad():
        expected = published._read_in(some_prompts.x_query) + positions[-1]
    torch.testing.assert_close(at_start[:, -1], expected, **EXACT)


def causal(n: int) -> torch.Tensor:
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)[None, None]


def test_layers_start_and_stop_where_they_are_told(some_prompts: Prompts):
    predictor = layered_predictor(gpt2()[1])
    model, stream = predictor.model, predictor.embed(some_prompts)
    assert torch.equal(model(stream, stop_at_layer=0), stream)
    whole, cache = model.run_with_cache(stream)
    between = model(stream, stop_at_layer=2)
    assert torch.equal(between, cache["blocks.2.hook_resid_pre"])
    assert torch.equal(between, cache["blocks.1.hook_resid_post"])
    assert torch.equal(model(between, start_at_layer=2), whole)
    assert cache["blocks.2.attn.hook_z"].shape == (12, 13, 4, 4)
    assert (predictor.adds_up, as_predictor(predictor)) == (False, predictor)


def test_hooks_change_neither_the_callers_stream_nor_what_comes_after(some_prompts: Prompts):
    predictor = layered_predictor(gpt2()[1])
    stream = predictor.embed(some_prompts)
    kept, before = stream.clone(), predictor.predict(some_prompts)

    def erase(resid: torch.Tensor, hook: object) -> torch.Tensor:
        return resid.zero_()

    with predictor.model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", erase)]):
        assert not torch.equal(predictor.read(predictor.model(stream)), before)
    assert torch.equal(stream, kept)
    with masked(predictor, [(0, 0), (2, 1)]):
        inside = predictor.predict(some_prompts)
    assert (inside - before).abs().max() > 1e-3
    assert torch.equal(predictor.predict(some_prompts), before)


def test_gates_are_learned_through_the_layers(some_prompts: Prompts):
    gates = learn_gates(layered_predictor(gpt2()[1]), some_prompts, steps=2)
    assert gates.to_frame().shape[0] == 12


def test_prompts_that_do_not_fit_are_refused():
    predictor = layered_predictor(gpt2()[1])
    for changes, words in (
        ({"d_x": 2}, r"must be the model's, \(3, 1\), got \(2, 1\)"),
        ({"context_length": 10}, "context_length must be <= 9, as 2"),
    ):
        task = replace(TASK, **changes)
        with pytest.raises(ValueError, match=words):
            predictor.predict(sample_prompts(task, 2, generator=generator_for(0, "eval", 0)))
