"""The stream of a hooked module is read where its prediction is read, wherever that is."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    hook_module,
    name_algorithm,
    p_probe,
    patch_activations,
    predictor_of,
    probe,
    prune,
)
from mechinterp.analysis.ablation.pruning_rules import best_head_first
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.hooked.query_position import query_positions
from tests.checkpoints.test_hooked_modules import Split
from tests.models.test_layered_models import garg

TASK = TaskConfig(d_x=3, context_length=6)
PAIRS = TASK.context_length + 1
WIDTH, ROUNDING = 16, {"rtol": 1e-5, "atol": 1e-5}


class Encoder(nn.Module):
    """Two of torch's layers, which look both ways, behind `before` copies of the first token and before `after` of them."""

    def __init__(self, before: int = 0, after: int = 0):
        super().__init__()
        self.before, self.after, self.read_in = before, after, nn.Linear(TASK.d_x + 1, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True) for _ in "12")
        )
        self.read_out = nn.Linear(WIDTH, 1)

    def forward(self, tokens):
        first = tokens[:, :1]
        padded = [first.repeat(1, self.before, 1), tokens, first.repeat(1, self.after, 1)]
        return self.read_out(self.layers(self.read_in(torch.cat(padded, dim=1))))


class Pooled(Encoder):
    """The mean over positions."""

    def forward(self, tokens):
        return super().forward(tokens).mean(1)


@pytest.fixture
def prompts():
    return draw_prompts(TASK, 128, seed=0)


def made(module: type, *sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return module(*sizes).eval().requires_grad_(False)


def last_prediction(output):
    return output[:, -1:]


def split(**settings):
    """A GPT-2 that reads x_1, y_1, ..., x_query, 0 and predicts at every x, with hooks."""
    module = Split(garg(n_layer=2, n_head=2).requires_grad_(False))
    return hook_module(module, read=last_prediction, task=TASK, **settings)


def own_prediction(hooked):
    """The target of a probe: at the query what the model itself predicts."""

    def target(prompts):
        rows = torch.cat([prompts.y, hooked.predict(prompts)[:, None]], dim=1)
        return rows, rows

    return target


def probe_of(hooked, prompts, target):
    """Probe of one target at the query."""
    return probe(hooked, prompts, targets={"own": target}).probes["own"]


def noted(module: nn.Module, inside: nn.Module, tokens):
    """What leaves a module inside another one."""
    outputs = []
    handle = inside.register_forward_hook(lambda _, args, output: outputs.append(output))
    module(tokens)
    handle.remove()
    return outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]


def test_a_module_that_interleaves_inside_is_read_at_its_last_x(prompts):
    hooked = split()
    # x_1, y_1, ..., x_query, 0: two positions for each pair, and the last but one is the query's.
    assert query_positions(hooked.hooked, prompts) == [2 * PAIRS - 2] * 3
    module = Split(garg(n_layer=2, n_head=2))
    streams = predictor_of(hooked).streams(prompts)
    for layer, block in enumerate(module.module._backbone.h):
        with torch.no_grad():
            own = noted(module, block, prompts.tokens)
        assert own.shape[1] == 2 * PAIRS
        torch.testing.assert_close(streams[layer + 1, :, 0], own[:, -2], **ROUNDING)


@pytest.mark.slow
def test_what_looks_into_its_stream_looks_there(prompts):
    hooked, wrong = split(), split(position=-1)
    target = own_prediction(hooked)
    right, end = (probe_of(each, prompts, target).r2[-1, 0] for each in (hooked, wrong))
    # What is left is the last norm; at the end of the stream is the token of zeros.
    assert right > 0.99
    assert end < right - 10 * probe_of(hooked, prompts, target).r2_sem[-1, 0]
    run = predictor_of(hooked).query_streams(prompts, 1)
    assert run.shape == (len(prompts), PAIRS, WIDTH)
    torch.testing.assert_close(run[:, -1], predictor_of(hooked).streams(prompts)[1, :, 0])
    assert p_probe(hooked, prompts).risk[2, 1] != p_probe(wrong, prompts).risk[2, 1]
    refitted = [prune(each, prompts, refit=True).refit.risk for each in (hooked, wrong)]
    assert refitted[0] != refitted[1]


def test_all_positions_of_its_stream_are_patched(prompts):
    hooked = split()
    metric = lambda predictions, given: predictions[:, 0]  # noqa: E731
    patched = patch_activations(hooked, prompts[:64], prompts[64:], metric=metric)
    assert patched.effect.shape == (2, 2 * PAIRS)
    # GPT-2 looks back only: the token of zeros after the query's x changes nothing, the query's x does.
    assert np.all(patched.effect[:, -1] == 0)
    assert np.all(patched.effect_sem[:, -2] > 0)


def test_positions_of_pairs_are_refused_where_the_stream_has_others(prompts):
    with pytest.raises(ValueError, match=f"the model must have {PAIRS} positions .*, got 14"):
        probe(split(), prompts, targets="y", positions=[0])
    with pytest.raises(ValueError, match=r"other than the query's, -1, .* got it at 12"):
        predictor_of(split()).streams(prompts, positions=[-2])


@pytest.mark.parametrize(
    ("before", "after", "place"),
    [(0, 0, -1), (2, 0, -1), (0, 3, PAIRS - 1), (2, 3, PAIRS + 1), (1, 1, PAIRS)],
)
def test_an_encoder_is_read_where_its_output_is(prompts, before, after, place):
    read_at = before + PAIRS - 1
    hooked = hook_module(
        made(Encoder, before, after), read=lambda output: output[:, read_at], task=TASK
    )
    assert query_positions(hooked.hooked, prompts) == [place] * 3
    probes = probe_of(hooked, prompts, own_prediction(hooked))
    assert probes.r2[-1, 0] > 1 - 1e-6  # a linear function of the stream


def test_a_pooling_module_of_other_positions_is_asked_for_one(prompts):
    pooled = made(Pooled, 1, 2)
    hooked = hook_module(pooled, task=TASK)
    message = f"position must be given to hook_module: the stream has {PAIRS + 3} positions where the input has {PAIRS}, and"
    for analysis in (probe, p_probe, partial(prune, refit=True)):
        with pytest.raises(ValueError, match=message):
            analysis(hooked, prompts)
    stated = hook_module(pooled, task=TASK, position=-3)
    assert query_positions(stated.hooked, prompts) == [PAIRS] * 3
    with pytest.raises(ValueError, match=f"position must lie in 0 to {PAIRS + 2}, got 10"):
        hook_module(pooled, task=TASK, position=PAIRS + 3)


def test_a_mean_of_positions_is_read_at_none_of_them_alone(prompts):
    read = lambda output: output[:, [0, PAIRS - 1]].mean(1)  # noqa: E731
    hooked = hook_module(made(Encoder, 1), read=read, task=TASK)
    with pytest.raises(ValueError, match="not read at one of them alone"):
        query_positions(hooked.hooked, prompts)


class ToResponse(nn.Module):
    """One layer of attention, its output projection to d_y."""

    def __init__(self):
        super().__init__()
        d_model, self.n_heads = TASK.d_x + 1, 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d_model, d_model) for _ in "123")
        self.o_proj = nn.Linear(d_model, 1)

    def forward(self, tokens):
        q, k, v = (
            part(tokens).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj((torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(-2))


class AtQuery(ToResponse):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1]


@pytest.mark.parametrize("module", [ToResponse, AtQuery])
def test_a_layer_that_ends_in_the_response_is_probed_and_pruned(prompts, module):
    hooked = hook_module(made(module), task=TASK)
    streams = predictor_of(hooked).streams(prompts)
    # Before the layer the token, after it the prediction and zeros behind it.
    assert torch.equal(streams[0, :, 0], prompts.tokens[:, -1])
    assert torch.equal(streams[1, :, 0, :1], hooked.predict(prompts))
    assert not streams[1, :, 0, 1:].any()
    probes = probe_of(hooked, prompts, own_prediction(hooked))
    assert probes.r2[1, 0] > 1 - 1e-6 > probes.r2[0, 0]
    assert prune(hooked, prompts, rule=best_head_first, refit=True).refit.risk > 0
    assert name_algorithm(hooked, prompts).n_prompts == len(prompts)
