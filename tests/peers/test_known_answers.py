"""Attribution and alignment by other libraries, through adapters of a few lines, are those of the scripts of known answers."""

import numpy as np
import pytest

from analyses.known.alignment import alignment
from analyses.known.gradients import integrated, patching_in
from analyses.known.peers import captum_integrated, nnsight_patching_in, pyvene_alignment
from mechinterp.known import suite
from mechinterp.known.agreement import score_subspaces
from mechinterp.known.variables import angle_score

FEW = ("gd-3-rotated", "debiased-two-pairs", "garg-tiny-s0")
"""Linear attention, softmax, and a model with MLPs and norms."""
STEPS = 40
"""Steps of training that are compared."""


@pytest.mark.parametrize("name", ["gd-3-rotated", "debiased-two-pairs", "sparse-h4-noise0.1-s0"])
def test_integrated_gradients_of_heads_agree(name: str):
    pytest.importorskip("captum.attr", reason="`make test-peers` brings captum")
    entry = suite(1)[name].without_truth
    expected = integrated(entry)["heads"]
    found = captum_integrated(entry)["heads"]
    # captum weighs its points in float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", FEW)
def test_attribution_patching_of_edges_and_heads_agrees(name: str):
    pytest.importorskip("nnsight", reason="`make test-peers` brings nnsight")
    entry = suite(1)[name].without_truth
    expected, found = patching_in(entry), nnsight_patching_in(entry)
    for what in ("edges", "heads"):
        bound = 1e-12 * np.abs(expected[what]).max()
        np.testing.assert_allclose(found[what], expected[what], rtol=0, atol=bound, err_msg=what)


@pytest.mark.parametrize("name", ["gd-3-rotated", "gd-plus-plus-2", "tanh-h2-s0"])
def test_distributed_alignment_takes_the_same_steps(name: str):
    """One variable at the query, one at all positions, and a trained model."""
    pytest.importorskip("pyvene", reason="`make test-peers` brings pyvene")
    entry = suite(2)[name]
    expected, found = (
        method(entry.without_truth, steps=STEPS)["subspace"]
        for method in (alignment, pyvene_alignment)
    )
    assert found.keys() == expected.keys()
    for variable, basis in expected.items():
        assert angle_score(found[variable], basis) == pytest.approx(1, abs=1e-9)
    scores = [score_subspaces(entry, each)["subspace interchange"] for each in (expected, found)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-9)
