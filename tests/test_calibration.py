"""Calibrations of labels: confirming models and their labels are those stored, and the tables count them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

from analyses.algorithms import calibration as algorithm_calibration
from analyses.algorithms import models as algorithm_models
from analyses.calibration import errors as calibration
from analyses.calibration import fresh
from analyses.calibration.models import ONE, Case, confirming, earlier, random_steps
from analyses.calibration.plain_training import Setting
from analyses.lib.measured import RESULTS
from analyses.lib.result_tables import two_by_two
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.checkpoints.load import load
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head
from tests.conftest import CHECKPOINTS

EVERY = 60  # `make analyses-check` labels all of them


def frame_of(*rows: tuple[str, str, str]) -> pd.DataFrame:
    """Models by truth, demand and verdict."""
    frame = pd.DataFrame(rows, columns=["truth", "demand", "verdict"])
    return frame.assign(source="built", size=0.1, label="")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_confirming_models_and_their_labels_are_those_stored():
    """Whoever edits the rules of labels leaves these as they are, or draws other models, as README.md says."""
    stored = pd.read_csv(RESULTS / "calibration_models.csv")
    models = confirming()
    assert [case.source for case in models] == stored.source.tolist()
    assert [case.truth for case in models] == stored.truth.tolist()
    again = calibration.labelled(models[::EVERY])
    pd.testing.assert_frame_equal(again, stored[::EVERY].reset_index(drop=True), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_confirming_model_is_an_earlier_one():
    def norms(models: list[Case]) -> set[float]:
        return {round(float(case.weights.QK.norm() / case.weights.OV.norm()), 9) for case in models}

    assert not norms(confirming()) & norms(earlier())


def test_random_steps_descend_in_no_direction_on_average():
    for case in random_steps(5, np.random.default_rng(0)):
        QK = case.weights.QK[0, :5, :5]
        assert float(QK.trace()) == pytest.approx(0, abs=1e-12)
        assert case.weights.model.score_slope == 1 / ONE.context_length


def test_a_label_that_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step, kernel = debiased_gradient_step(0.88, 0.05, d_x=5), kernel_head(0.5, 1.5, d_x=5)
    cases = [
        Case("built", "debiased_gd", step, ONE, 0.0, "must"),
        Case("built", "kernel_regression", kernel, ONE, 0.0, "must"),
    ]
    monkeypatch.setattr(calibration, "confirming", lambda: cases)
    frame = calibration.labelled(cases)
    assert frame.verdict.tolist() == ["right", "right"]
    frame.to_csv(tmp_path / "calibration_models.csv", index=False)
    assert calibration.changed_labels(tmp_path) == []
    frame.assign(label=["debiased_gd", "superposition"]).to_csv(
        tmp_path / "calibration_models.csv", index=False
    )
    (line,) = calibration.changed_labels(tmp_path)
    assert all(word in line for word in ("model 1", "kernel_regression", "superposition"))
    frame[:1].to_csv(tmp_path / "calibration_models.csv", index=False)
    assert "2 confirming models, stored: 1" in calibration.changed_labels(tmp_path)[0]


@pytest.mark.parametrize("which", ["fresh", "second"])
def test_tables_of_fresh_models_count_their_labels(which: str):
    models = pd.read_csv(RESULTS / f"calibration_{which}_models.csv")
    stored = pd.read_csv(RESULTS / f"calibration_{which}_errors.csv")
    pd.testing.assert_frame_equal(fresh.errors(models), stored, rtol=1e-5)
    whole = stored.set_index("source").loc["all"]
    interval = binomtest(int(whole.wrong), int(whole.named)).proportion_ci(method="exact")
    assert (whole.low, whole.high) == pytest.approx((interval.low, interval.high), rel=1e-5)


def test_near_misses_of_the_fresh_set_do_not_descend():
    """Truths of built models, computed again: matrices without a pattern ascend or leave a direction out."""
    random = np.random.default_rng(0)
    task = fresh.tasks(4, 16)[0]
    for kind, most in (("shift", 0), ("free", 0), ("turned", 0), ("half", 1e-9), ("up", 0)):
        weights = fresh.pair(fresh.ascending(kind, task, random), task, random)
        step = torch.einsum("hn,hij->nij", weights.mu, weights.QK[:, :4, :4])
        values = torch.linalg.eigvalsh(step[0] + step[0].mT)
        assert values[0] <= most * values[-1]
    even = fresh.pair(fresh.best_step(task), task, random)
    step = torch.einsum("hn,hij->nij", even.mu, even.QK[:, :4, :4])[0]
    assert torch.linalg.eigvalsh(step)[0] > 0


def test_the_truth_of_a_trained_model_comes_from_its_predictions():
    setting = Setting("softmax", 3, 24, 2)
    QK = torch.zeros(2, 4, 4, dtype=torch.float64)
    OV = torch.zeros(2, 4, 1, dtype=torch.float64)
    QK[0, :3, :3] = torch.eye(3) * 0.05
    OV[:, 3, 0] = torch.tensor([8.0, -8.0])
    assert set(fresh.truths(setting, torch.stack([QK[0], -QK[0]]), OV)) == {
        "debiased_gd",
        "preconditioned_gd",
    }
    up = torch.diag(torch.tensor([1.0, 1.0, -0.5, 0])).double() * 0.05
    assert fresh.truths(setting, torch.stack([up, -up]), OV) == ()
    one = Setting("softmax", 3, 24, 1)
    assert fresh.truths(one, 10 * QK[:1], OV[:1]) == ("kernel_regression",)


def test_wrong_labels_are_divided_by_the_named():
    rows = [("debiased_gd", "may", "right")] * 9 + [("debiased_gd", "none", "wrong")]
    rows += [("debiased_gd", "may", "undetermined")] * 90 + [("no pattern", "none", "undetermined")]
    found = calibration.errors(frame_of(*rows)).set_index("truth")
    assert found.loc["debiased_gd", ["models", "named", "wrong"]].tolist() == [100, 10, 1]
    interval = binomtest(1, 10).proportion_ci(method="wilson")
    assert found.wrong_rate["debiased_gd"] == 0.1
    assert found.loc["debiased_gd", ["low", "high"]].tolist() == [interval.low, interval.high]
    assert np.isnan(found.wrong_rate["no pattern"])


def test_models_without_a_pattern_have_a_row_of_their_own(tmp_path: Path):
    rows = [("debiased_gd", "must", "right"), ("debiased_gd", "must", "missed")]
    rows += [("debiased_gd", "may", "right"), ("debiased_gd", "none", "wrong")]
    rows += [("no pattern", "none", "wrong"), ("no pattern", "none", "undetermined")]
    frame_of(*rows).to_csv(tmp_path / "calibration_models.csv", index=False)
    cells = [line.split(" | ") for line in two_by_two(tmp_path).splitlines()[2:]]
    assert [row[1] for row in cells] == ["1", "2", "1"]
    assert [row[2].split(" (")[0] for row in cells] == ["0 of 1", "1 of 2", "1 of 1"]
    assert [row[3].rstrip(" |") for row in cells] == ["1", "0", "1"]


# Algorithms of several layers: the numbers on docs/results/algorithms.md are those that were measured.


MODELS, RATES = (
    pd.read_csv(RESULTS / "algorithms" / f"algorithm_calibration_{name}.csv")
    for name in ("models", "rates")
)


def test_the_rates_are_those_of_the_models():
    pd.testing.assert_frame_equal(algorithm_calibration.rates(MODELS), RATES, rtol=1e-5)
    assert not MODELS.duplicated(["family", "seed"]).any()


def test_no_limit_was_set_on_what_was_confirmed():
    families = {half: set(each.family) for half, each in MODELS.groupby("half")}
    assert families["confirming"] == set(algorithm_models.CONFIRMED_ONLY)
    assert families["later"] == set(algorithm_models.LATER)
    assert families.get("after", set()) <= set(algorithm_models.AFTER)
    others = families["confirming"] | families["later"] | set(algorithm_models.AFTER)
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
        ("Chebyshev", "undetermined", "layers"),
        ("steps by the size of y", "undetermined", "identity"),
    ],
)
def test_a_model_of_each_rule_gets_its_stored_label_again(family: str, label: str, why: str):
    (case,) = algorithm_models.cases([0], [family])
    row = MODELS[(MODELS.family == family) & (MODELS.seed == 0)].iloc[0]
    found = name_algorithm(case.source, task=case.task, seed=case.seed)
    assert found.label == label == row.label, found.reason
    # Rules on read-outs and on noise came later, and are asked before rivals and rests.
    assert found.why == why or (why in ("rival", "rest") and found.why in ("factor", "noise"))


def test_exact_descent_with_summed_scores_is_right_and_softmax_pairs_are_no_gd_plus_plus():
    exact = MODELS[MODELS.family == "weights: summed scores, exact"]
    assert len(exact) >= 32
    assert (exact.label == "gradient_descent").all()
    pairs = MODELS[MODELS.family.str.contains("softmax pairs")]
    assert set(pairs.label) == {"undetermined"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["garg-tiny-s0", "pool-gpt2-none-s0", "sparse-h4-noise0.1-s0"])
def test_shipped_models_keep_their_labels_behind_the_gate(name: str):
    """Models with positions are asked for their response first; it reads no learner along the pairs."""
    stored = pd.read_csv(RESULTS / "algorithms" / "algorithm_shipped.csv")
    row = stored[(stored.checkpoint == name) & (stored.seed == 0)].iloc[0]
    found = name_algorithm(load(CHECKPOINTS / name), seed=0)
    assert (found.label, found.function) == (row.label, row.function)
    gate = found.measured.gate
    assert gate is None or not gate.along
    assert (gate is None) == name.startswith("sparse")
