"""What docs/algorithms.md says of labels is what was measured."""

from pathlib import Path

import pandas as pd
import pytest

from analyses.algorithms import calibration, shipped
from analyses.algorithms import models as algorithm_models
from mechinterp.analysis.multi_layer.algorithm import name_algorithm

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
    tuned, confirmed = (MODELS[MODELS.half == half] for half in ("tuning", "confirming"))
    assert not set(zip(tuned.family, tuned.seed, strict=True)) & set(
        zip(confirmed.family, confirmed.seed, strict=True)
    )
    assert not set(tuned.family) & set(algorithm_models.CONFIRMED_ONLY)
    assert set(algorithm_models.CONFIRMED_ONLY) < set(confirmed.family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["half GD, half Newton", "half Newton, half ISTA"])
def test_half_of_one_and_half_of_another_gets_no_label(family: str):
    (case,) = [each for each in algorithm_models.cases([5]) if each.family == family]
    row = MODELS[(MODELS.family == family) & (MODELS.seed == 5)].iloc[0]
    found = name_algorithm(case.source, task=case.task, seed=case.seed)
    assert found.label == row.label == "undetermined"


def test_half_of_the_near_misses_were_kept_for_the_confirming_half():
    """As many families as the rules were set on, and 64 or more in all."""
    near = [
        name
        for name, (truth, *_) in algorithm_models.FAMILIES.items()
        if truth == algorithm_models.NONE
    ]
    kept = set(near) & set(algorithm_models.CONFIRMED_ONLY)
    assert len(algorithm_models.FAMILIES) >= 64
    assert len(kept) >= 0.45 * len(near)


def test_every_shipped_model_of_several_layers_has_one_answer():
    assert set(SHIPPED.checkpoint) == set(shipped.deep_checkpoints())
    assert (SHIPPED.groupby("checkpoint").label.nunique() == 1).all()


def test_exact_descent_with_summed_scores_is_right_and_softmax_pairs_are_no_gd_plus_plus():
    exact = MODELS[MODELS.family == "weights: summed scores, exact"]
    assert len(exact) >= 32
    assert (exact.label == "gradient_descent").all()
    pairs = MODELS[MODELS.family.str.contains("softmax pairs")]
    assert set(pairs.label) == {"undetermined"}
