"""Circuits of edges against a plain forward pass with one loop per head, and against patches of single edges."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.patching.edge_circuits import AXES, _areas, circuit_output, faithfulness
from mechinterp.analysis.patching.edges import COMPONENTS, attribute_edges
from mechinterp.analysis.patching.pairing import Pair, clean_and_corrupted
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import assert_close_to_rounding

TASK = TaskConfig(d_x=3, context_length=5)
N_LAYERS, N_HEADS = 3, 2


def random_model(**architecture: object) -> ICLTransformer:
    config = ModelConfig(n_layers=N_LAYERS, n_heads=N_HEADS, d_head=3, **architecture)
    model = ICLTransformer(config, d_x=3, d_y=1).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6, generator=generator_for(3, "init", 0))
    return model


def pair_of(model: ICLTransformer) -> Pair:
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=6, seed=0)
    return Pair.of(predictor_of(model).hooked, *prompts, None)


def outputs(model: ICLTransformer, tokens: Tensor, kept: np.ndarray, other: list | None) -> list:
    """Output of each head, one at a time; edges that are not kept carry `other`."""
    n = tokens.shape[1]
    every: list[list[Tensor]] = []
    for layer in range(N_LAYERS):
        every.append([])
        for head in range(N_HEADS):
            read = []
            for index in range(3):
                stream = tokens
                for earlier in range(layer):
                    for source in range(N_HEADS):
                        own = kept[index, earlier, source, layer, head]
                        stream = stream + (every if own else other)[earlier][source]
                read.append(stream)
            q, k, v = (
                stream @ getattr(model, f"W_{name}")[layer, head]
                for stream, name in zip(read, "QKV", strict=True)
            )
            scores = q @ k.mT / 3**0.5
            scores = scores.masked_fill(~torch.ones(n, n).tril(-1).bool(), -torch.inf)
            pattern = scores.softmax(-1).nan_to_num()
            every[-1].append(pattern @ v @ model.W_O[layer, head])
    return every


def test_a_circuit_is_a_plain_forward_pass_over_its_edges():
    model = random_model()
    pair = pair_of(model)
    shape = (3, N_LAYERS, N_HEADS, N_LAYERS, N_HEADS)
    everything = np.ones(shape, dtype=bool)
    kept = np.random.default_rng(0).random(shape) < 0.5
    with torch.no_grad():
        corrupted = outputs(model, pair.corrupted, everything, None)
        for circuit in (kept, everything, ~everything):
            every = outputs(model, pair.clean, circuit, corrupted)
            stream = pair.clean + sum(sum(heads) for heads in every)
            found = circuit_output(pair, circuit)
            assert_close_to_rounding(found[:, -1], stream[:, -1, 3:])
        assert_close_to_rounding(circuit_output(pair, everything), model(pair.clean))
    assert not model.cfg.use_split_qkv_input


@pytest.mark.parametrize("architecture", [{}, {"norm": "before", "d_mlp": 8, "biases": True}])
def test_a_circuit_without_one_edge_is_the_patch_of_that_edge(architecture: dict):
    model = random_model(context_only=True, **architecture)
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=6, seed=0)
    hooked = predictor_of(model).hooked
    pair = Pair.of(hooked, *prompts, None)
    # The roles of the prompts are exchanged: everything is clean, and one edge is corrupted.
    edges = attribute_edges(model, *reversed(prompts), metric=lambda output: output[:, -1, 0])
    for row in edges.to_frame().iloc[::7].itertuples():
        kept = np.ones((3, N_LAYERS, N_HEADS, N_LAYERS, N_HEADS), dtype=bool)
        place = (row.layer, row.head, row.later_layer, row.later_head)
        kept[(COMPONENTS.index(row.input), *place)] = False
        change = (circuit_output(pair, kept) - model(pair.clean))[:, -1, 0].mean()
        assert change.item() == pytest.approx(row.patched, abs=1e-10)


def test_a_good_order_is_more_faithful_than_its_reverse():
    model = random_model()
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=64, seed=0)
    frame = attribute_edges(model, *prompts).to_frame()
    good, bad = (faithfulness(model, each, *prompts) for each in (frame, frame[::-1]))
    assert (good.faithfulness[[0, -1]] == [0, 1]).all()
    assert good.cmd + 2 * good.cmd_sem < bad.cmd - 2 * bad.cmd_sem
    assert good.n_edges[-1] == 3 * N_HEADS**2 * 3
    assert good.to_frame().shape == (len(good.n_edges), 5)
    assert good.distance[-1] == pytest.approx(0, abs=1e-12)


def test_areas_of_straight_lines():
    """CPR is the area under f, CMD that of |1 - f|: f = k / n gives 1/2 for both, a line up to 3/2 and down to 1 more."""
    assert _areas(np.array([0, 0.25, 1]), np.array([0, 1, 4])) == pytest.approx((0.5, 0.5))
    assert _areas(np.array([0, 1.5, 1]), np.array([0, 1, 2])) == pytest.approx((1, 0.375 + 0.125))


def test_rankings_that_are_not_of_the_model_are_refused():
    model = random_model()
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=6, seed=0)
    frame = attribute_edges(model, *prompts).to_frame()
    for wrong in (frame[1:], frame.assign(head=0), frame.assign(input="mlp")):
        with pytest.raises(ValueError, match="each of the 36 edges"):
            faithfulness(model, wrong, *prompts)
    with pytest.raises(ValueError, match="column later_head"):
        faithfulness(model, frame.drop(columns=AXES[-1]), *prompts)
    with pytest.raises(ValueError, match="sizes"):
        faithfulness(model, frame, *prompts, sizes=[40])
