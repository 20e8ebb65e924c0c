"""Means of methods: variants and seeds of a model are one family, and a mean is over families."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analyses.known import contents, matrix
from analyses.known.matrix import CMD, PAIRS, VARIANT, differences, over_families
from analyses.known.tables import cell
from analyses.lib.measured import RESULTS


def test_a_mean_is_over_families():
    values = pd.Series([1.0, 1.0, 1.0, 0.0, None]).dropna()
    found = over_families(values, pd.Series(["a", "a", "a", "b", "c"]))
    assert found == {"mean": 0.5, "sem": 0.5, "families": 2, "entries": 4}
    assert cell(pd.DataFrame([found])) == "0.50 ± 0.50 (2)"
    alone = over_families(values, pd.Series(["a"] * 5))
    assert alone == {"mean": 0.75, "sem": None, "families": 1, "entries": 4}
    assert cell(pd.DataFrame([alone])) == "0.75 (1)"
    assert cell(pd.DataFrame([alone]).iloc[1:]) == "–"


@pytest.mark.parametrize(("score", "better"), [("heads in spearman", 1), (CMD, 2)])
def test_a_difference_is_paired_and_a_small_cmd_is_better(score: str, better: int):
    first, second = PAIRS[0]
    scores = {first: [0.9, 0.5, 0.1, 0.4], second: [0.5, 0.6, 0.3, 0.4]}
    rows = [
        {"method": method, "entry": f"m-s{n}", "family": f"{n // 2}", "group": "deep", score: value}
        for method, values in scores.items()
        for n, value in enumerate(values)
    ]
    every = [{"method": m} for pair in PAIRS for m in pair]
    frame = pd.DataFrame(rows + [each | {"entry": "x", "group": "deep"} for each in every])
    frame = frame.drop_duplicates(["method", "entry"])
    found = next(row for row in differences(frame) if row["second"] == second)
    # (0.4 - 0.1) / 2 in one family, -0.1 in the other.
    assert found["mean"] == pytest.approx(0.025)
    assert (found["families"], found["entries"]) == (2, 4)
    assert (found["better"], found["tied"]) == (better, 1)


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


@pytest.mark.parametrize("script", [matrix, contents])
def test_the_results_are_those_of_the_submissions_and_of_the_suite(script):
    file: Path = RESULTS / f"known_{script.__name__.rsplit('.', 1)[1]}.csv"
    stored, found = pd.read_csv(file), script.measure(quick=False).data
    assert list(found) == list(stored)
    for name, column in stored.items():
        if pd.api.types.is_float_dtype(column):
            own = found[name].astype(float)
            np.testing.assert_allclose(own, column, rtol=1e-5, atol=1e-12, err_msg=str(name))
        else:
            same = found[name].fillna("").astype(str) == column.fillna("").astype(str)
            assert same.all(), name
