"""Version 2 of the suite: every effect is computed again by both programs, and by hand where a formula is short."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.known import build_2
from analyses.known.effects import (
    by_hooks,
    by_plain_model,
    shapley_of_dividends,
    shapley_of_subsets,
    subsets,
)
from analyses.known.held import held, held_by_trained
from analyses.known.models_2 import made_2
from analyses.known.plain import Plain
from mechinterp.known import suite
from mechinterp.known.entries import ARRAYS, FOLDERS, HASHES, TRUTHS, documents_of
from mechinterp.known.truth import KINDS
from tests.conftest import refused, sampled

ALL = suite(2, trained="all")
FEW = {
    *("gd-2", "gd-plus-plus-2", "preconditioned-2", "debiased-pair", "kernel", "minimum-2"),
    *("mlp-clip-1", "mlp-square-1", "backup-or", "gd-plus-plus-2-noise-0.05", "tanh-h2-s0"),
    *("recurrent-gated", "recurrent-delta", "recurrent-mesa", "two-tasks-h2-s0"),
}
"""Entries whose effects `make test` computes again; of the others `make test-all`."""


def test_the_version_is_that_of_its_files_and_of_the_citation():
    assert hashlib.sha256((FOLDERS[2] / TRUTHS).read_bytes()).hexdigest() == HASHES[2]
    assert HASHES[2] in (Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8")
    assert (len(suite(2)), len(ALL)) == (103, 148)
    # The models of version 1 are read from its folder, and not stored again.
    first = suite(1, trained="all")
    assert all(ALL[name].path == entry.path for name, entry in first.items())


def test_a_changed_array_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for file in (TRUTHS, ARRAYS):
        (tmp_path / file).write_bytes((FOLDERS[2] / file).read_bytes())
    changed = bytearray((tmp_path / ARRAYS).read_bytes())
    changed[-1] ^= 1
    (tmp_path / ARRAYS).write_bytes(changed)
    monkeypatch.setitem(FOLDERS, 2, tmp_path)
    with refused(ARRAYS):
        suite(2)


def test_the_plain_model_predicts_as_the_package():
    for entry in ALL.values():
        prompts = entry.pairs[0][:4]
        tokens = entry.hooked.tokens(prompts).numpy()
        expected = entry.checkpoint.predictor.predict(prompts).numpy(force=True)
        found, written = Plain(entry.checkpoint.weights).run(tokens)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10, err_msg=entry.name)
        assert {*entry.edges()["from"]} <= written.keys()


def test_variables_are_those_of_the_builder():
    for entry in ALL.values():
        own = entry.checkpoint.weights
        held_here = held_by_trained(own) if entry.kind == "trained" else held(entry.name, own.model)
        places = [(each.name, each.hook, each.at, len(each.basis)) for each in held_here]
        assert places == [(each.name, each.hook, each.at, each.size) for each in entry.variables]
        stored = {} if entry.truth.variables is None else entry.truth.variables.value
        assert {each.name for each in held_here if each.known} == stored.keys()
        for each in held_here:
            if each.known:
                np.testing.assert_array_equal(stored[each.name], each.basis, err_msg=entry.name)


@pytest.mark.parametrize("name", sampled(ALL, keep=FEW.__contains__))
def test_effects_are_those_of_both_programs(name: str):
    entry = ALL[name]
    hooked, plain = by_hooks(entry), by_plain_model(entry)
    for name, values in hooked.items():
        known = getattr(entry.truth, name)
        bound = 1e-9 * max(np.abs(values).max(), 1e-3)
        for again in (values, plain[name]):
            np.testing.assert_allclose(known.value, again, rtol=0, atol=bound, err_msg=name)
        assert known.error < bound


def test_effects_of_heads_of_one_layer_are_those_of_sums():
    """The prediction is the sum of the heads' outputs, so each effect is a formula of the outputs."""
    entry = ALL["minimum-3"]
    outputs = []
    for prompts in entry.pairs:
        b = torch.einsum("nli,nlo->ni", prompts.x, prompts.y) / prompts.x.shape[1]
        M = torch.einsum("h,hri,hrj->hij", entry.module.v, entry.module.K, entry.module.Q)
        outputs.append(torch.einsum("ni,hij,nj->nh", b, M, prompts.x_query).detach().numpy())
    clean, corrupted = outputs
    far = clean.sum(1) - corrupted.sum(1)
    neighbour = clean[np.arange(len(clean)) ^ 1]
    lost = {"out": corrupted, "zero": 0 * clean, "mean": clean.mean(0), "resample": neighbour}
    expected = {kind: -((clean - other) ** 2).mean(0) for kind, other in lost.items()}
    expected["in"] = (far**2)[:, None] - (far[:, None] - (clean - corrupted)) ** 2
    expected["in"] = expected["in"].mean(0)
    for kind in KINDS:
        found = getattr(entry.truth, f"heads_{kind}").value
        np.testing.assert_allclose(found[0], expected[kind], atol=1e-12, err_msg=kind)


def test_an_edge_into_the_value_of_a_single_layer_is_its_head():
    """One layer reads the input alone: an edge to its value moves its output as the head does, and to its query nothing,
    because the covariates are the same."""
    entry = ALL["minimum-3"]
    edges = entry.edges()
    for kind in ("in", "out"):
        effects = edges.assign(effect=getattr(entry.truth, f"edges_{kind}").value)
        by_edge = effects.set_index(["from", "to"])["effect"]
        heads = getattr(entry.truth, f"heads_{kind}").value[0]
        into_v = [by_edge["input", f"L0H{head}.v"] for head in range(3)]
        np.testing.assert_allclose(into_v, heads, atol=1e-12)
        np.testing.assert_allclose([by_edge[f"L0H{h}", "output"] for h in range(3)], heads)
        assert np.abs([by_edge["input", f"L0H{h}.q"] for h in range(3)]).max() < 1e-12


@pytest.mark.parametrize("name", ["gd-3", "debiased-two-pairs"])
def test_sets_of_heads_agree_with_single_heads_and_with_the_whole(name: str):
    truth, pairs = ALL[name].truth, ALL[name].pairs
    clean, corrupted = (ALL[name].checkpoint.predictor.predict(each) for each in pairs)
    all_that_moves = (clean - corrupted).square().sum(-1).mean().item()
    for kind, sign in (("in", 1), ("out", -1)):
        every = getattr(truth, f"subsets_{kind}").value
        n_heads = truth.heads_in.value.size
        assert every[0] == 0
        assert every[-1] == pytest.approx(sign * all_that_moves)
        single = getattr(truth, f"heads_{kind}").value.ravel()
        np.testing.assert_array_equal(every[2 ** np.arange(n_heads)], single)
        # Efficiency: Shapley values sum to the effect of all heads.
        assert getattr(truth, f"shapley_{kind}").value.sum() == pytest.approx(every[-1])


def test_shapley_values_have_their_axioms():
    game = np.random.default_rng(0).normal(size=2**4)
    game[0] = 0
    for shapley in (shapley_of_subsets, shapley_of_dividends):
        values = shapley(game)
        assert values.sum() == pytest.approx(game[-1])
        weights = np.array([1.0, -2.0, 0.5, 3.0])
        additive = np.array([weights[each].sum() for each in subsets(4)])
        np.testing.assert_allclose(shapley(additive), weights)
        np.testing.assert_allclose(shapley(game + additive), values + weights)


def test_edges_are_those_of_the_whole_model():
    for entry in ALL.values():
        edges = entry.edges()
        assert len(edges) == len(entry.truth.edges_in.value) == len(entry.truth.edges_out.value)
        assert {"input"} < set(edges["from"])
        assert {"output"} < set(edges["to"])
        assert not edges.duplicated().any()


@pytest.mark.parametrize("name", ["gd-2", "wide-gd-2", "singular-rank1-h2", "random-gd-3"])
def test_the_builder_states_what_is_stored(name: str):
    folder, stored = FOLDERS[2], documents_of(2)[name]
    header = build_2.headers(folder)[name]
    entry = build_2.entry_of(folder, name, header)
    document, arrays = build_2.with_variables(entry, *build_2.answered(entry, header))
    known = stored.pop("arrays")
    # The error of rounding may differ between processors.
    for each in (*stored["truth"].values(), *document["truth"].values()):
        each["error"] = each["error"] < 1e-12
    assert document == stored
    assert arrays.keys() == known.keys()
    for truth, values in arrays.items():
        np.testing.assert_allclose(values, known[truth], atol=1e-12, err_msg=truth)


def test_the_hand_made_models_are_those_of_the_builder():
    for name, own in made_2().items():
        stored = ALL[name].checkpoint.weights
        for tensor, values in own.weights.to(torch.float64).tensors.items():
            np.testing.assert_allclose(stored.tensors[tensor], values, atol=1e-12, err_msg=name)
