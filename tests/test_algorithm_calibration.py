"""The numbers on docs/results/algorithms.md are those that were measured."""

from pathlib import Path

import pandas as pd
import pytest

from analyses.algorithms import calibration
from analyses.algorithms import models as algorithm_models
from mechinterp.analysis.multi_layer.naming import name_algorithm

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "analyses" / "results" / "algorithms"
MODELS, RATES, SHIPPED = (
    pd.read_csv(RESULTS / f"algorithm_{name}.csv")
    for name in ("calibration_models", "calibration_rates", "shipped")
)


def test_the_rates_are_those_of_the_models():
    pd.testing.assert_frame_equal(calibration.rates(MODELS), RATES, rtol=1e-5)
    assert not MODELS.duplicated(["family", "seed"]).any()


def test_no_limit_was_set_on_what_was_confirmed():
    families = {half: set(each.family) for half, each in MODELS.groupby("half")}
    assert families["confirming"] == set(algorithm_models.CONFIRMED_ONLY)
    assert families["later"] == set(algorithm_models.LATER)
    others = families["confirming"] | families["later"]
    assert families["tuning"] == set(algorithm_models.FAMILIES) - others
    assert len(families["later"]) == 20


@pytest.mark.parametrize(("half", "least"), [("confirming", 56), ("later", 36)])
def test_near_misses_get_no_name_and_algorithms_get_theirs(half: str, least: int):
    models = MODELS[MODELS.half == half]
    near = models.truth == algorithm_models.NONE
    assert near.sum() >= least
    assert models[near].family.nunique() >= 12
    assert (models[near].verdict == "wrong").sum() <= 2
    assert not models[~near].verdict.isin(["wrong", "missed"]).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "label", "why"),
    [
        ("weights: summed scores, exact", "gradient_descent", "mechanism"),
        ("function: 1.05 times gradient descent", "gradient_descent", "mechanism"),
        ("descent, scaled read-out", "undetermined", "rival"),
        ("weights: random", "unstructured", "useless"),
        ("softmax pairs, small slope", "undetermined", "rest"),
        ("GD, then Algorithm 1", "undetermined", "rest"),
        ("ridge with an estimated penalty", "undetermined", "rest"),
        ("hard thresholding", "undetermined", "layers"),
    ],
)
def test_a_model_of_each_rule_gets_its_stored_label_again(family: str, label: str, why: str):
    (case,) = [each for each in algorithm_models.cases([0]) if each.family == family]
    row = MODELS[(MODELS.family == family) & (MODELS.seed == 0)].iloc[0]
    found = name_algorithm(case.source, task=case.task, seed=case.seed)
    assert (found.label, found.why) == (label, why) == (row.label, why), found.reason


def test_exact_descent_with_summed_scores_is_right_and_softmax_pairs_are_no_gd_plus_plus():
    exact = MODELS[MODELS.family == "weights: summed scores, exact"]
    assert len(exact) >= 32
    assert (exact.label == "gradient_descent").all()
    pairs = MODELS[MODELS.family.str.contains("softmax pairs")]
    assert set(pairs.label) == {"undetermined"}
