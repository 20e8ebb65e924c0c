"""Circuits of edges against a plain forward pass with one loop per head, and against patches of single edges."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.patching.edge_circuits import _areas, circuit_output, faithfulness
from mechinterp.analysis.patching.edges import attribute_edges
from mechinterp.analysis.patching.pairing import Pair, clean_and_corrupted
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import generator_for
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import assert_close_to_rounding

TASK = TaskConfig(d_x=3, context_length=5)
N_LAYERS, N_HEADS = 3, 2
Kept = Callable[[str, str], bool]


def random_model(**architecture: object) -> ICLTransformer:
    config = ModelConfig(n_layers=N_LAYERS, n_heads=N_HEADS, d_head=3, **architecture)
    model = ICLTransformer(config, d_x=3, d_y=1).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.6, generator=generator_for(3, "init", 0))
    return model


def pair_of(model: ICLTransformer, nodes: str) -> Pair:
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=6, seed=0)
    return Pair.of(predictor_of(model).hooked, *prompts, nodes=nodes)


def outputs(model: ICLTransformer, tokens: Tensor, kept: Kept, other: list | None) -> list:
    """What each sender writes, one at a time: the input, heads, MLPs; edges that are not kept carry `other`."""
    n = tokens.shape[1]
    every = [tokens]
    names = ["input"]

    def read(receiver: str) -> Tensor:
        return sum(
            (every if kept(sender, receiver) else other)[index]
            for index, sender in enumerate(names)
        )

    for layer, block in enumerate(model.blocks):
        written = []
        for head in range(N_HEADS):
            q, k, v = (
                read(f"L{layer}H{head}.{part}") @ getattr(model, f"W_{part.upper()}")[layer, head]
                for part in "qkv"
            )
            scores = q @ k.mT / 3**0.5
            scores = scores.masked_fill(~torch.ones(n, n).tril(-1).bool(), -torch.inf)
            pattern = scores.softmax(-1).nan_to_num()
            written.append(pattern @ v @ model.W_O[layer, head])
        every += written
        names += [f"L{layer}H{head}" for head in range(N_HEADS)]
        every.append(block.mlp(read(f"L{layer}MLP")))
        names.append(f"L{layer}MLP")
    return [*every, read("output")]


@pytest.mark.parametrize("nodes", ["heads", "all"])
def test_a_circuit_is_a_plain_forward_pass_over_its_edges(nodes: str):
    model = random_model(d_mlp=5)
    pair = pair_of(model, nodes)
    senders, receivers = ([n.name for n in each] for each in (pair.senders, pair.receivers))
    random = np.random.default_rng(0).random(pair.edges.shape) < 0.5
    assert (nodes == "all") == ("output" in receivers)

    def at(chosen: np.ndarray) -> Kept:
        def kept(sender: str, receiver: str) -> bool:
            inside = sender in senders and receiver in receivers
            return not inside or chosen[senders.index(sender), receivers.index(receiver)]

        return kept

    everything = np.ones_like(random)
    with torch.no_grad():
        corrupted = outputs(model, pair.corrupted, at(everything), None)
        for circuit in (random, everything, ~everything):
            stream = outputs(model, pair.clean, at(circuit), corrupted)[-1]
            assert_close_to_rounding(circuit_output(pair, circuit)[:, -1], stream[:, -1, 3:])
        assert_close_to_rounding(circuit_output(pair, everything), model(pair.clean))
        if nodes == "all":
            assert_close_to_rounding(circuit_output(pair, ~everything), model(pair.corrupted))
    assert not model.cfg.use_split_qkv_input
    assert not model.cfg.use_hook_mlp_in


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [{}, {"norm": "before", "d_mlp": 8, "biases": True}])
def test_a_circuit_without_one_edge_is_the_patch_of_that_edge(architecture: dict):
    model = random_model(context_only=True, **architecture)
    prompts = clean_and_corrupted(TASK, None, None, n_prompts=6, seed=0)
    pair = Pair.of(predictor_of(model).hooked, *prompts, nodes="all")
    # The roles of the prompts are exchanged: everything is clean, and one edge is corrupted.
    edges = attribute_edges(
        model, *reversed(prompts), nodes="all", metric=lambda output: output[:, -1, 0]
    )
    for sender, receiver in np.argwhere(pair.edges)[::7]:
        kept = np.ones(pair.edges.shape, dtype=bool)
        kept[sender, receiver] = False
        change = (circuit_output(pair, kept) - model(pair.clean))[:, -1, 0].mean()
        assert change.item() == pytest.approx(edges.patched[sender, receiver], abs=1e-10)


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
    for wrong in (frame[1:], frame.assign(to="L2H0.v"), frame.assign(to="L1MLP")):
        with pytest.raises(ValueError, match="each of the 36 edges"):
            faithfulness(model, wrong, *prompts)
    with pytest.raises(ValueError, match="column to"):
        faithfulness(model, frame.drop(columns="to"), *prompts)
    with pytest.raises(ValueError, match="sizes"):
        faithfulness(model, frame, *prompts, sizes=[40])
