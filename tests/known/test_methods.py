"""Attribution by gradients, learned masks and masking on the suite: each equals a second way to compute it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.known.alignment import ASKED, alignment, alignment_of_asked, interchange
from analyses.known.gradients import (
    FINE_STEPS,
    PAPER_STEPS,
    eap_ig_activations,
    eap_ig_inputs,
    integrated,
    own_inputs,
    pair_of,
    patching_in,
    patching_out,
)
from analyses.known.masking import masking, random_order, shapley
from analyses.known.methods import SUBMISSIONS, file_of, methods_of, submit
from analyses.known.pruning import (
    LEFT,
    RIGHT,
    TEMPERATURE,
    MaskedRun,
    edge_pruning,
    hard_concrete,
    share_of_step,
)
from mechinterp import attribute_edges
from mechinterp.analysis.patching.circuit import circuit_output
from mechinterp.analysis.patching.edges_by_hooks import estimated_effects
from mechinterp.known import Entry, Suite, read_submission, suite
from mechinterp.known.agreement import score_subspaces
from mechinterp.known.truth import KINDS
from mechinterp.known.variables import angle_score, interchanged
from mechinterp.models.hooked.masks import z_name

ALL = suite(1)
SECOND = suite(2, trained="none")
FEW = ("gd-3-rotated", "debiased-two-pairs", "garg-tiny-s0")
"""Linear attention, softmax, and a model with MLPs and norms."""


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("method", "steps"), [(patching_in, 1), (integrated, FINE_STEPS)])
def test_first_order_effects_of_edges_are_those_of_the_package(
    name: str, method: Callable[[Entry], dict], steps: int
):
    """The package takes the gradient through each receiver, and not at copies of the stream."""
    entry = ALL[name]
    clean, corrupted = entry.pairs
    other = attribute_edges(
        entry.checkpoint, clean, corrupted=corrupted, nodes="all", ig_steps=steps
    ).estimate
    expected = other[~np.isnan(other)]
    found = method(entry)["edges"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("name", FEW)
def test_eap_ig_of_inputs_is_the_mean_of_estimates_at_its_points(name: str):
    """The points are 1/5, 2/5, ..., 1 of the way to the clean prompts."""
    pair = pair_of(ALL[name])
    total = 0
    for k in range(1, PAPER_STEPS + 1):
        at = torch.lerp(pair.corrupted, pair.clean, k / PAPER_STEPS)
        total = total + estimated_effects(replace(pair, corrupted=at), 1).mean(0) / PAPER_STEPS
    expected = total[pair.edges]
    found = eap_ig_inputs(ALL[name])["edges"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("name", FEW[:2])
def test_patching_out_is_exact_for_what_is_last(name: str):
    """Without a norm or an MLP after it, the prediction is linear in what the last layer of heads writes."""
    entry = ALL[name]
    pair = pair_of(entry)
    hooked, last = pair.hooked.model, pair.hooked.n_layers - 1
    names = [z_name(last)]
    with torch.no_grad():
        z = [pair.hooked.run_noting(t, names)[1][names[0]] for t in (pair.clean, pair.corrupted)]
        expected = []
        for head in range(pair.hooked.n_heads):
            changed = z[0].clone()
            changed[:, :, head] = z[1][:, :, head]
            output = hooked.run_with_hooks(
                pair.clean, fwd_hooks=[(names[0], lambda own, hook, put=changed: put)]
            )
            expected.append(-pair.metric(output).mean().item())
    np.testing.assert_allclose(patching_out(entry)["heads"][last], expected, atol=1e-12)


def test_eap_ig_of_activations_by_hand():
    """One layer of softmax heads, which alone write y: a lerp of their outputs is a lerp of the prediction."""
    entry = ALL["debiased-two-pairs"]
    pair = pair_of(entry)
    predict = lambda tokens: pair.hooked.read(pair.hooked.model(tokens))  # noqa: E731
    with torch.no_grad():
        clean, corrupted = predict(pair.clean), predict(pair.corrupted)
        slopes = []
        for k in range(1, PAPER_STEPS + 1):
            share = k / PAPER_STEPS
            slopes.append(-2 * (predict(torch.lerp(pair.corrupted, pair.clean, share)) - clean))
            slopes.append(-2 * (torch.lerp(corrupted, clean, share) - clean))
        slope = torch.stack(slopes).mean(0)
    senders = [node.name for node in pair.senders]
    edges = dict(
        zip(zip(*edge_names(pair), strict=True), eap_ig_activations(entry)["edges"], strict=True)
    )
    for head in range(4):
        moved = pair.moved[:, -1, senders.index(f"L0H{head}"), -entry.task.d_y :]
        expected = (moved * slope).sum(-1).mean().item()
        assert edges[f"L0H{head}", "output"] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def edge_names(pair) -> tuple[list[str], list[str]]:
    places = np.argwhere(pair.edges)
    return [pair.senders[u].name for u, _ in places], [pair.receivers[v].name for _, v in places]


@pytest.mark.parametrize("name", FEW)
def test_a_mask_of_zeros_and_ones_is_a_circuit(name: str):
    pair = pair_of(ALL[name])
    masked, rng = MaskedRun(pair), np.random.default_rng(0)
    kept = np.zeros(pair.edges.shape, dtype=bool)
    kept[pair.edges] = rng.random(pair.edges.sum()) < 0.7
    expected = -pair.metric(circuit_output(pair, kept)).mean() / masked.scale
    with own_inputs(pair.hooked.model), torch.no_grad():
        found = masked.distance(torch.from_numpy(kept[pair.edges]).double())
        none, every = (masked.distance(torch.full((int(pair.edges.sum()),), k)) for k in (0.0, 1.0))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(none, torch.ones_like(none), rtol=1e-9, atol=0)
    assert every < 1e-20


def test_the_hard_concrete_distribution_has_its_atoms():
    """P(z = 0) = sigmoid(T log(-l / r) - a), and P(z = 1) the same for -a, with r - 1 = -l."""
    logits = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    n = 100_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5)[:, None] / n
    z = hard_concrete(uniform, logits)
    shift = TEMPERATURE * np.log(-LEFT / RIGHT)
    for found, sign in (((z == 0).double().mean(0), 1), ((z == 1).double().mean(0), -1)):
        expected = (shift - sign * logits).sigmoid()
        assert (found - expected).abs().max() < 2 / n


def test_the_step_size_rises_and_falls():
    shares = [share_of_step(step, steps=720) for step in range(720)]
    assert np.argmax(shares) in (95, 96)
    assert max(shares) <= 1.02
    assert min(shares) > 0


@pytest.mark.slow
def test_edge_pruning_keeps_live_edges_longest():
    """Half of the heads are dead: none of their edges may rank above all edges that carry something."""
    entry = ALL["gd-2-dead-heads"]
    found = edge_pruning(entry, steps=200)["edges"]
    pair = pair_of(entry)
    effects = patching_out(entry)["edges"]
    assert found.shape == (pair.edges.sum(),)
    assert effects[np.argmax(found)] > 0.01 * effects.max()
    again = edge_pruning(entry, steps=200)["edges"]
    np.testing.assert_array_equal(found, again)


@pytest.mark.parametrize("method", ["zero", "mean", "resample"])
def test_masking_finds_the_dead_heads(method: str):
    entry = ALL["gd-3-dead-heads"]
    found = masking(entry, method=method)["heads"]
    live = np.abs(entry.truth.heads.value) > 1e-12
    assert np.abs(found[~live]).max() < 1e-12
    assert (np.abs(found[live]) > 1e-6).all()
    if method == "zero":
        values = shapley(entry)["heads"]
        assert np.abs(values[~live]).max() < 1e-12


def test_random_orders_differ_by_entry_and_seed():
    one, other = (ALL[name] for name in ("gd-2-dead-heads", "gd-2-rotated"))
    values = [random_order(e, seed=s)["edges"][0] for e in (one, other) for s in (0, 1)]
    assert len(set(values)) == 4


@pytest.mark.parametrize("name", ["gd-3-rotated", "gd-plus-plus-2"])
def test_interchange_while_training_is_that_of_the_score(name: str):
    entry = SECOND[name]
    variable, (base, source) = entry.variables[0], entry.base_and_source
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((variable.basis.shape[1], variable.size))).Q.T
    expected = interchanged(entry.hooked, variable, basis, base, source)
    hooked = entry.hooked
    with torch.no_grad():
        _, cache = hooked.run_with_cache(hooked.tokens(source))
        noted, given = cache[variable.hook], torch.from_numpy(basis)
        output = hooked.run_with_hooks(
            hooked.tokens(base),
            fwd_hooks=[
                (
                    variable.hook,
                    lambda own, hook: interchange(
                        own, hook, source=noted, basis=given, at=variable.at
                    ),
                )
            ],
        )
    torch.testing.assert_close(output[:, -1], expected, rtol=1e-12, atol=1e-12)
    assert (expected - hooked.predict(base)).abs().max() > 1e-3


def test_a_wide_model_is_searched_and_scored_in_its_own_width():
    """The model is wider than the one that computes its variables exactly."""
    entry = SECOND["wide-gd-2"]
    found = alignment(entry.without_truth, steps=2)["subspace"]
    assert {basis.shape for basis in found.values()} == {(1, 12)}
    assert 0 <= score_subspaces(entry, found)["subspace cosine"] < 1
    true = score_subspaces(entry, entry.truth.variables.value)
    assert true["subspace interchange"] == pytest.approx(1)
    control = SECOND["random-wide-gd-2"]
    random = alignment(control.without_truth, steps=2)["subspace"]
    assert "subspace control" in score_subspaces(control, random)


@pytest.mark.slow
def test_distributed_alignment_finds_the_prediction_of_a_rotated_model():
    """The subspace has one dimension of five: a random direction has a squared cosine of 0.2."""
    entry = SECOND["gd-2-rotated"]
    found = alignment(entry.without_truth)["subspace"]
    known = entry.truth.variables.value
    assert found.keys() == known.keys()
    assert all(angle_score(found[name], known[name]) > 0.99 for name in known)


@pytest.mark.slow
def test_every_method_is_scored_and_each_truth_is_best_on_itself(tmp_path: Path):
    chosen = Suite(2, {name: SECOND[name] for name in ("gd-2-dead-heads",)})
    methods = methods_of(chosen)
    for kind in KINDS:
        file = submit(f"exact, {kind}", methods[f"exact, {kind}"], chosen, tmp_path)
        assert file.name == f"exact-{kind}.json"
        values = read_submission(file).to_frame().set_index("score")["value"]
        assert values[f"heads {kind} spearman"] == pytest.approx(1)
    for name in methods:
        if not name.startswith(("exact", "edge", "distributed")):
            found = read_submission(submit(name, methods[name], chosen, tmp_path))
            assert len(found.to_frame())
            assert found.method == name


def test_distributed_alignment_was_run_on_the_entries_that_it_is_asked_about():
    read = read_submission(file_of(SUBMISSIONS, "distributed alignment"))
    assert set(read.to_frame()["entry"]) == ASKED
    assert alignment_of_asked(SECOND["gd-2-rotated"]) == {}
