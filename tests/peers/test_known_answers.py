"""captum's integrated gradients of heads, by an adapter of a few lines, are those of the script of known answers."""

import numpy as np
import pytest

from analyses.known.gradients import integrated
from analyses.known.peers import captum_integrated
from mechinterp.known import suite

pytest.importorskip("captum.attr", reason="`make test-peers` brings captum")


@pytest.mark.parametrize("name", ["gd-3-rotated", "debiased-two-pairs", "sparse-h4-noise0.1-s0"])
def test_integrated_gradients_of_heads_agree(name: str):
    entry = suite(1)[name].without_truth
    expected = integrated(entry)["heads"]
    found = captum_integrated(entry)["heads"]
    # captum weighs its points in float32.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
