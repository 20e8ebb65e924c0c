"""Scores of version 2: the truth of each kind scores 1 on itself, a random order 0, and ties count as the mean of their
orders."""

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from mechinterp.analysis.patching.circuit import circuit_faithfulness
from mechinterp.known import Entry, Suite, score, suite
from mechinterp.known.agreement import (
    agreement,
    expected_by_size,
    rounded,
    score_circuits,
    score_edges_of_all,
    score_heads_of_all,
    score_subspaces,
)
from mechinterp.known.scores import MEANINGS
from mechinterp.known.truth import KINDS
from mechinterp.known.variables import angle_score, interchanged
from tests.conftest import refused

HAND = suite(2, trained="none")
SEVERAL = HAND["gd-2-dead-heads"]


def best_circuits(entry: Entry, kind: str) -> np.ndarray:
    """The best circuit of each size, by trying all."""
    game = getattr(entry.truth, f"subsets_{kind}").value
    shape = entry.truth.heads_in.value.shape
    n = int(np.prod(shape))
    circuits = np.zeros((n + 1, n), dtype=bool)
    found = np.full(n + 1, -np.inf)
    for kept in product((False, True), repeat=n):
        at = np.array(kept)
        # "in": the circuit is patched in; "out": all that is not in it is patched out.
        value = game[(at if kind == "in" else ~at) @ 2 ** np.arange(n)]
        if value > found[at.sum()]:
            found[at.sum()], circuits[at.sum()] = value, at
    return circuits.reshape(n + 1, *shape)


@pytest.mark.parametrize("kind", KINDS)
def test_each_truth_of_heads_scores_1_on_itself(kind: str):
    truth = SEVERAL.truth
    found = score_heads_of_all(SEVERAL, -3 * getattr(truth, f"heads_{kind}").value)
    assert found[f"heads {kind} spearman"] == pytest.approx(1)
    assert found[f"heads {kind} auroc"] == 1
    found = score_heads_of_all(SEVERAL, getattr(truth, f"shapley_{kind}").value)
    assert found[f"shapley {kind} spearman"] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["in", "out"])
def test_each_truth_of_edges_scores_1_on_itself(kind: str):
    effects = getattr(SEVERAL.truth, f"edges_{kind}").value
    found = score_edges_of_all(SEVERAL, SEVERAL.edges().assign(value=effects))
    assert found[f"edges {kind} spearman"] == pytest.approx(1)
    assert found[f"edges {kind} auroc"] == 1


@pytest.mark.parametrize("kind", ["in", "out"])
@pytest.mark.parametrize("name", ["gd-2-dead-heads", "minimum-5"])
def test_the_best_circuit_of_each_size_scores_1_and_the_worst_is_below_a_random_one(
    kind: str, name: str
):
    entry = HAND[name]
    assert score_circuits(entry, best_circuits(entry, kind))[f"circuits {kind}"] == pytest.approx(1)
    worst = best_circuits(entry, kind)[::-1]
    assert score_circuits(entry, ~worst)[f"circuits {kind}"] < 0


def test_random_orders_score_0():
    """Over all orders of three heads and many of more, rank correlations and circuits have the mean 0, AUROC 1/2."""
    entry = HAND["minimum-3"]
    found = [
        score_heads_of_all(entry, np.array([order], dtype=float))
        for order in permutations((1, 2, 3))
    ]
    for name in ("circuits in", "circuits out"):
        assert np.mean([each[name] for each in found]) == pytest.approx(0)
    rng = np.random.default_rng(0)
    orders = [score_heads_of_all(SEVERAL, rng.random((2, 4))) for _ in range(400)]
    for name in orders[0]:
        values = np.array([each[name] for each in orders])
        sem = values.std(ddof=1) / len(values) ** 0.5
        assert abs(values.mean() - MEANINGS[name][2]) < 4 * sem, name


def test_a_tie_counts_as_the_mean_of_its_orders():
    entry, rng = HAND["minimum-5"], np.random.default_rng(1)
    game = entry.truth.subsets_in.value
    tied = np.array([2.0, 1.0, 1.0, 1.0, 0.0])
    orders = [np.array([2.0, *order, 0.0]) for order in permutations((1.1, 1.2, 1.3))]
    every = [expected_by_size(game, order) for order in orders]
    np.testing.assert_allclose(expected_by_size(game, tied), np.mean(every, 0))
    effects = rng.normal(size=5)
    matters = [agreement("heads in", order, effects * [1, 1, 1, 1, 1e-4]) for order in orders]
    of_tied = agreement("heads in", tied, effects * [1, 1, 1, 1, 1e-4])
    name = "heads in auroc"
    assert of_tied[name] == pytest.approx(np.mean([each[name] for each in matters]))


def test_areas_of_tied_edges_lie_between_those_of_both_orders():
    """Two of a chain of three edges are tied for the second place."""
    entry = HAND["minimum-2"]
    edges = entry.edges()
    value = {("L0H0", "output"): 9.0, ("input", "L0H0.v"): 8.0, ("L0H1", "output"): 7.0}

    def areas(**changed: float) -> dict[str, float]:
        places = list(edges.itertuples(index=False, name=None))
        size = [value.get(edge, 1 / (2 + n)) for n, edge in enumerate(places)]
        for head, own in changed.items():
            size[places.index((head, "output"))] = own
        return score_edges_of_all(entry, edges.assign(value=size))

    first, second, tied = areas(), areas(L0H1=8.5), areas(L0H1=8.0)
    for name in ("edges cpr", "edges cmd"):
        low, high = sorted((first[name], second[name]))
        assert low < tied[name] < high


def test_the_first_edges_of_a_ranking_are_those_of_the_largest_values():
    entry = HAND["minimum-3"]
    edges, (clean, corrupted) = entry.edges(), entry.pairs
    values = np.random.default_rng(6).normal(size=len(edges))
    order = edges.iloc[np.argsort(-np.abs(values))]
    expected = circuit_faithfulness(
        entry.checkpoint, order, clean, corrupted=corrupted, nodes="all"
    )
    found = score_edges_of_all(entry, edges.assign(value=values))
    assert found["edges cpr"] == pytest.approx(expected.cpr)
    assert found["edges cmd"] == pytest.approx(expected.cmd)


def test_effects_above_a_hundredth_of_the_largest_matter():
    effects = np.array([-1.0, 0.0101, 0.0099, 0.0, 0.0])
    values = np.array([5.0, 1.0, 4.0, 3.0, 2.0])
    # Of six pairs, the first effect is right in three, the second in none.
    assert agreement("heads in", values, effects)["heads in auroc"] == pytest.approx(3 / 6)


def test_circuits_of_two_heads_are_scored():
    """There are two circuits of one head: the better one scores 1, the other -1."""
    entry = HAND["minimum-2"]
    single = entry.truth.heads_in.value
    assert score_heads_of_all(entry, single)["circuits in"] == pytest.approx(1)
    assert score_heads_of_all(entry, single[:, ::-1])["circuits in"] == pytest.approx(-1)


def test_agreement_is_that_of_other_packages():
    rng = np.random.default_rng(2)
    for _ in range(20):
        values, effects = rng.integers(0, 4, 12).astype(float), rng.integers(0, 3, 12).astype(float)
        found = agreement("heads in", values, effects)
        assert found["heads in spearman"] == pytest.approx(spearmanr(values, effects).statistic)
        if (effects > 0).any() and (effects == 0).any():
            assert found["heads in auroc"] == pytest.approx(roc_auc_score(effects > 0, values))


def test_rounding_makes_ties_and_nothing_else_does():
    values = np.array([1.0, -1.0 - 1e-13, 0.5, 1e-12, -2e-12, 0.0, 1.0 - 1e-6])
    assert rounded(values).tolist() == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 1.0 - 1e-6]


def test_every_order_of_nothing_said_is_chance():
    found = score_heads_of_all(SEVERAL, np.ones((2, 4)))
    for name, value in found.items():
        assert value == pytest.approx(MEANINGS[name][2]), name


HELD = ("gd-2", "gd-2-rotated", "gd-plus-plus-2")


@pytest.mark.parametrize("name", HELD)
def test_the_true_subspace_scores_1_and_others_less(name: str):
    entry, rng = HAND[name], np.random.default_rng(3)
    known = entry.truth.variables.value
    # Another basis of the same subspace is as good.
    mixed = {n: rng.normal(size=(len(b), len(b))) @ b for n, b in known.items()}
    assert score_subspaces(entry, mixed) == {
        "subspace interchange": pytest.approx(1),
        "subspace cosine": pytest.approx(1),
    }
    other = {n: rng.normal(size=b.shape) for n, b in known.items()}
    found = score_subspaces(entry, other)
    assert found["subspace interchange"] < 0.9
    assert found["subspace cosine"] < 0.9
    nothing = score_subspaces(entry, {})
    assert nothing == {"subspace interchange": 0, "subspace cosine": 0}


def test_a_subspace_that_nothing_reads_scores_0():
    """No layer reads x after the last one, so that interchange of it leaves the predictions as they are."""
    entry = HAND["gd-2"]
    last = entry.variables[-1]
    found = score_subspaces(entry, {last.name: np.eye(1, 5)})
    # The other variable has no answer, and counts 0, too.
    assert found["subspace interchange"] == pytest.approx(0, abs=1e-12)


def test_a_subspace_of_random_weights_is_scored_by_the_counterfactual():
    entry, rng = HAND["random-gd-3"], np.random.default_rng(7)
    base, source = entry.base_and_source
    without, expected = entry.checkpoint.predictor.predict(base), []
    bases = {variable.name: rng.normal(size=(1, 5)) for variable in entry.variables}
    for variable in entry.variables:
        target = variable.counterfactual(entry.hooked, base, source)
        found = interchanged(entry.hooked, variable, bases[variable.name], base, source)
        missed = ((each - target).square().sum().item() for each in (found, without))
        expected.append(max(1 - next(missed) / next(missed), -1))
    assert score_subspaces(entry, bases) == {"subspace control": pytest.approx(np.mean(expected))}
    assert np.mean(expected) < 0.5


def test_a_harmful_subspace_scores_minus_1_and_no_less():
    """Interchange in a random subspace in place of that of x puts the predictions far off."""
    entry = HAND["gd-plus-plus-2"]
    name = "x after layer 1"
    basis = np.random.default_rng(0).normal(size=entry.truth.variables.value[name].shape)
    found = score_subspaces(entry, {name: basis})["subspace interchange"]
    assert found == pytest.approx(-1 / len(entry.variables))


def test_interchange_changes_one_position_alone():
    entry = HAND["gd-2"]
    base, source = entry.base_and_source
    hooked, first = entry.hooked, replace(entry.variables[0], at=3)
    found = interchanged(hooked, first, np.eye(5), base, source)
    own, other = (hooked.run_with_cache(hooked.tokens(each))[1] for each in (base, source))
    mixed = own[first.hook].clone()
    mixed[:, 3] = other[first.hook][:, 3]
    layer = int(first.hook.split(".")[1]) + 1
    with torch.no_grad():
        expected = hooked(mixed, start_at_layer=layer)[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert (found - hooked.predict(base)).abs().max() > 1e-3


def test_a_random_subspace_has_the_cosine_of_its_dimension():
    rng = np.random.default_rng(4)
    true = rng.normal(size=(2, 8))
    cosines = [angle_score(rng.normal(size=(2, 8)), true) for _ in range(400)]
    assert np.mean(cosines) == pytest.approx(2 / 8, abs=4 * np.std(cosines) / 20)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"heads": np.ones((1, 3))}, "3"),
        ({"circuits": np.ones((9, 2, 4), dtype=bool)}, "circuit"),
        ({"edges": SEVERAL.edges()}, "value"),
        ({"subspace": {"beta": np.ones((1, 5))}}, "beta"),
        ({"subspace": {"prediction after layer 1": np.ones((2, 5))}}, "prediction after layer 1"),
        ({"subspace": {"prediction after layer 1": np.zeros((1, 5))}}, "independent"),
        ({"aim": "both"}, "aim"),
    ],
)
def test_answers_of_another_form_are_refused(answer: dict[str, object], named: str):
    with refused(named):
        score(lambda entry: answer, Suite(2, {"gd-2-dead-heads": SEVERAL}))


def test_an_aim_changes_no_score():
    chosen = Suite(2, {"minimum-5": HAND["minimum-5"]})
    heads = np.random.default_rng(5).random((1, 5))
    frames = [
        score(lambda entry, more=more: {"heads": heads, **more}, chosen).to_frame()
        for more in ({}, {"aim": "in"}, {"aim": "out"})
    ]
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])


def test_interchange_of_prompts_with_themselves_changes_nothing():
    entry = HAND["gd-3-rotated"]
    base, _ = entry.base_and_source
    for variable in entry.variables:
        same = interchanged(entry.hooked, variable, variable.basis, base, base)
        torch.testing.assert_close(same, entry.checkpoint.predictor.predict(base))
