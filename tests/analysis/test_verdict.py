"""The lines on a model: formula, certainty, what predicts as well and what does not, with the numbers of the result."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mechinterp.analysis.classified import (
    NOTHING_EXCLUDED,
    WORDS,
    Z95,
    calibration_text,
    chance_text,
    nearest_learners,
    spelled_out,
    upper_limit,
)
from mechinterp.analysis.labels import ALGORITHMS as LAYERED
from mechinterp.analysis.labels import PATTERNS, Label
from mechinterp.analysis.learners.nearest import Nearby, nearby, task_doubt
from mechinterp.analysis.multi_layer.naming import ALIKE, LARGER
from mechinterp.analysis.number_format import explained, with_error
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.one_layer.label_rules import Thresholds
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from tests.conftest import CHECKPOINTS

RESULTS = Path(__file__).parents[2] / "analyses" / "results"
MADE_KERNELS, MADE_STEPS = (
    f"of {PATTERNS[pattern].named} calibration models"
    for pattern in ("kernel_regression", "linear_gd")
)


@pytest.fixture(scope="module")
def step():
    return classify(debiased_gradient_step(0.7, 0.05, d_x=5))


def test_a_step_is_told_with_its_size_and_the_best_one(step):
    computes, sure = step.verdict.computes, step.verdict.sure
    assert "x minus its mean x̄ (debiased_gd): ŷ = 0.700 (1/L) Σ_l y_l (x_l − x̄)·x" in computes
    assert computes.endswith("(best step size for the task: 0.879)")
    assert f"explains {explained(step.learner.r2, step.learner.r2_sem)} of" in sure
    label = PATTERNS["debiased_gd"]
    assert f"{label.wrong} of {label.named} calibration models with this label" in sure
    chance = f"none of {step.n_random} models with random weights does the task as well"
    assert f"{chance} (p < {1 / step.n_random:.2g})" in sure


def test_with_other_limits_nothing_is_said_of_the_calibration():
    limits = Thresholds(omega_spread=0.5)
    found = classify(debiased_gradient_step(0.7, 0.05, d_x=5), thresholds=limits)
    assert "mislabelled" not in found.verdict.sure


def test_the_runner_up_is_no_case_of_the_pattern(step):
    assert step.near.learners[0] == "debiased_gd"
    assert step.near.lead[1] > 2 * step.near.lead_sem[1]
    less = (
        f"lower by {with_error(step.near.lead[1], step.near.lead_sem[1])} (both at the best factor)"
    )
    assert step.verdict.is_not.startswith("a plain gradient step, R² = ")
    assert less in step.verdict.is_not
    assert step.verdict.alike == ""


def test_what_cannot_be_told_apart_is_not_called_what_the_model_is_not():
    def told(sem: float, less: float = 0.0):
        learners, r2 = ("debiased_gd", "vanilla_gd", "ridge"), np.array([0.96, 0.95, 0.7]) - less
        near = Nearby(learners, r2, np.full(3, sem), r2[0] - r2, np.zeros(3))
        return nearest_learners("none", near)

    found = told(0.01)
    assert found.sure.startswith(
        "the nearest simple learner is a gradient step on x minus its mean"
    )
    assert found.alike.startswith("a plain gradient step, R² = 0.95")
    assert found.is_not.startswith("ridge regression, R² = 0.70")
    apart = told(0.001)
    assert (apart.alike, apart.is_not[:21]) == ("", "a plain gradient step")
    together = told(1.0)
    assert together.is_not == NOTHING_EXCLUDED
    far = told(0.01, less=0.6)
    assert (far.alike, far.is_not) == ("", "close to any simple learner")
    assert "below 0.5: not close" in far.sure


def test_the_repr_and_the_lines_are_the_verdict(step):
    assert repr(step).splitlines() == [
        "Classification(debiased_gd)",
        *str(step.verdict).splitlines(),
        f"Loss on its task: {step.loss}.",
        f"Task: {step.task.in_words}.",
    ]
    stated = classify(debiased_gradient_step(0.879, 0.05, d_x=5), TaskConfig())
    assert list(stated.verdict.lines) == ["What it computes", "How sure", "What it is not"]
    all_lines = replace(step.verdict, alike="a", doubt="b").lines
    assert list(all_lines)[2:] == ["What predicts as well", "What it is not", "What to doubt"]


def test_a_handful_of_models_without_an_error_is_no_evidence():
    """Wilson's limit for 0 of n is z^2 / (n + z^2): 10% at 34.6 models."""
    for wrong, named in ((0, 293), (0, 7), (3, 24)):
        # The limit is the share p at which (p - wrong / n)^2 = z^2 p (1 - p) / n.
        p = upper_limit(wrong, named)
        assert (p - wrong / named) ** 2 == pytest.approx(Z95**2 * p * (1 - p) / named, rel=1e-12)
    assert upper_limit(0, 293) == pytest.approx(Z95**2 / (293 + Z95**2))
    assert calibration_text(Label("", "", 0, 34)) == ""
    assert "0 of 35 calibration models" in calibration_text(Label("", "", 0, 35))
    assert "3 of 24" in (text := calibration_text(Label("", "", 3, 24)))
    assert "95% upper bound 31.0%" in text


def test_a_p_value_is_told_by_its_count():
    assert chance_text(1 / 401, 400, "w").startswith("none of 400 models with w does")
    assert chance_text(2 / 401, 400, "w").startswith("1 of 400 models with w does")
    told = "104 of 400 models with w do the task as well (p = 0.26)"
    assert chance_text(105 / 401, 400, "w") == told


@pytest.mark.parametrize(
    ("factor", "sem", "r2", "doubted"),
    [
        (0.61, 0.02, 0.5, True),
        (1.61, 0.02, 0.5, True),
        (1.09, 0.001, 0.5, False),  # within a tenth
        (0.61, 0.10, 0.5, False),  # within 4 standard errors
        (0.61, 0.02, 0.03, False),  # the model does nothing there
    ],
)
def test_the_task_is_doubted_by_the_best_factor(factor, sem, r2, doubted):
    said = task_doubt((factor, sem), (r2, 0.01))
    assert bool(said) == doubted
    if doubted:
        assert f"the best factor on its prediction is {with_error(factor, sem)} (1 for" in said


def test_a_step_of_another_size_is_doubted_whatever_was_stated_of_its_task():
    weights = debiased_gradient_step(0.5, 0.05, d_x=5)
    found = classify(weights)
    # A step of 0.5 where that of the task is 0.879.
    assert found.best_factor == pytest.approx(0.879 / 0.5, abs=4 * found.best_factor_sem)
    assert {"d_x", "d_y"} & set(found.task.assumed) == set()
    assert {"noise_var", "beta_var", "context_length", "covariance"} <= set(found.task.assumed)
    assert "the task may be another one" in found.verdict.doubt
    assert found.verdict.doubt in repr(found)
    stated = classify(weights, TaskConfig().assuming(()))
    assert stated.task.assumed == ()
    assert stated.verdict.doubt == found.verdict.doubt
    assert stated.best_factor == found.best_factor
    assert classify(debiased_gradient_step(0.879, 0.05, d_x=5)).verdict.doubt == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("softmax-h1-s0", ["ŷ = -1.50 Σ_l w_l y_l, w_l ∝ exp(-0.519 x_l·x)", MADE_KERNELS]),
        ("softmax-h2-s8", ["Σ_h μ_h", "μ = 0.643, ω = 0.560; μ = 0.824, ω = 0.532"]),
        ("two-tasks-h3-s0", ["Θ_0 = diag(0.89, 0.91, 0.90, 0.93, 0.03, 0.03)", "Θ_1 = diag("]),
        ("linear-merged-s0", ["singular values of Γ 2.23 to 7.31", MADE_STEPS]),
        ("kms-0.5-h2-s0", ["preconditioned", "(x_l − x̄), singular values of Γ 0.420 to 2.07"]),
        ("softmax-h8-s1", ["none of the known formulas fits clearly", "x·x by omega and y by mu"]),
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
    assert "gradient_descent in 100% of resamples" in found.verdict.sure
    # GD++, preconditioned descent and ISTA contain gradient descent, and so predict as well.
    names = {label: each.name for label, each in LAYERED.items()}
    alike = [each.split(",")[0] for each in found.verdict.alike.split("; ")]
    assert {names[label] for label in LARGER & set(found.algorithm.members)} <= set(alike)
    assert found.verdict.is_not.split(",")[0] in set(names.values()) - set(alike)
    assert "calibration models" not in found.verdict.sure or LAYERED[found.pattern].wrong


@pytest.mark.slow
def test_a_formula_without_numbers_is_told_without_them():
    found = classify(load(CHECKPOINTS / "pool-linear-m4-s0"))
    assert found.pattern == "posterior_mean"
    assert found.verdict.computes.endswith("(posterior_mean)")
    assert "this formula, with nothing fitted, explains" in found.verdict.sure
    assert "n_tasks 4, task_seed 0" in found.task.in_words


def test_each_label_of_layers_has_a_formula_a_name_and_a_calibration():
    labels = {a.label for a in ALGORITHMS} - {None}
    assert labels == LAYERED.keys()
    assert all(each.name for each in LAYERED.values())
    assert labels >= ALIKE | LARGER
    for algorithm in ALGORITHMS:
        if algorithm.label:
            assert len(LAYERED[algorithm.label].numbers) == len(algorithm.scalars)


@pytest.mark.parametrize(
    ("file", "labels"),
    [
        ("calibration_models.csv", PATTERNS),
        ("algorithms/algorithm_calibration_models.csv", LAYERED),
    ],
)
def test_calibration_is_what_the_analyses_counted(file: str, labels: dict[str, Label]):
    models = pd.read_csv(RESULTS / file)
    models = models[models["label"].isin(labels)]
    counts = models["verdict"].eq("wrong").groupby(models["label"]).agg(["sum", "size"])
    assert {k: (int(v["sum"]), int(v["size"])) for k, v in counts.iterrows()} == {
        name: (each.wrong, each.named) for name, each in labels.items()
    }


def test_names_of_numbers_are_spelled_out():
    assert spelled_out("omega_spread is 1.000, above the limit 0.25").startswith(
        "the spread of |omega|"
    )
    assert spelled_out("qk_diagonal_best p = 0.5, substitution_r2 p = 0.4").startswith(
        "the largest diagonal part of a QK circuit, p = 0.5, R² of heads that keep only omega and mu, p = 0.4"
    )
    assert spelled_out("no head is active") == "no head is active"


def test_losses_stand_beside_those_of_ridge_and_of_zero(step):
    assert step.loss.ridge < step.loss.model < step.loss.zero
    assert step.loss.zero == pytest.approx(1.1, abs=4 * step.loss.zero_sem)


def test_the_nearest_of_a_family_is_scaled_to_fit_and_ridge_is_not():
    prompts = sample_prompts(TaskConfig(), 64, seed=0, dtype=torch.float64)
    line, other = prompts.y_query, prompts.y_query.flip(0)
    found = nearby(
        2 * line, {"kernel_head": torch.stack([other, line]), "ridge": line[None]}, 2 * line
    )
    assert found.learners == ("kernel_head", "ridge")
    np.testing.assert_allclose(found.r2, [1, 0.75])
    np.testing.assert_allclose(found.lead, [0, 0.25])
    alone = nearby(2 * line, {"ridge": line[None], "vanilla_gd": other[None]})
    assert alone.learners[0] == "ridge"
    np.testing.assert_allclose(alone.lead, [0, alone.r2[0] - alone.r2[1]])
