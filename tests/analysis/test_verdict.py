"""The lines on a model: formula, certainty, what predicts as well and what does not, with the numbers of the result."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.algorithms import task_doubt as doubts
from analyses.calibration.counts import counts
from mechinterp.analysis.classified import (
    NOTHING_EXCLUDED,
    Z95,
    calibration_text,
    nearest_learners,
    upper_limit,
)
from mechinterp.analysis.evidence import Criterion, Number
from mechinterp.analysis.labels import ALGORITHM_LABELS as LAYERED
from mechinterp.analysis.labels import NO_LABEL_TEXTS, PATTERNS, Label
from mechinterp.analysis.learners.nearest import Nearby, nearby, task_doubt
from mechinterp.analysis.multi_layer.classify import _numbers
from mechinterp.analysis.multi_layer.naming_rules import CONTAINED
from mechinterp.analysis.number_format import explained, with_error
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.descent import gradient_descent_model
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from tests.conftest import CHECKPOINTS, refused

RESULTS = Path(__file__).parents[2] / "analyses" / "results"


def test_a_step_is_told_with_its_numbers_and_its_runner_up():
    """The sentences of one layer, with the numbers of the result."""
    step = classify(debiased_gradient_step(0.7, 0.05, d_x=5))
    said, near = step.verdict, step.near
    assert "ŷ = 0.700 (1/L) Σ_l y_l (x_l − x̄)·x" in said.computes
    assert "best step size for the task: 0.879" in said.computes
    label = PATTERNS["debiased_gd"]
    for number in (
        explained(step.learner.r2, step.learner.r2_sem),
        f"{label.wrong} of {label.named} calibration models",
        f"none of {step.n_random} models",
        f"p < {1 / step.n_random:.2g}",
    ):
        assert number in said.sure
    # The runner-up is no case of the pattern.
    assert (near.learners[0], said.alike) == ("debiased_gd", "")
    assert near.lead[1] > 2 * near.lead_sem[1]
    assert said.is_not.startswith("a plain gradient step")
    assert with_error(near.lead[1], near.lead_sem[1]) in said.is_not
    assert step.loss.ridge < step.loss.model < step.loss.zero
    assert step.loss.zero == pytest.approx(1.1, abs=4 * step.loss.zero_sem)
    assert all(line in repr(step) for line in str(said).splitlines())


def test_a_learner_that_explains_less_than_half_predicts_nothing_as_well():
    step = classify(debiased_gradient_step(0.7, 0.05, d_x=5), n_prompts=64)
    near = step.near
    last = near.learners.index("kernel_head")
    tied = replace(near, lead=np.zeros_like(near.lead), r2=np.full_like(near.r2, 0.6))
    assert "a kernel smoother" in replace(step, near=tied).verdict.alike
    tied.r2[last] = 0.4
    far = replace(step, near=tied).verdict
    assert "a kernel smoother" not in far.alike
    assert "least squares" in far.alike


@pytest.mark.parametrize(
    ("sem", "less", "alike", "is_not"),
    [
        (0.01, 0.0, "a plain gradient step, R² = 0.95", "ridge regression, R² = 0.70"),
        (0.001, 0.0, "", "a plain gradient step"),
        (1.0, 0.0, "a plain gradient step", NOTHING_EXCLUDED),
        (0.01, 0.6, "", "close to any simple learner"),
    ],
)
def test_what_cannot_be_told_apart_is_not_what_the_model_is_not(sem, less, alike, is_not):
    learners, r2 = ("debiased_gd", "vanilla_gd", "ridge"), np.array([0.96, 0.95, 0.7]) - less
    near = Nearby(learners, r2, np.full(3, sem), r2[0] - r2, np.zeros(3))
    found = nearest_learners("none", near)
    assert found.alike.startswith(alike)
    assert bool(found.alike) == bool(alike)
    assert found.is_not.startswith(is_not)


def test_a_handful_of_models_without_an_error_is_no_evidence():
    """Wilson's limit for 0 of n is z^2 / (n + z^2): 10% at 34.6 models."""
    for wrong, named in ((0, 293), (0, 7), (3, 24)):
        # The limit is the share p at which (p - wrong / n)^2 = z^2 p (1 - p) / n.
        p = upper_limit(wrong, named)
        assert (p - wrong / named) ** 2 == pytest.approx(Z95**2 * p * (1 - p) / named, rel=1e-12)
    assert upper_limit(0, 293) == pytest.approx(Z95**2 / (293 + Z95**2))
    assert calibration_text(Label("", "", 0, 34)) == ""
    assert calibration_text(Label("", "", 0, 0)) == ""
    assert "0 of 35 calibration models" in calibration_text(Label("", "", 0, 35))
    assert "3 of 24" in (text := calibration_text(Label("", "", 3, 24)))
    assert "95% upper bound 31.0%" in text


def test_the_task_is_doubted_by_the_best_factor():
    for factor, sem, r2, doubted in (
        (0.61, 0.02, 0.5, True),
        (1.61, 0.02, 0.5, True),
        (1.09, 0.001, 0.5, False),  # within a tenth
        (0.61, 0.10, 0.5, False),  # within 4 standard errors
        (0.61, 0.02, 0.03, False),  # the model does nothing there
    ):
        said = task_doubt((factor, sem), (r2, 0.01))
        assert (with_error(factor, sem) in said) == bool(said) == doubted


def test_a_step_of_another_size_is_doubted_whatever_was_stated_of_its_task():
    weights = debiased_gradient_step(0.5, 0.05, d_x=5)
    found = classify(weights)
    # A step of 0.5 where that of the task is 0.879.
    assert found.best_factor == pytest.approx(0.879 / 0.5, abs=4 * found.best_factor_sem)
    assert {"d_x", "d_y"} & set(found.task.assumed) == set()
    assert {"noise_var", "beta_var", "context_length", "covariance"} <= set(found.task.assumed)
    assert "the task may be another one" in found.verdict.doubt
    assert found.verdict.doubt in repr(found)
    stated = classify(weights, task=TaskConfig().assuming(()))
    assert stated.task.assumed == ()
    assert stated.verdict.doubt == found.verdict.doubt
    assert stated.best_factor == found.best_factor
    assert classify(debiased_gradient_step(0.879, 0.05, d_x=5)).verdict.doubt == ""


@pytest.mark.slow
def test_layers_are_told_with_the_numbers_fitted_to_them():
    found = classify(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=128)
    assert "η = 0.500, 0.300" in found.verdict.computes
    assert "gradient_descent in 100% of resamples" in found.verdict.sure
    # GD++, preconditioned descent and ISTA contain gradient descent, and so predict as well.
    names = {label: each.name for label, each in LAYERED.items()}
    alike = [each.split(",")[0] for each in found.verdict.alike.split("; ")]
    assert {names[label] for label in set(CONTAINED) & set(found.algorithm.members)} <= set(alike)
    assert found.verdict.is_not.split(",")[0] in set(names.values()) - set(alike)


@pytest.mark.parametrize(
    ("label", "n_layers", "words"),
    [
        ("gradient_descent", 2, "η = 1.00, 2.00"),
        ("gd_plus_plus", 1, "η = 1.00"),
        ("gd_plus_plus", 3, "η = 1.00, 2.00, 3.00, γ = 4.00, 5.00"),
        ("online_gd", 1, "η = 1.00, α = 2.00, c = 3.00"),
        ("recursive_least_squares", 2, "α = 1.00, λ = 2.00"),
        ("adaptive_ridge", 1, "λ₁ = 1.00, λ₂/λ₁ = 2.00, odds = 3.00, τ² = 4.00"),
    ],
)
def test_a_number_stands_behind_its_letter(label: str, n_layers: int, words: str):
    """Some numbers have a value for every layer, some for all but one, and some have one for all."""
    scalars = next(each.scalars for each in ALGORITHMS if each.label == label)
    count = sum(len(scalar.layers(n_layers)) for scalar in scalars)
    assert _numbers(label, np.arange(1.0, count + 1), n_layers) == words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("two-tasks-h3-s0", ["Θ_0 = diag(0.89, 0.91, 0.90, 0.93, 0.03, 0.03)", "Θ_1 = diag("]),
        ("linear-merged-s0", ["singular values of Γ 2.23 to 7.31"]),
        ("kms-0.5-h2-s0", ["(x_l − x̄), singular values of Γ 0.420 to 2.07"]),
        ("softmax-h2-s8", ["Σ_h μ_h", "μ = 0.643, ω = 0.560; μ = 0.824, ω = 0.532"]),
    ],
)
def test_shipped_models_are_told_with_their_numbers(name: str, parts: list[str]):
    said = str(classify(load(CHECKPOINTS / name)).verdict)
    assert all(part in said for part in parts)


def test_calibration_is_what_the_analyses_counted():
    """Sentences count models made after the rules, read from the results."""
    counted = counts(RESULTS).set_index("label")
    for name, label in {**PATTERNS, **LAYERED}.items():
        assert (label.wrong, label.named) == (counted.wrong[name], counted.named[name])
    one = pd.read_csv(RESULTS / "calibration_second_models.csv")
    named = one[~one.label.isin(NO_LABEL_TEXTS)]
    assert sum(label.named for label in PATTERNS.values()) == len(named)
    assert sum(label.wrong for label in PATTERNS.values()) == (named.verdict == "wrong").sum()
    assert set(LAYERED) == {algorithm.label for algorithm in ALGORITHMS} - {None}
    for algorithm in ALGORITHMS:
        if algorithm.label:
            assert len(LAYERED[algorithm.label].numbers) == len(algorithm.scalars)


def test_a_number_without_a_text_is_refused():
    with refused("texts.toml", "sharpness"):
        Criterion("sharpness", 0.5, 1.0)
    with refused("texts.toml", "sharpness"):
        Number("sharpness", 0.5)


def test_the_nearest_of_a_family_is_scaled_to_fit_and_ridge_is_not():
    prompts = draw_prompts(TaskConfig(), 64, seed=0, dtype=torch.float64)
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


# How often an assumed task is doubted: prompts of the script behind the table in docs/results/labels.md.


def test_prompts_are_changed_by_the_factors_and_by_nothing_else():
    task = TaskConfig(d_x=3, d_y=2, context_length=6)
    own = draw_prompts(task, 16, seed=1, dtype=torch.float64)
    same = doubts.changed(task, 16, 1)
    for name in ("x", "y", "x_query", "y_query", "y_query_clean", "beta"):
        torch.testing.assert_close(getattr(same, name), getattr(own, name), rtol=0, atol=1e-12)
    found = doubts.changed(task, 16, 1, noise_var=4, beta_var=9, covariance=16)
    clean = torch.einsum("blx,bxn->bln", found.x, found.beta)
    own_clean = torch.einsum("blx,bxn->bln", own.x, own.beta)
    torch.testing.assert_close(found.x, 4 * own.x)
    torch.testing.assert_close(clean, 12 * own_clean)
    torch.testing.assert_close(found.y - clean, 2 * (own.y - own_clean))
    noise = found.y_query - found.y_query_clean
    torch.testing.assert_close(noise, 2 * (own.y_query - own.y_query_clean))
    assert doubts.changed(task, 16, 1, context_length=0.5).x.shape[1] == 3


@pytest.mark.slow
def test_covariates_of_another_size_are_seen_and_the_own_task_is_not_doubted():
    rows = pd.DataFrame(doubts.rows_of(CHECKPOINTS / "linear-h1-s0"))
    doubted = rows.groupby("change")["doubted"].mean()
    assert doubted["own task"] == 0
    assert doubted[[name for name in doubted.index if "covariance" in name]].tolist() == [1, 1]
