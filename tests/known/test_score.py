"""Scores: the truth has the best ones, a random order those of chance, the reversed order the worst."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score

from analyses.known.gradients import as_frames
from analyses.known.masking import random_order as random_numbers
from analyses.known.methods import components
from mechinterp import local_learning_coefficient
from mechinterp.known import Entry, Suite, judge_sampler, score, suite
from mechinterp.known.agreement import MEANINGS_2, auroc
from mechinterp.known.entries import edge_place
from mechinterp.known.scores import (
    MEANINGS,
    score_components,
    score_edges,
    score_heads,
    score_learning_coefficient,
)
from tests.conftest import Run, refused

HAND = suite(1, trained="none")
LARGE = suite(1)["sparse-h4-noise0.1-s0"]


def some(*names: str) -> Suite:
    return Suite(1, {name: HAND[name] for name in names})


def edge_frame(entry: Entry, value: Callable[[tuple[int, ...]], float]) -> pd.DataFrame:
    """`entry.edges()` with values, a function of [input, layer, head, later_layer, later_head]."""
    frame = entry.edges()
    return frame.assign(value=[value(edge_place(*edge)) for edge in frame.to_numpy()])


def patches(entry: Entry, *, known: Suite) -> dict[str, object]:
    """The exact effects as an answer."""
    truth = known[entry.name].truth
    answer: dict[str, object] = {"heads": truth.heads.value}
    if truth.edges is not None:
        answer["edges"] = edge_frame(entry, lambda at: truth.edges.value[at])
    return answer


def random_order(entry: Entry, *, seed: int) -> dict[str, object]:
    return as_frames(partial(random_numbers, seed=seed), entry)


@pytest.mark.slow
def test_the_truth_has_the_best_scores():
    def truth(entry: Entry) -> dict[str, object]:
        known = HAND[entry.name].truth
        answer = patches(entry, known=HAND)
        for name, value in (("label", known.algorithm), ("components", known.components)):
            if value is not None:
                answer[name] = value.value
        if known.learning_coefficient is not None:
            answer["learning_coefficient"] = (known.learning_coefficient.value, 0.0)
        return answer

    by_hand = ("gd-3-dead-heads", "preprocess-2-rotated", "debiased-two-pairs", "minimum-3")
    chosen = some(*by_hand)
    found = score(truth, chosen).to_frame()
    assert set(found["entry"]) == set(chosen)
    assert set(found["score"]) == MEANINGS.keys() - MEANINGS_2.keys()
    for name, rows in found.groupby("score"):
        if name not in ("edges cpr", "edges cmd", "shapley spearman"):
            np.testing.assert_allclose(rows["value"], MEANINGS[name][1], atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_random_order_has_the_scores_of_chance():
    entry = HAND["gd-2-dead-heads"]
    orders = [random_order(entry, seed=seed)["edges"] for seed in range(6)]
    found = pd.DataFrame([score_edges(entry, order) for order in orders])
    for name in ("spearman", "kendall", "auroc"):
        values = found[f"edges {name}"]
        assert abs(values.mean() - MEANINGS[f"edges {name}"][2]) < 4 * values.sem()


def test_the_reversed_order_has_the_worst_scores():
    effects = np.abs(LARGE.truth.heads.value)
    found = score_heads(LARGE, 1 / effects)
    assert found["heads spearman"] == pytest.approx(-1)
    assert found["heads auroc"] == 0


def test_circuits_are_built_from_the_most_important_edge_on():
    """Three of the 144 edges carry all that moves."""
    entry = HAND["gd-3-dead-heads"]
    effects = edge_frame(entry, lambda at: entry.truth.edges.value[at])
    first = score_edges(entry, effects)
    last = score_edges(entry, effects.assign(value=1 / (effects["value"].abs() + 1e-3)))
    assert first["edges cmd"] < 0.03
    assert first["edges cpr"] > 0.97
    # Nothing stays up to the last size but one, 92 edges; from there to all 144 the area is a triangle.
    assert last["edges cmd"] == pytest.approx((92 + 52 / 2) / 144)
    assert last["edges cpr"] == pytest.approx(52 / 2 / 144)


def test_signs_orders_and_lengths_of_components_do_not_matter():
    entry = HAND["preprocess-2-rotated"]
    known = entry.truth.components.value
    shuffled = -3 * known[np.random.default_rng(0).permutation(len(known))]
    assert score_components(entry, shuffled)["components cosine"] == pytest.approx(1)
    assert score_components(entry, known[:3])["components cosine"] == pytest.approx(3 / len(known))
    assert components(entry)["components"].shape[1] == known.shape[1]


@pytest.mark.slow
def test_what_a_method_leaves_on_its_model_changes_no_score():
    def careless(entry: Entry) -> dict[str, object]:
        for block in entry.hooked.blocks:
            block.attn.hook_z.add_hook(lambda z, hook: 0 * z, is_permanent=True)
        with torch.no_grad():
            entry.hooked.blocks[0].attn.W_Q.zero_()
        return careful(entry)

    def careful(entry: Entry) -> dict[str, object]:
        return random_order(entry, seed=1)

    chosen = some("gd-2-dead-heads")
    one, other = (score(method, chosen).to_frame() for method in (careful, careless))
    pd.testing.assert_frame_equal(one, other)


def test_a_method_that_says_nothing_scores_nothing():
    heads = np.ones_like(LARGE.truth.heads.value)
    chance = {"heads spearman": 0, "heads kendall": 0, "heads auroc": 0.5}
    assert score_heads(LARGE, heads) == chance
    nothing = score(lambda entry: {}, some("gd-2"))
    assert nothing.to_frame().empty
    assert not len(nothing.plot().data[0].y)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"head": 1}, "head"),
        ({"heads": np.ones((1, 3))}, "3"),
        ({"heads": np.full((2, 1), np.nan)}, "heads"),
        ({"edges": pd.DataFrame({"from": ["L0H0"], "to": ["L1H0.q"], "value": [1.0]})}, "gd-2"),
        ({"edges": pd.DataFrame({"value": [1.0]})}, "value"),
        ({"components": np.ones((1, 3))}, "5 numbers"),
        ({"learning_coefficient": 8.0}, "learning_coefficient"),
        ({"learning_coefficient": (8.0, -1.0)}, "-1.0"),
        ({"learning_coefficient": ("high", 1.0)}, "learning_coefficient"),
        ({"heads": "none"}, "heads"),
        ({"components": "none"}, "components"),
        ([1], "list"),
    ],
)
def test_answers_of_another_form_are_refused(answer: dict[str, object], named: str):
    with refused(named):
        score(lambda entry: answer, some("gd-2"))


def test_a_sampler_is_judged_by_its_bias_and_its_coverage():
    minima = {name: entry for name, entry in HAND.items() if entry.kind == "minimum"}
    exact = {name: entry.truth.learning_coefficient.value for name, entry in minima.items()}

    def off_by_two_errors(entry: Entry, seed: int) -> tuple[float, float]:
        return exact[entry.name] * (1.1 if seed else 0.9), exact[entry.name] / 15

    total = judge_sampler(off_by_two_errors, HAND, seeds=(0, 1)).summary().iloc[-1]
    assert (total["within_1"], total["within_2"], total["estimates"]) == (0, 1, 2 * len(exact))
    assert total["bias"] == pytest.approx(0)
    high = judge_sampler(lambda entry, seed: (2 * exact[entry.name], 1e-3), HAND, seeds=(0,))
    assert high.summary().iloc[-1]["bias"] == pytest.approx(1)
    assert high.summary().iloc[-1]["within_2"] == 0
    refused = judge_sampler(lambda entry, seed: (float("nan"), float("nan")), HAND, seeds=(0,))
    assert refused.summary().iloc[-1]["within_2"] == 0


def test_the_estimator_of_this_package_is_judged_as_it_is():
    """Few draws: only the call is of interest, and that the numbers are those of the function itself."""
    chosen = some("gd-2", "minimum-2")
    chains = {"n_chains": 4, "n_draws": 20, "n_warmup": 10}
    estimator = partial(local_learning_coefficient, chains=chains)
    row = judge_sampler(estimator, chosen, seeds=(3,)).to_frame().iloc[0]
    own = local_learning_coefficient(chosen["minimum-2"].checkpoint, chains=chains, seed=3)
    assert (row["entry"], row["estimate"], row["sem"]) == ("minimum-2", own.estimate, own.sem)
    assert row["exact"] == own.exact
    assert len(inspect.signature(local_learning_coefficient).parameters) <= 9


def test_a_sampler_may_say_what_it_costs():
    judged = judge_sampler(lambda entry, seed: (8.0, 1.0, 500), HAND, seeds=(0,))
    assert judged.summary().iloc[-1]["gradients"] == 500
    silent = judge_sampler(lambda entry, seed: (8.0, 1.0), HAND, seeds=(0,))
    assert np.isnan(silent.summary().iloc[-1]["gradients"])


@pytest.mark.parametrize("answer", [8.0, (8.0,), ("high", 1.0), (1.0, 2.0, 3.0, 4.0), None])
def test_a_sampler_that_gives_something_else_is_refused(answer: object):
    with refused("estimate, standard error"):
        judge_sampler(lambda entry, seed: answer, HAND, seeds=(0,))
    with refused("standard error", "-1"):
        judge_sampler(lambda entry, seed: (1.0, -1.0), HAND, seeds=(0,))


def test_without_an_estimate_there_is_nothing_to_judge():
    for entries, seeds in ((HAND, ()), (some("gd-2"), (0,))):
        with refused("at least one estimate"):
            judge_sampler(lambda entry, seed: (8.0, 1.0), entries, seeds=seeds)


METHOD = """
def by_output(entry):
    return {"heads": entry.checkpoint.weights.W_O.square().sum((-2, -1)).numpy()}
"""


@pytest.mark.slow
def test_a_method_of_ones_own_is_scored_from_another_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "mine.py").write_text(METHOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    document = (
        run("score", "mine:by_output", "--suite", "1", "--trained", "none", "--json")
        .done()
        .document
    )
    scores = {row["score"]: row for row in document["scores"]}
    assert scores["heads spearman"]["mean"] > 0
    assert document["suite"]["sha256"] == HAND.hash
    assert document["suite"]["entries"] == len(HAND)


def test_the_command_refuses_what_is_not_there(run: Run):
    run("score", "nowhere:method").assert_refused("nowhere")
    run("score", "json:dumps", "--suite", "7").assert_refused("version", "7")


def test_auroc_is_scikit_learns():
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.integers(0, 4, 12).astype(float)
        positive = np.arange(12) < rng.integers(1, 11)
        assert auroc(positive, values) == pytest.approx(roc_auc_score(positive, values), abs=1e-15)


@pytest.mark.parametrize(("off", "within"), [(-1.9, 1), (1.9, 1), (2.1, 0), (-2.1, 0)])
def test_a_coefficient_within_two_standard_errors_counts(off: float, within: int):
    entry = HAND["minimum-2"]
    exact = entry.truth.learning_coefficient.value
    found = score_learning_coefficient(entry, (exact + off * 0.1, 0.1))
    assert found == {
        "coefficient error": pytest.approx(off * 0.1 / exact),
        "coefficient within 2 sem": within,
    }
