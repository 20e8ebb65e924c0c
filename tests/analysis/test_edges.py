"""Edges of a model and circuits of them: estimates as TransformerLens makes them, patches and plain forward passes by hand."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    Node,
    attribution_patch,
)

from mechinterp.analysis.patching.activations import patch_activations
from mechinterp.analysis.patching.circuit import (
    areas,
    areas_and_sems,
    circuit_faithfulness,
    circuit_output,
)
from mechinterp.analysis.patching.edges import EdgeEffects, attribute_edges
from mechinterp.analysis.patching.pairing import InputPair, clean_and_corrupted
from mechinterp.analysis.result import tables_of
from mechinterp.analysis.stats import rank_correlation, resampled
from mechinterp.checkpoints.modules.hooked import hook_module
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import assert_close_to_rounding, refused
from tests.deep_models import GPT2, WIDE, first_prediction, first_response, random_model

TASK = TaskConfig(d_x=4)
KINDS = {
    "causal": {},
    "wide": WIDE,
    "linear": {**WIDE, "score": "linear/L"},
    "merged": {"merged_qk": True},
    "norm and mlp": {"d_model": 8, "d_head": 4, "norm": "before", "final_norm": True, "d_mlp": 16},
}


def drawn(step: int, n_prompts: int = 8) -> Prompts:
    generator = generator_for(0, "eval", step)
    return draw_prompts(TASK, n_prompts, generator=generator, context_length=6, dtype=torch.float64)


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def model(request: pytest.FixtureRequest) -> ICLTransformer:
    return random_model(3, 2, **request.param)


@pytest.mark.slow
def test_estimates_at_one_point_are_transformer_lens(model: ICLTransformer):
    clean, corrupted = drawn(1), drawn(2)
    found = attribute_edges(
        model, clean, corrupted=corrupted, nodes="all", ig_steps=1, metric=first_response
    )
    places = {
        (one, two): (i, j)
        for (i, one), (j, two) in product(enumerate(found.senders), enumerate(found.receivers))
    }
    expected = np.zeros((8, *found.estimate.shape))
    if model.cfg.attn_only:
        model.set_use_zero_mlp(True)
    for row in range(8):
        pair = [model.tokens(each[row : row + 1]) for each in (clean, corrupted)]
        with model.numbered(*pair) as ids:
            scores = attribution_patch(
                model,
                *ids,
                lambda logits: first_prediction(logits)[0],
                EdgeAttributionConfig("edge"),
            ).edge_scores
        for (writer, reader), score in scores.items():
            # TransformerLens has MLPs in every model; those of zeros are not in our graph.
            if (named(writer), named(reader)) in places:
                expected[row][places[named(writer), named(reader)]] += score
    edges = np.isfinite(found.estimate)
    n_mlps = 0 if model.cfg.attn_only else 3
    from_heads_and_input = 3 * 2 * (1 + 3 + 5) + 7 + n_mlps * (1 + 4)
    from_mlps = n_mlps and 3 * 2 * (1 + 2) + (1 + 2) + 3
    assert edges.sum() == from_heads_and_input + from_mlps
    largest = np.abs(expected).max()
    assert largest > 0
    np.testing.assert_allclose(found.estimate[edges], expected.mean(0)[edges], atol=1e-9 * largest)
    sem = expected.std(axis=0, ddof=1)[edges] / 8**0.5
    np.testing.assert_allclose(found.estimate_sem[edges], sem, atol=1e-9 * largest)
    between = attribute_edges(model, clean, corrupted=corrupted, metric=first_response)
    assert np.isfinite(between.estimate).sum() == 3 * 3 * 4
    for sender, receiver in between.to_frame()[["from", "to"]].to_numpy():
        assert effect(between, sender, receiver) == pytest.approx(effect(found, sender, receiver))


def named(node: Node) -> str:
    """Our name of TransformerLens' node."""
    ends = {"embed": "input", "logits": "output"}
    part = "" if node.kind == "attn_head_out" else f".{node.kind[0]}"
    at = f"L{node.layer}MLP" if node.kind.startswith("mlp") else f"L{node.layer}H{node.head}{part}"
    return ends.get(node.kind, at)


def effect(found: EdgeEffects, sender: str, receiver: str, name: str = "patched") -> float:
    return getattr(found, name)[found.senders.index(sender), found.receivers.index(receiver)]


@pytest.mark.slow
def test_integrated_gradients_are_those_along_the_way():
    """The mean over midpoints, by hand: the gradient of what an input of its own adds to one head's values."""
    model, clean, corrupted = random_model(2, 2, **WIDE), drawn(1), drawn(2)
    steps, name = 3, "blocks.1.attn.hook_v_input"
    found = attribute_edges(
        model, clean, corrupted=corrupted, ig_steps=steps, metric=first_response
    )
    tokens, other = model.tokens(clean), model.tokens(corrupted)
    caches = [model.run_with_cache(each)[1] for each in (tokens, other)]
    z = (caches[0]["z", 0] - caches[1]["z", 0])[:, :, 1]
    moved = (z @ model.blocks[0].attn.W_O[1]).detach()
    effects = []
    model.set_use_split_qkv_input(True)
    for share in (1 / 6, 3 / 6, 5 / 6):
        size = torch.zeros(8, dtype=torch.float64, requires_grad=True)

        def add(values, hook, size=size):
            values = values.clone()
            values[:, :, 0] += size[:, None, None] * moved
            return values

        between = other + share * (tokens - other)
        logits = model.run_with_hooks(between, fwd_hooks=[(name, add)])
        effects.append(torch.autograd.grad(first_prediction(logits).sum(), size)[0])
    expected = torch.stack(effects).mean(0)
    assert effect(found, "L0H1", "L1H0.v", "estimate") == pytest.approx(
        expected.mean().item(), rel=1e-9
    )


@pytest.mark.slow
def test_estimates_rank_edges_as_patches_do():
    """Where the second layer is linear in its values, those edges are estimated without error."""
    model, clean, corrupted = random_model(2, 3, **WIDE, score="linear/L"), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted=corrupted, ig_steps=1, metric=first_response)
    values = [index for index, name in enumerate(found.receivers) if name.endswith(".v")]
    assert len(values) == 3
    np.testing.assert_allclose(found.estimate[:, values], found.patched[:, values], rtol=1e-8)
    assert 0.5 < found.rank_correlation <= 1
    assert 0 <= found.rank_correlation_sem < 0.5


class Layers(nn.Module):
    """Layers of attention, with something behind each or with the sum outside."""

    def __init__(self, behind: nn.Module, *, outside: bool = False) -> None:
        super().__init__()
        self.read_in, self.read_out = nn.Linear(5, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(_Layer(behind, outside=outside) for _ in range(2))
        self.outside = outside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.read_in(tokens)
        for layer in self.layers:
            stream = layer(stream) + (stream if self.outside else 0)
        return self.read_out(stream[:, -1])


class _Layer(nn.Module):
    def __init__(self, behind: nn.Module, *, outside: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.behind, self.outside = behind, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attn(x, x, x, need_weights=False)[0]
        return y if self.outside else self.behind(x + y)


def test_rank_correlation():
    # Equal values share a rank: heads without an effect are in no order.
    for one, other, expected in (
        ([1, 5, 2, 9], [0.1, 0.3, 0.2, 7], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([0, 0, 0], [0, 1, 2], np.nan),
        ([0, 0, 1], [0, 0, 1], 1),
        ([0, 0, 1], [0, 1, 2], 0.75**0.5),
    ):
        found = rank_correlation(np.array(one, dtype=float), np.array(other, dtype=float))
        assert found == pytest.approx(expected, nan_ok=True)


def test_a_layer_without_norms_is_a_sum_and_other_streams_are_refused():
    inside, outside = Layers(nn.Identity()), Layers(nn.Identity(), outside=True)
    outside.load_state_dict(inside.state_dict())
    found, same = (
        attribute_edges(hook_module(module, task=TASK), n_prompts=8) for module in (inside, outside)
    )
    assert np.isfinite(found.patched).sum() == 3 * 2 * 2
    np.testing.assert_allclose(same.patched, found.patched, rtol=0, atol=1e-6)
    np.testing.assert_allclose(same.estimate, found.estimate, rtol=0, atol=1e-6)
    with refused("stream"):
        attribute_edges(hook_module(Layers(nn.LayerNorm(8)), task=TASK), n_prompts=8)


@pytest.mark.slow
def test_one_layer_has_edges_from_the_input_and_to_the_output_that_add_up():
    """The output is linear in what is written: its edges add up to the whole change of the prediction."""
    model, clean, corrupted = random_model(1, 2), drawn(1), drawn(2)
    found = attribute_edges(model, clean, corrupted=corrupted, nodes="all", metric=first_response)
    assert found.senders == ("input", "L0H0", "L0H1")
    assert np.isfinite(found.patched).sum() == 3 * 2 + 3
    to_output = found.patched[:, found.receivers.index("output")]
    assert to_output.sum() == pytest.approx(found.total, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "settings", "prompts", "words"),
    [
        (2, {"nodes": "mlps"}, (), ["nodes", "heads, all", "mlps"]),
        (2, {"ig_steps": 0}, (), ["ig_steps", 0]),
        (1, {}, (), ["at least 2 layers"]),
        (2, {}, (9, 8), ["same shape", "[9"]),
        (2, {}, (1, 1), ["prompts", 8, 1]),
    ],
)
def test_what_has_no_edges_is_refused(layers: int, settings: dict, prompts: tuple, words: list):
    given = [drawn(step, n) for step, n in enumerate(prompts, 1)] or [None, None]
    with refused(*words):
        attribute_edges(random_model(layers, 2), given[0], corrupted=given[1], **settings)


SHORT = TaskConfig(d_x=3, context_length=5)
N_LAYERS, N_HEADS = 3, 2
Kept = Callable[[str, str], bool]


def two_heads(**architecture: object) -> ICLTransformer:
    sizes = {"d_x": 3, "d_y": 1}
    model = random_model(N_LAYERS, N_HEADS, sizes=sizes, d_head=3, **architecture)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.6, generator=generator_for(3, "init", 0))
    return model


def pair_of(model: ICLTransformer, nodes: str) -> InputPair:
    prompts = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    return InputPair.of(predictor_of(model).hooked, *prompts, nodes=nodes)


def outputs_by_hand(model: ICLTransformer, tokens: Tensor, kept: Kept, other: list | None) -> list:
    """What each sender writes, one at a time: the input, heads, MLPs; edges that are not kept carry `other`."""
    n = tokens.shape[1]
    every = [tokens]
    names = ["input"]

    def read(receiver: str) -> Tensor:
        return sum(
            (every if kept(sender, receiver) else other)[index]
            for index, sender in enumerate(names)
        )

    def norm(block: nn.Module, number: int) -> nn.Module:
        return getattr(block, f"ln{number}") if model.cfg.model.norm else nn.Identity()

    for layer, block in enumerate(model.blocks):
        written = []
        for head in range(N_HEADS):
            q, k, v = (
                norm(block, 1)(read(f"L{layer}H{head}.{part}")) @ W[layer, head]
                for part, W in zip("qkv", (model.W_Q, model.W_K, model.W_V), strict=True)
            )
            scores = q @ k.mT / 3**0.5
            scores = scores.masked_fill(~torch.ones(n, n).tril(-1).bool(), -torch.inf)
            pattern = scores.softmax(-1).nan_to_num()
            written.append(pattern @ v @ model.W_O[layer, head])
        every += written
        names += [f"L{layer}H{head}" for head in range(N_HEADS)]
        every.append(block.mlp(norm(block, 2)(read(f"L{layer}MLP"))))
        names.append(f"L{layer}MLP")
    return [*every, read("output")]


@pytest.mark.parametrize("nodes", ["heads", "all"])
def test_a_circuit_is_a_plain_forward_pass_over_its_edges(nodes: str):
    model = two_heads(d_mlp=5)
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
        corrupted = outputs_by_hand(model, pair.corrupted, at(everything), None)
        for circuit in (random, everything, ~everything):
            stream = outputs_by_hand(model, pair.clean, at(circuit), corrupted)[-1]
            assert_close_to_rounding(circuit_output(pair, circuit)[:, -1], stream[:, -1, 3:])
        assert_close_to_rounding(circuit_output(pair, everything), model(pair.clean))
        if nodes == "all":
            assert_close_to_rounding(circuit_output(pair, ~everything), model(pair.corrupted))
    assert not model.cfg.use_split_qkv_input
    assert not model.cfg.use_hook_mlp_in


def test_a_good_order_is_more_faithful_than_its_reverse():
    model = two_heads()
    prompts = clean_and_corrupted(SHORT, None, None, n_prompts=84, seed=0)
    clean, corrupted = prompts
    frame = attribute_edges(model, clean, corrupted=corrupted).to_frame()
    good, bad = (
        circuit_faithfulness(model, each, clean, corrupted=corrupted)
        for each in (frame, frame[::-1])
    )
    assert (good.faithfulness[[0, -1]] == [0, 1]).all()
    assert good.cmd + 2 * good.cmd_sem < bad.cmd - 2 * bad.cmd_sem
    assert good.n_edges[-1] == 3 * N_HEADS**2 * 3
    assert good.to_frame().shape == (len(good.n_edges), 5)
    assert good.distance[-1] == pytest.approx(0, abs=1e-12)


def test_areas_of_straight_lines():
    """CPR is the area under f, CMD that of |1 - f|: f = k / n gives 1/2 for both, a line up to 3/2 and down to 1 more."""
    assert areas(np.array([0, 0.25, 1]), np.array([0, 1, 4])) == pytest.approx((0.5, 0.5))
    assert areas(np.array([0, 1.5, 1]), np.array([0, 1, 2])) == pytest.approx((1, 0.375 + 0.125))


def test_a_circuit_survives_a_csv_file(tmp_path):
    model = two_heads(d_mlp=5)
    clean, corrupted = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    for nodes in ("heads", "all"):
        edges = attribute_edges(model, clean, corrupted=corrupted, nodes=nodes)
        circuit = edges.circuit(5)
        first = edges.to_frame().sort_values("estimate", key=np.abs, ascending=False)[:5]
        assert (
            circuit[["from", "to"]].to_numpy().tolist() == first[["from", "to"]].to_numpy().tolist()
        )
        circuit.to_csv(tmp_path / "circuit.csv", index=False)
        again = pd.read_csv(tmp_path / "circuit.csv")
        pd.testing.assert_frame_equal(again, circuit)
        found = circuit_faithfulness(model, again, clean, corrupted=corrupted, sizes=[2])
        assert found.n_edges.tolist() == [0, 2, 5, len(edges.to_frame())]


def test_a_part_of_the_edges_is_as_faithful_alone_as_in_the_whole_ranking():
    model = two_heads()
    clean, corrupted = clean_and_corrupted(SHORT, None, None, n_prompts=16, seed=0)
    edges = attribute_edges(model, clean, corrupted=corrupted)
    part, whole = (
        circuit_faithfulness(model, circuit, clean, corrupted=corrupted, sizes=[3, 9])
        for circuit in (edges.circuit(9), edges.circuit())
    )
    assert part.n_edges.tolist() == whole.n_edges.tolist() == [0, 3, 9, 36]
    np.testing.assert_array_equal(part.faithfulness, whole.faithfulness)
    assert (part.n_circuit, whole.n_circuit) == (9, 36)
    assert np.isnan([part.cpr, part.cpr_sem, part.cmd, part.cmd_sem]).all()
    assert np.isfinite([whole.cpr, whole.cpr_sem, whole.cmd, whole.cmd_sem]).all()
    # Without a circuit: all edges, in the order of attribute_edges on the same prompts.
    own = circuit_faithfulness(model, None, clean, corrupted=corrupted, sizes=[3, 9])
    np.testing.assert_array_equal(own.faithfulness, whole.faithfulness)


def test_errors_of_both_areas_are_those_by_hand():
    """With one size between none and all, at the share s, CPR is (f + 1 - s) / 2 and CMD is (|1 - f| + s) / 2."""
    counts, generator = np.array([0, 10, 40]), np.random.default_rng(0)
    share, n_prompts = 10 / 40, 25
    whole = generator.uniform(1, 3, n_prompts)
    some = whole * generator.normal(1, 0.5, n_prompts)
    some *= 1.01 * whole.sum() / some.sum()  # about half of the samples have f > 1
    gained = np.stack([0 * whole, some, whole], axis=1)
    f = some.sum() / whole.sum()
    again = np.array([(some @ each) / (whole @ each) for each in resampled(n_prompts)])
    assert again.min() < 1 < again.max()
    by_hand = {
        "cpr": (f + 1 - share) / 2,
        "cpr_sem": again.std(ddof=1) / 2,
        "cmd": (abs(1 - f) + share) / 2,
        "cmd_sem": np.abs(1 - again).std(ddof=1) / 2,
    }
    assert by_hand["cpr_sem"] > 1.2 * by_hand["cmd_sem"]
    found = areas_and_sems(np.array([0, f, 1]), gained, counts)
    assert found == pytest.approx(by_hand, rel=1e-12)


def test_no_circuit_is_nearer_to_the_model_than_the_model_itself():
    """f is at most 1, so that the area under |1 - f| is 1 minus the area under f, and both have one error."""
    found = circuit_faithfulness(two_heads(), task=SHORT, n_prompts=16)
    assert (found.faithfulness <= 1).all()
    assert found.cmd == pytest.approx(1 - found.cpr)
    assert found.cmd_sem == pytest.approx(found.cpr_sem)


def test_on_prompts_that_no_edge_changes_faithfulness_is_not_defined():
    found = circuit_faithfulness(gradient_descent_model([0.5, 0.0], d_x=4), n_prompts=8)
    assert (found.distance == 0).all()
    assert np.isnan(found.faithfulness).all()
    assert np.isnan([found.cpr, found.cpr_sem, found.cmd, found.cmd_sem]).all()
    assert "not defined" in repr(found)
    found.plot()


def test_areas_have_no_error_if_the_metric_of_a_bootstrap_sample_does_not_change():
    gained = np.array([[0.0, 1, 1], [0, 1, 0], [0, 2, 0]])  # prompts 1 and 2 alone divide by 0
    found = areas_and_sems(np.array([0.0, 4, 1]), gained, np.array([0, 1, 2]))
    assert np.isfinite([found["cpr"], found["cmd"]]).all()
    assert np.isnan([found["cpr_sem"], found["cmd_sem"]]).all()


def test_effects_on_a_metric_of_ones_own_have_no_unit_and_no_distance():
    pairs = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    for metric, unit in ((None, "y²"), (first_response, "")):
        found = attribute_edges(two_heads(), pairs[0], corrupted=pairs[1], metric=metric)
        table = tables_of("attribute_edges", found)["attribute_edges"]
        assert (table.units["patched"], table.units["estimate"]) == (unit, unit)
        assert ("y²" in found.sentences()[0]) == bool(unit)
        one = patch_activations(two_heads(), *pairs, metric=metric)
        assert tables_of("patch", one)["patch"].units["effect"] == unit


def test_circuits_that_are_not_of_the_model_are_refused():
    model = two_heads()
    clean, corrupted = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    edges = attribute_edges(model, clean, corrupted=corrupted)
    frame = edges.circuit()

    def measure(circuit: object, **settings: object) -> None:
        circuit_faithfulness(model, circuit, clean, corrupted=corrupted, **settings)

    for wrong in (frame.assign(to="L0H1.v"), frame.assign(to="L1MLP")):
        with refused("36 edges", "nodes='heads'", wrong["to"][0]):
            measure(wrong)
    with refused("each edge once"):
        measure(pd.concat([frame, frame[:1]]))
    with refused("column to"):
        measure(frame.drop(columns="to"))
    with refused("nodes of circuit", "mlps"):
        measure(frame.assign(nodes="mlps"))
    with refused("at least one edge"):
        measure(frame[:0])
    with refused("sizes", 36, 40):
        measure(frame, sizes=[40])
    for n_edges in (0, 37):
        with refused("n_edges", "1 to 36", n_edges):
            edges.circuit(n_edges)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, p: circuit_faithfulness(m, p), ["DataFrame", "got Prompts", "prompts="]),
        (lambda m, p: circuit_faithfulness(m, 3), ["DataFrame", "got int", "circuit(n)"]),
        (lambda m, p: circuit_faithfulness(m, SHORT), ["DataFrame", "got TaskConfig"]),
        (lambda m, p: circuit_faithfulness(m, None, 4), ["prompts must be Prompts", "n_prompts="]),
        (lambda m, p: attribute_edges(m, SHORT), ["prompts must be Prompts", "task="]),
        (lambda m, p: attribute_edges(m, p, corrupted=4), ["corrupted must be Prompts"]),
        (lambda m, p: attribute_edges(m, p, metric=lambda y, p: y), ["metric", "[8]", "[8, 1]"]),
    ],
)
def test_arguments_of_another_type_are_refused(call: Callable, words: list[str]):
    with refused(*words):
        call(two_heads(), clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)[0])


def test_drawn_prompts_follow_the_given_law():
    model = two_heads()
    found = attribute_edges(model, task=SHORT, n_prompts=8)
    clean, corrupted = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    given = attribute_edges(model, clean, corrupted=corrupted)
    np.testing.assert_array_equal(found.patched, given.patched)


@pytest.mark.parametrize("nodes", ["heads", "all"])
@pytest.mark.parametrize("same_x", [True, False])
@pytest.mark.parametrize(("score", "n_layers"), [("linear", 2), ("linear/L", 3)])
def test_maps_of_the_tokens_give_what_hooked_runs_give(
    nodes: str, same_x: bool, score: str, n_layers: int
):
    require_effects_of_hooks(random_model(n_layers, 2, **WIDE, score=score), nodes, same_x=same_x)


@pytest.mark.parametrize(
    ("kind", "nodes"),
    [
        *(("causal", "heads"), ("causal", "all"), ("wide", "all"), ("merged", "heads")),
        *(("norm and mlp", "heads"), ("in turn", "heads"), ("in turn", "all"), ("gpt2", "heads")),
        *(("positions", "all"), ("rotary", "heads"), ("tanh", "all"), ("two layers", "heads")),
    ],
)
@pytest.mark.parametrize("same_x", [True, False])
def test_layers_of_the_weights_give_what_hooked_runs_give(kind: str, nodes: str, same_x: bool):
    norms = {"norm": "before", "final_norm": True, "biases": True}
    more = {
        "in turn": {"layout": "in_turn", "d_model": 8, "d_head": 4, "attend_to_self": True},
        "gpt2": {**GPT2, "n_positions": 81},
        "positions": {"d_model": 8, "d_head": 4, "n_positions": 41, **norms},
        "rotary": {"d_model": 8, "d_head": 4, "rotary_dim": 4, "attend_to_self": True},
        "tanh": {"context_only": True, "score": "1+tanh", "biases": True},
        "two layers": {"context_only": True},
    }
    settings = (KINDS | more)[kind]
    model = random_model(2 if kind == "two layers" else 3, 2, **settings)
    require_effects_of_hooks(model, nodes, same_x=same_x)


def require_effects_of_hooks(model: ICLTransformer, nodes: str, *, same_x: bool) -> None:
    """Effects of edges from the weights are those that runs with hooks give."""
    clean, corrupted = clean_and_corrupted(TASK, None, None, n_prompts=8, seed=0)
    if not same_x:
        corrupted = clean_and_corrupted(TASK, None, None, n_prompts=8, seed=5)[1]
    settings = {"corrupted": corrupted, "nodes": nodes, "ig_steps": 2}
    by_weights = attribute_edges(model, clean, **settings)
    model.blocks[0].hook_resid_pre.add_hook(lambda stream, hook: stream, is_permanent=True)
    by_hooks = attribute_edges(model, clean, **settings)
    assert (by_weights.senders, by_weights.receivers) == (by_hooks.senders, by_hooks.receivers)
    assert by_weights.total == pytest.approx(by_hooks.total, rel=1e-10)
    for name in ("estimate", "estimate_sem", "patched", "patched_sem"):
        one, other = getattr(by_weights, name), getattr(by_hooks, name)
        assert (np.isnan(one) == np.isnan(other)).all()
        largest = np.nanmax(np.abs(other))
        assert largest > 0
        # Squared distances to the clean prediction lose digits where effects are small beside them.
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9 * largest)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        {"d_mlp": 5},
        {"norm": "before", "d_mlp": 8},
        {"context_only": True, "biases": True, "d_mlp": 4},
    ],
)
def test_patches_are_those_by_hand_and_those_of_circuits(architecture: dict):
    """The prediction when one node reads what an earlier one writes on the clean prompts; nearness to theirs by default."""
    model = two_heads(**architecture)
    prompts = clean_and_corrupted(SHORT, None, None, n_prompts=8, seed=0)
    pair = InputPair.of(predictor_of(model).hooked, *prompts, nodes="all")
    found = attribute_edges(
        model, prompts[0], corrupted=prompts[1], nodes="all", metric=first_response
    )
    near = attribute_edges(model, prompts[0], corrupted=prompts[1], nodes="all")
    clean, corrupted = (model(tokens)[:, -1, 0].detach() for tokens in (pair.clean, pair.corrupted))
    assert found.total == pytest.approx((clean - corrupted).mean().item())
    assert found.total_sem == pytest.approx((clean - corrupted).std().item() / 8**0.5)
    gap = (clean - corrupted).square()
    assert near.total == pytest.approx(gap.mean().item())
    reversed_pair = InputPair.of(predictor_of(model).hooked, *reversed(prompts), nodes="all")
    by_hand = "biases" not in architecture
    with torch.no_grad():
        given = outputs_by_hand(model, pair.clean, lambda *edge: True, None) if by_hand else None
        for place in np.argwhere(pair.edges)[::5]:
            sender, receiver = found.senders[place[0]], found.receivers[place[1]]
            without = np.ones(pair.edges.shape, dtype=bool)
            without[tuple(place)] = False
            patched = circuit_output(reversed_pair, without)[:, -1, 0]
            if by_hand:
                kept = lambda *edge: edge != (sender, receiver)  # noqa: E731, B023
                stream = outputs_by_hand(model, pair.corrupted, kept, given)[-1]
                assert_close_to_rounding(patched, stream[:, -1, 3])
            change = patched - corrupted
            assert found.patched[tuple(place)] == pytest.approx(change.mean().item(), abs=1e-10)
            sem = change.std().item() / 8**0.5
            assert found.patched_sem[tuple(place)] == pytest.approx(sem, abs=1e-10)
            nearer = (gap - (clean - patched).square()).mean().item()
            assert near.patched[tuple(place)] == pytest.approx(nearer, abs=1e-10)
