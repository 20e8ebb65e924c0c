"""Tables of methods: variants and seeds of a model are one family, and a mean is over families."""

import pandas as pd
import pytest

from analyses.known.tables import VARIANT, _cell


def test_a_mean_is_over_families():
    values = pd.Series([1.0, 1.0, 1.0, 0.0, None])
    assert _cell(values, pd.Series(["a", "a", "a", "b", "c"])) == "0.50 ± 0.50 (2)"
    assert _cell(values, pd.Series(["a"] * 5)) == "0.75 (1)"
    assert _cell(values[4:], pd.Series(["a"] * 5)) == "–"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gd-3", "gd-3"),
        ("gd-3-rotated", "gd-3"),
        ("gd-3-noise-0.05", "gd-3"),
        ("gd-2-dead-heads", "gd-2"),
        ("softmax-h2-s2", "softmax-h2"),
        ("sparse-h4-noise0.1-s0", "sparse-h4-noise0.1"),
        ("singular-rank1-h2", "singular-rank1-h2"),
    ],
)
def test_variants_and_seeds_have_the_name_of_their_model(name: str, family: str):
    assert VARIANT.sub("", name) == family
