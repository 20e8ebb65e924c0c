"""The adapter: a regression GPT-2 in a Bridge predicts as its parts do, and masks as zeroed weights do."""

import copy

import pytest
import torch
from torch import nn

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.adapter import as_predictor, gpt2_predictor, z_name
from mechinterp.models.layered import interleaved


@pytest.fixture
def prompts():
    task = TaskConfig(d_x=4, context_length=9)
    return sample_prompts(task, 16, generator=generator_for(0, "eval", 0))


@pytest.fixture
def parts():
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        **{"vocab_size": 1, "n_positions": 19, "n_embd": 8, "n_layer": 2, "n_head": 2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3},
    )
    torch.manual_seed(0)
    return GPT2Model(config).eval(), nn.Linear(4, 8), nn.Linear(8, 1)


def plain(parts, prompts):
    """Garg's forward pass, without any hook."""
    backbone, read_in, read_out = parts
    with torch.no_grad():
        stream = backbone(inputs_embeds=read_in(interleaved(prompts))).last_hidden_state
        return read_out(stream)[:, ::2][:, -1]


def test_a_bridge_predicts_as_its_parts(parts, prompts):
    expected = plain(copy.deepcopy(parts), prompts)
    predictor = gpt2_predictor(*parts)
    with torch.no_grad():
        found = predictor.predict(prompts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (predictor.n_layers, predictor.n_heads) == (2, 2)
    assert as_predictor(predictor) is predictor


def test_a_bridge_masks_as_zeroed_weights(parts, prompts):
    without = copy.deepcopy(parts)
    with torch.no_grad():
        without[0].h[1].attn.c_proj.weight[4:] = 0  # the rows of head 1
    predictor = gpt2_predictor(*parts)

    def mask(z, hook):
        return torch.cat([z[:, :, :1], 0 * z[:, :, 1:]], dim=2)

    with torch.no_grad(), predictor.model.hooks(fwd_hooks=[(z_name(1), mask)]):
        found = predictor.predict(prompts)
    torch.testing.assert_close(found, plain(without, prompts), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert not torch.allclose(found, predictor.predict(prompts), atol=1e-3)


def test_prompts_without_room_are_refused(parts):
    task = TaskConfig(d_x=4, context_length=10)
    long = sample_prompts(task, 2, generator=generator_for(0, "eval", 0))
    with pytest.raises(ValueError, match="context_length must be <= 9"):
        gpt2_predictor(*parts).predict(long)
