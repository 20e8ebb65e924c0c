"""The three lines on a model: formula, certainty and runner-up, with the numbers of the result."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.circuits.thresholds import Thresholds
from mechinterp.analysis.learners.algorithm_labels import ALIKE, LARGER
from mechinterp.analysis.learners.layers_verdict import FORMULAS, NAMES
from mechinterp.analysis.learners.standing import nearby
from mechinterp.analysis.verdict import KNOWN, KNOWN_ALGORITHMS, WORDS, explained, spelled_out
from mechinterp.checkpoints.loading import load
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions import debiased_gradient_step
from mechinterp.models.constructions_algorithms import gradient_descent_model
from tests.conftest import CHECKPOINTS

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


@pytest.fixture(scope="module")
def step():
    return classify(debiased_gradient_step(0.7, 0.05, d_x=5))


def test_a_step_is_told_with_its_size_and_the_best_one(step):
    assert "x minus its mean x̄ (debiased_gd): ŷ = 0.700 (1/L) Σ_l y_l (x_l − x̄)·x" in (
        step.verdict.computes
    )
    assert step.verdict.computes.endswith("the best for its task is 0.879")
    assert f"explains {explained(step.learner.r2, step.learner.r2_sem)} of" in step.verdict.sure
    assert (
        f"the label was wrong for 0 of {KNOWN['debiased_gd'][1]} test models" in step.verdict.sure
    )
    assert f"p < {1 / step.n_random:.2g}" in step.verdict.sure


def test_with_other_limits_nothing_is_said_of_the_calibration():
    limits = Thresholds(omega_spread=0.5)
    found = classify(debiased_gradient_step(0.7, 0.05, d_x=5), thresholds=limits)
    assert "wrong" not in found.verdict.sure


def test_the_runner_up_is_no_case_of_the_pattern(step):
    assert step.near.learners[0] == "debiased_gd"
    assert step.verdict.is_not.startswith("a plain gradient step, the runner-up: R² = ")
    assert step.near.lead[1] > 2 * step.near.lead_sem[1]
    assert step.verdict.is_not.endswith(" below")


def test_the_repr_and_the_lines_are_the_verdict(step):
    assert repr(step).splitlines() == [
        "Classification(debiased_gd)",
        *str(step.verdict).splitlines(),
        f"Loss on its task: {step.loss}.",
    ]
    assert list(step.verdict.lines) == ["What it computes", "How sure", "What it is not"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "softmax-h1-s0",
            [
                "ŷ = -1.50 Σ_l w_l y_l, w_l ∝ exp(-0.519 x_l·x)",
                "{} of {}".format(*KNOWN["kernel_regression"]),
            ],
        ),
        ("softmax-h2-s8", ["Σ_h μ_h", "μ = 0.643, ω = 0.560; μ = 0.824, ω = 0.532"]),
        (
            "two-tasks-h3-s0",
            [
                "Θ_0 = diag(0.89, 0.91, 0.90, 0.93, 0.03, 0.03)",
                "{} of {}".format(*KNOWN["superposition"]),
            ],
        ),
        (
            "linear-merged-s0",
            ["singular values of Γ 2.23 to 7.31", "{} of {}".format(*KNOWN["linear_gd"])],
        ),
        ("kms-0.5-h2-s0", ["preconditioned", "(x_l − x̄), singular values of Γ 0.420 to 2.07"]),
        ("softmax-h8-s1", ["none of the known formulas clearly", "omega and mu are what a head"]),
    ],
)
def test_shipped_models_are_told_with_their_numbers(name: str, parts: list[str]):
    said = str(classify(load(CHECKPOINTS / name)).verdict)
    assert len(said.splitlines()) == 3
    for part in parts:
        assert part in said
    assert not [name for name in WORDS if "_" in name and name in said]


@pytest.mark.slow
def test_layers_are_told_with_the_numbers_fitted_to_them():
    found = classify(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128)
    assert found.verdict.computes.endswith("(gradient_descent); η = 0.500, 0.300")
    assert "w ← w + η (b − S w)" in found.verdict.computes
    assert f"p < {1 / len(found.algorithm.null_risk):.2g}" in found.verdict.sure
    assert found.verdict.is_not.split(",")[0] in NAMES.values()


def test_each_label_of_layers_has_a_formula_a_name_and_a_calibration():
    labels = {a.label for a in ALGORITHMS} - {None}
    assert labels == FORMULAS.keys() == NAMES.keys() == KNOWN_ALGORITHMS.keys()
    assert labels >= ALIKE | LARGER
    for algorithm in ALGORITHMS:
        if algorithm.label:
            assert len(FORMULAS[algorithm.label][1]) == len(algorithm.scalars)


def test_calibration_is_what_the_analyses_counted():
    counts = pd.read_csv(RESULTS / "calibration_labels.csv").set_index("truth")
    named = counts.drop(columns=["undetermined", "unstructured"])
    found = {
        label: (int(column.sum() - column.get(label, 0)), int(column.sum()))
        for label, column in named.items()
    }
    assert found == KNOWN
    models = pd.read_csv(RESULTS / "algorithms" / "algorithm_calibration_models.csv")
    models = models[(models["half"] == "confirming") & models["label"].isin(KNOWN_ALGORITHMS)]
    wrong = models["verdict"].eq("wrong").groupby(models["label"]).agg(["sum", "size"])
    assert {k: (int(v["sum"]), int(v["size"])) for k, v in wrong.iterrows()} == KNOWN_ALGORITHMS


def test_names_of_numbers_are_spelled_out():
    assert spelled_out("omega_spread 1.000 is above 0.25").startswith("the spread of |omega|")
    assert spelled_out("qk_diagonal_best p = 0.5, substitution_r2 p = 0.4").startswith(
        "the diagonal's part of the best head's QK circuit, p = 0.5, R² of heads that keep omega and mu only, p = 0.4"
    )
    assert spelled_out("no head is active") == "no head is active"


def test_losses_stand_beside_those_of_ridge_and_of_zero(step):
    assert step.loss.ridge < step.loss.model < step.loss.zero
    assert step.loss.zero == pytest.approx(1.1, abs=4 * step.loss.zero_sem)


def test_the_nearest_of_a_family_is_scaled_to_fit_and_ridge_is_not():
    prompts = sample_prompts(TaskConfig(), 64, seed=0, dtype=torch.float64)
    line, other = prompts.y_query, prompts.y_query.flip(0)
    found = nearby(
        2 * line, 2 * line, {"kernel_head": torch.stack([other, line]), "ridge": line[None]}
    )
    assert found.learners == ("kernel_head", "ridge")
    np.testing.assert_allclose(found.r2, [1, 0.75])
    np.testing.assert_allclose(found.lead, [0, 0.25])
