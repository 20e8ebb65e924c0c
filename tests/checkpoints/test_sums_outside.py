"""Modules whose sums with the stream stand outside their layers have the same stream as those with layers that contain them."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import pandas as pd
import pytest
import torch
from torch import nn

from mechinterp import (
    TaskConfig,
    ablate,
    attribute_edges,
    classify,
    hook_module,
    name_algorithm,
    p_probe,
    patch_activations,
    predictor_of,
    probe,
    prune,
    write_report,
)
from mechinterp.icl.prompts import draw_prompts
from tests.checkpoints.test_query_position import made

TASK = TaskConfig(d_x=3, context_length=6)
WIDTH, LAYERS = 16, 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in "qkvo"
        )

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(((q @ k.mT / 3).softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Inside(nn.Module):
    """Each layer contains its sums."""

    def __init__(self):
        super().__init__()
        self.read_in, self.read_out = nn.Linear(TASK.d_x + 1, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.read_in(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.read_out(self.norm(x))

    def run(self, layer, x):
        return layer(x)


class InLoop(Inside):
    """The loop over layers has the sums, and a layer is never called."""

    def run(self, layer, x):
        x = layer.attention(layer.norm1(x)) + x
        return layer.mlp(layer.norm2(x)) + x


class InPlace(Inside):
    def run(self, layer, x):
        x += layer.attention(layer.norm1(x))
        x += layer.mlp(layer.norm2(x))
        return x


class ByTorch(Inside):
    """Sums by torch.add, with a copy between them."""

    def run(self, layer, x):
        x = torch.add(x, layer.attention(layer.norm1(x))).contiguous()
        return torch.add(x, layer.mlp(layer.norm2(x)), alpha=1)


class ReadBySum(Inside):
    """The read-out adds a constant, in a sum that decides the prediction, too."""

    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.ones(1))

    def forward(self, tokens):
        return super().forward(tokens) + self.constant


class LoopAndSum(ReadBySum, InLoop):
    pass


class Residual(nn.Module):
    def forward(self, written, x):
        return written + x


class ByModules(Inside):
    """A module of its own adds, as in x-transformers."""

    def __init__(self):
        super().__init__()
        self.residual = Residual()

    def run(self, layer, x):
        x = self.residual(layer.attention(layer.norm1(x)), x)
        return self.residual(layer.mlp(layer.norm2(x)), x)


class OneTwice(InLoop):
    """One layer runs three times."""

    def __init__(self):
        super().__init__()
        self.layers = self.layers[:1]

    def forward(self, tokens):
        x = self.read_in(tokens)
        for _ in range(LAYERS):
            x = self.run(self.layers[0], x)
        return self.read_out(self.norm(x))


class InsideTwice(OneTwice):
    def run(self, layer, x):
        return layer(x)


FORMS = [InLoop, InPlace, ByTorch, ByModules]
OF_STREAM = {
    "probe": probe,
    "p_probe": lambda hooked, prompts: p_probe({"model": hooked}, prompts),
    "prune": partial(prune, refit=True),
    "patch_activations": patch_activations,
    "attribute_edges": attribute_edges,
    "name_algorithm": name_algorithm,
    "ablate": partial(ablate, what="heads"),
}


@pytest.fixture
def prompts():
    return draw_prompts(TASK, 64, seed=0)


def pair(form, inside=Inside):
    """The same weights in both forms, hooked."""
    own, other = made(inside), form()
    other.load_state_dict(own.state_dict())
    return [hook_module(each, task=TASK) for each in (own, other)]


@pytest.mark.parametrize("form", FORMS)
def test_the_stream_is_that_of_layers_that_contain_their_sums(prompts, form):
    one, other = (predictor_of(each) for each in pair(form))
    for heads in ([], [(0, 1)], [(1, 0), (2, 1)]):
        own = one.streams(prompts, heads=heads)
        torch.testing.assert_close(other.streams(prompts, heads=heads), own, rtol=0, atol=0)


def test_a_sum_of_the_read_out_is_no_stream(prompts):
    one, other = (predictor_of(each) for each in pair(LoopAndSum, ReadBySum))
    torch.testing.assert_close(other.streams(prompts), one.streams(prompts), rtol=0, atol=0)


def test_layers_that_run_several_times_have_a_stream(prompts):
    one, other = (predictor_of(each) for each in pair(OneTwice, InsideTwice))
    assert one.hooked.n_layers == other.hooked.n_layers == LAYERS
    torch.testing.assert_close(other.streams(prompts), one.streams(prompts), rtol=0, atol=0)


@pytest.mark.parametrize("end", ["pre", "post"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_every_hook_point_of_the_stream_can_be_set(prompts, layer, end):
    """What a hook does to the stream does the same in both forms, whatever the length of the prompts."""

    def bend(stream, hook):
        return stream + torch.sin(3 * stream)

    one, other = pair(InPlace)
    longer = draw_prompts(replace(TASK, context_length=9), 5, seed=1)
    # A hook on heads makes calls of its own, which do not count.
    heads = ("blocks.0.attn.hook_z", lambda z, hook: (1.5 * z.flatten(2)).view_as(z))
    hooks = [heads, (f"blocks.{layer}.hook_resid_{end}", bend)]
    for given in (prompts, longer):
        bent, same = (
            each.hooked.read(each.hooked.run(each.hooked.inputs(given), hooks))
            for each in (one, other)
        )
        assert torch.equal(bent, same)
        assert not torch.allclose(bent, one.predict(given))


@pytest.mark.parametrize("analysis", OF_STREAM)
def test_analyses_give_the_same_numbers(prompts, analysis):
    one, other = (OF_STREAM[analysis](each, prompts).to_frame() for each in pair(InLoop))
    pd.testing.assert_frame_equal(one, other, rtol=1e-6, atol=1e-6)


def test_copies_and_pickles_keep_the_stream(prompts):
    _, hooked = pair(InLoop)
    own = predictor_of(hooked).streams(prompts)
    for copied in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        assert torch.equal(predictor_of(copied).streams(prompts), own)


class Joined(Inside):
    """The read-out gets the first stream beside the last one."""

    def __init__(self):
        super().__init__()
        self.read_out = nn.Linear(2 * WIDTH, 1)

    def forward(self, tokens):
        first = x = self.read_in(tokens)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.read_out(torch.cat([first, x], -1))


def test_what_passes_the_layers_by_is_not_taken_for_their_stream(prompts, tmp_path):
    hooked = hook_module(made(Joined), task=TASK)
    assert hooked.outputs == tuple(f"layers.{n}.attention.o_proj" for n in range(LAYERS))
    for name in ("probe", "prune", "p_probe"):
        with pytest.raises(ValueError, match="depends on more than"):
            OF_STREAM[name](hooked, prompts)
    assert ablate(hooked, prompts, what="heads").rise.any()
    assert name_algorithm(hooked, prompts).measured.path is None
    assert classify(hooked, n_prompts=64).label
    with pytest.raises(ValueError, match="depends on more than"):
        write_report(hooked, tmp_path / "asked", n_prompts=64, analyses=["probe"])


class Bounded(Joined):
    """Fails on tokens that no prompt has."""

    def forward(self, tokens):
        assert not tokens[:, -1, -1].any(), "the query has no y"
        return super().forward(tokens)


def test_a_module_that_fails_on_other_inputs_is_hooked(prompts):
    one, other = (hook_module(made(form), task=TASK) for form in (Joined, Bounded))
    assert torch.equal(one.predict(prompts), other.predict(prompts))
