"""Fits recover the learner that a model is built from, with standard errors that cover the truth."""

import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn

from analyses.lib.theory.softmax import debiased_risk, vanilla_risk
from mechinterp.analysis.learners.compare import FITTED, _through_omega, fit_learners
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.plain_modules import hook_module
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.predictors import (
    debiased_gd,
    nadaraya_watson,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import sample_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import learner_of, predictor_of
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import CHECKPOINTS
from tests.deep_models import GPT2, random_model

TASK = TaskConfig()
BAYES = TASK.noise_var / TASK.beta_variance


def column(learner: str) -> int:
    return FITTED.index(learner)


@pytest.mark.parametrize(
    ("learner", "model", "factor"),
    [
        ("vanilla_gd", lambda prompts: vanilla_gd(prompts, eta=0.8), 0.8),
        ("debiased_gd", lambda prompts: debiased_gd(prompts, eta=0.8), 0.8),
        ("kernel_head", lambda prompts: nadaraya_watson(prompts, omega=-0.3, mu=-1.4), 1.4),
        ("ridge", lambda prompts: ridge(prompts, penalty=BAYES), np.nan),
        ("zero", lambda prompts: 0 * prompts.y_query, np.nan),
    ],
)
def test_a_learner_is_recognised_as_itself(learner, model, factor):
    fits = fit_learners(model, TASK, context_lengths=[10, 40], n_prompts=512)
    assert fits.best == learner
    np.testing.assert_allclose(fits.factor[:, column(learner)], factor, rtol=1e-3)
    np.testing.assert_allclose(fits.rms[:, column(learner)], 0, atol=1e-4)
    if learner == "zero":
        assert fits.verdict == "The model predicts 0 on every prompt."
    else:
        np.testing.assert_allclose(fits.r2[:, column(learner)], 1, atol=1e-6)
        assert not fits.r2[:, column("zero")].any()
    if learner == "kernel_head":
        np.testing.assert_allclose(fits.kernel_omega, -0.3, atol=1e-3)


@pytest.mark.slow
def test_losses_meet_the_exact_risks_and_gaps_are_paired():
    setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
    fits = fit_learners(
        lambda prompts: debiased_gd(prompts, eta=0.8), TASK, context_lengths=[40], n_prompts=100_000
    )
    debiased, vanilla = column("debiased_gd"), column("vanilla_gd")
    assert abs(fits.model_loss[0] - debiased_risk(0.8, **setting)) < 4 * fits.model_loss_sem[0]
    eta = fits.factor[0, vanilla]
    assert abs(fits.loss[0, vanilla] - vanilla_risk(eta, **setting)) < 4 * fits.loss_sem[0, vanilla]
    expected_gap = debiased_risk(0.8, **setting) - vanilla_risk(eta, **setting)
    assert abs(fits.loss_gap[0, vanilla] - expected_gap) < 4 * fits.loss_gap_sem[0, vanilla]
    assert fits.loss_gap_sem[0, vanilla] < 0.5 * fits.model_loss_sem[0]
    assert fits.loss_gap[0, debiased] == pytest.approx(0, abs=1e-6)
    assert fits.loss[0, column("zero")] == pytest.approx(
        1.1, abs=4 * fits.loss_sem[0, column("zero")]
    )


@pytest.mark.slow
def test_step_size_and_its_standard_error_over_repeated_prompts():
    def model(prompts):
        return debiased_gd(prompts, eta=0.8) + 0.3 * (prompts.y_query - prompts.y_query_clean)

    runs = [
        fit_learners(model, TASK, context_lengths=[40], n_prompts=500, seed=seed)
        for seed in range(60)
    ]
    eta = np.array([run.factor[0, column("debiased_gd")] for run in runs])
    sem = np.array([run.factor_sem[0, column("debiased_gd")] for run in runs])
    assert abs(eta.mean() - 0.8) < 4 * eta.std() / len(eta) ** 0.5
    assert sem.mean() == pytest.approx(eta.std(), rel=0.35)  # the spread of 60 is known to 9%


def test_rounding_of_the_predictions_does_not_reach_the_standard_errors():
    model, generator = (
        learner_of(load(CHECKPOINTS / "softmax-h2-s0")),
        torch.Generator().manual_seed(0),
    )

    def rounded(prompts):
        found = model(prompts)
        return found * (1 + 1e-7 * torch.randn(found.shape, generator=generator))

    asked = {"context_lengths": [10, 40], "n_prompts": 1000}
    expected, *others = (fit_learners(m, TASK, **asked) for m in (model, *[rounded] * 4))
    for found in others:
        np.testing.assert_allclose(found.factor_sem, expected.factor_sem, rtol=1e-3)


@pytest.mark.slow
def test_the_factor_of_a_kernel_head_moves_with_a_prompts_weight_as_its_standard_error_says():
    prompts = sample_prompts(TASK, 200, seed=3, dtype=torch.float64)
    prediction = debiased_gd(prompts, eta=0.8).numpy()

    def errors(factors: np.ndarray, share: np.ndarray) -> np.ndarray:
        """0 where omega and mu are best, each prompt having its share."""
        omega, mu = factors
        below, at, above = (
            nadaraya_watson(prompts, omega=omega + step, mu=1.0).numpy()
            for step in (-1e-5, 0, 1e-5)
        )
        left = (share * (prediction - mu * at)[:, 0])[:, None]
        return np.array([(left * at).sum(), (left * (above - below)).sum() / 2e-5])

    even = np.full(200, 1 / 200)
    best = scipy.optimize.root(errors, (0.5, 1.5), args=even, tol=1e-12).x
    through_omega = _through_omega(prompts, prediction, *best)
    for index in range(5):
        heavier = even + 1e-6 * (np.arange(200) == index)
        omega = scipy.optimize.root(errors, best, args=heavier, tol=1e-12).x[0]
        shape = nadaraya_watson(prompts, omega=omega, mu=1.0).numpy()
        moved = (shape * prediction).mean() / np.square(shape).mean()
        assert (moved - best[1]) / 1e-6 == pytest.approx(through_omega[index], rel=1e-3)


@pytest.mark.slow
def test_a_pair_tends_to_debiased_gd_as_omega_falls():
    distances = []
    for omega in (0.1, 0.05, 0.025):
        fits = fit_learners(
            debiased_gradient_step(0.88, omega, d_x=5), context_lengths=[40], n_prompts=4096
        )
        assert fits.best == "debiased_gd"
        distances.append(fits.rms[0, column("debiased_gd")])
    slopes = -np.diff(np.log(distances)) / np.log(2)
    np.testing.assert_allclose(slopes, 2, atol=0.15)  # Theorem 4.2 (i): O(omega^2)


def test_the_trained_length_is_added_and_the_verdict_speaks_of_it():
    fits = fit_learners(kernel_head(0.5, 1.5, d_x=5), context_lengths=[20], n_prompts=512)
    assert fits.context_length.tolist() == [20, 40]
    mu = re.match(r"Closest to kernel_head, mu = ([\d.]+) ± ", fits.verdict)
    assert mu is not None
    assert float(mu[1]) == pytest.approx(1.5, abs=1e-4)
    assert "at L = 40" in fits.verdict
    assert repr(fits) == f"LearnerFits({fits.verdict})"
    assert fits.lead[1] > 5 * fits.lead_sem[1]


def test_without_lengths_a_model_takes_those_that_it_has_positions_for():
    config = ExperimentConfig(
        task=TaskConfig(d_x=2, context_length=6),
        model=ModelConfig(n_layers=2, n_heads=1, d_model=4, n_positions=51, layout="in_turn"),
    )
    model = ICLTransformer.from_weights(initial_deep_weights(config), task=config.task)
    fits = fit_learners(model, config.task, n_prompts=64)
    assert fits.context_length.tolist() == [6, 10, 20]  # 50 tokens before the query are 25 pairs
    with pytest.raises(ValueError, match="context_length must be <= 25"):
        fit_learners(model, config.task, context_lengths=[30], n_prompts=64)


def test_a_tie_is_said_to_be_one():
    fits = fit_learners(kernel_head(0.5, 1.5, d_x=5), context_lengths=[40], n_prompts=64)
    told_apart = "; the difference is not significant."
    assert replace(fits, lead=np.array([0.019]), lead_sem=np.array([0.01])).verdict.endswith(
        told_apart
    )
    assert not replace(fits, lead=np.array([0.021]), lead_sem=np.array([0.01])).verdict.endswith(
        told_apart
    )


def test_frame_has_a_row_per_length_and_learner():
    fits = fit_learners(kernel_head(0.5, 1.5, d_x=5), context_lengths=[20, 60], n_prompts=256)
    frame = fits.to_frame()
    assert len(frame) == 3 * len(FITTED)
    row = frame.query("context_length == 60 and learner == 'ridge'").iloc[0]
    assert row["rms"] == fits.rms[2, column("ridge")]
    assert row["model_loss"] == fits.model_loss[2]
    assert len(fits.plot().data) == 1 + len(FITTED)
    assert len(fits.plot_distance().data) == len(FITTED)


def test_a_function_needs_a_task():
    with pytest.raises(ValueError, match="needs a task"):
        fit_learners(lambda prompts: prompts.y_query)


def test_a_function_with_a_path_is_fitted_by_its_last_prediction():
    def path(prompts):
        return torch.stack([zero_prediction(prompts), ridge(prompts, penalty=0.5)])

    found = fit_learners(path, TaskConfig(), context_lengths=[20], n_prompts=256)
    assert found.best == "ridge"
    np.testing.assert_allclose(found.rms[found.context_length == 40, 4], 0, atol=1e-6)


class Counted(nn.Module):
    """A plain encoder layer that notes how many prompts come at once, in all its copies."""

    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.read_in, self.read_out = nn.Linear(6, 16), nn.Linear(16, 1)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(tokens))
        return self.read_out(self.layer(self.read_in(tokens)))[:, -1]


def test_a_module_predicts_each_prompt_once_and_few_at_a_time():
    hooked = hook_module(Counted(), task=TASK)
    Counted.sizes.clear()
    fit_learners(hooked, context_lengths=[10, 40], n_prompts=1000)
    assert sum(Counted.sizes) <= 2 * 1000 + 16  # a few more to follow the module
    assert max(Counted.sizes) <= 256


def test_a_causal_model_is_fitted_at_all_lengths_from_one_run():
    """The numbers are those of a function that is run length by length on the same prompts."""
    task = TaskConfig(d_x=4, context_length=8)
    model = random_model(2, 2, **GPT2)
    drawn = sample_prompts(task, 64, seed=0, dtype=torch.float64)
    predictor = predictor_of(model)
    assert predictor.predict_at_every(drawn) is not None
    found = fit_learners(model, context_lengths=[3], prompts=drawn, task=task)
    for row, length in enumerate((3, 8)):
        alone = fit_learners(
            torch.no_grad()(lambda prompts: model.predict(prompts)),
            context_lengths=[],
            prompts=drawn.prefix(length),
            task=replace(task, context_length=length),
        )
        for name in ("factor", "r2", "rms", "loss", "loss_gap", "r2_sem", "factor_sem"):
            np.testing.assert_allclose(
                getattr(found, name)[row],
                getattr(alone, name)[0],
                rtol=1e-6,
                atol=1e-9,
                err_msg=name,
            )
