"""Estimates with their errors: means, ratios, best factors, losses of models, and what stands in for a model."""

from functools import partial

import numpy as np
import pytest
import torch

from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.softmax import debiased_risk
from mechinterp.analysis.learners.nearest import evaluation
from mechinterp.analysis.one_layer.substitution import faithfulness, idealised
from mechinterp.analysis.stats import (
    best_factor,
    carried_by_few,
    mean_and_sem,
    ratio_and_sem,
    without_worst,
)
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.predictors import debiased_gd, ridge, vanilla_gd
from mechinterp.icl.prompts import draw_prompts
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    zero_head,
)
from mechinterp.models.heads import predict
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.theory.softmax import debiased_step_size
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import refused


@pytest.mark.slow
def test_standard_errors_are_the_spread_over_repetitions():
    random = np.random.default_rng(0)
    power = random.exponential(size=(2000, 400))
    part = 0.3 * power + random.normal(scale=0.2, size=power.shape)
    means, ratios = zip(
        *[(mean_and_sem(p), ratio_and_sem(q, p)) for p, q in zip(power, part, strict=True)],
        strict=True,
    )
    for estimates, truth in ((means, 1.0), (ratios, 0.3)):
        values, sems = np.array(estimates).T
        assert values.mean() == pytest.approx(truth, abs=4 * values.std() / 2000**0.5)
        assert np.mean(sems) == pytest.approx(values.std(), rel=0.05)


@pytest.mark.parametrize("d_y", [1, 2])
def test_the_best_factor_undoes_a_factor_exactly(d_y: int):
    clean = draw_prompts(TaskConfig(d_y=d_y), 32, seed=0, dtype=torch.float64).y_query_clean
    for factor in (0.25, 1.0, -3.0):
        found, sem = best_factor(clean / factor, clean)
        assert found == pytest.approx(factor, rel=1e-12)
        assert sem == pytest.approx(0, abs=1e-12)


def test_the_best_factor_has_the_least_loss():
    """Mean (c f - y)^2 is a parabola in c: its derivative is 0 at the factor."""
    prompts = draw_prompts(TaskConfig(), 64, seed=0, dtype=torch.float64)
    prediction = 0.3 * ridge(prompts, penalty=0.5)
    factor, _ = best_factor(prediction, prompts.y_query)
    slope = (prediction * (factor * prediction - prompts.y_query)).mean()
    assert float(slope) == pytest.approx(0, abs=1e-12)
    assert np.isnan(best_factor(torch.zeros(4, 1), torch.ones(4, 1))[0])
    assert np.isnan(ratio_and_sem(np.zeros(5), np.zeros(5))).all()


def test_the_error_of_a_ratio_has_no_sign():
    above, below = np.array([1.0, 2.0, 4.0]), np.array([3.0, 1.0, 2.0])
    ratio, sem = ratio_and_sem(above, below)
    assert sem > 0
    assert ratio_and_sem(above, -below) == (-ratio, sem)
    assert np.isnan(ratio_and_sem(above, np.array([1.0, -1.0, 0.0]))).all()


def test_a_hundredth_carries_a_mean_or_does_not():
    few = np.ones(200)
    few[:2] = 99.5  # 199 of 397
    assert carried_by_few(few)
    assert carried_by_few(-few)
    few[:2] = 98.5  # 197 of 395
    assert not carried_by_few(few)
    few[:3] = 99.5  # three of 200 are more than a hundredth
    assert not carried_by_few(few)
    # Signs do not cancel, and 99 values have no hundredth.
    assert not carried_by_few(np.tile([1.0, -1.0], 100))
    assert not carried_by_few(np.array([1e9] + [1.0] * 98))


@pytest.mark.slow
def test_more_prompts_bring_a_mean_without_the_worst_nearer_to_its_limit():
    # P(size > s) = s^-a has no mean for a < 1. Below the quantile q of 1 - 1/1000 the mean is
    # a (q^(1 - a) - 1) / (1 - a) / (1 - 1/1000), and the mean square of the same form with 2 in the place of 1.
    a, part = 0.8, 1 - 1 / 1000
    q = (1 - part) ** (-1 / a)
    limit, square = (a * (q ** (power - a) - 1) / (power - a) / part for power in (1, 2))
    generator = np.random.default_rng(0)
    off = []
    for n in (4_000, 32_000, 256_000):
        found = [generator.uniform(size=n) ** (-1 / a) for _ in range(20)]
        kept = np.array([sizes[without_worst(sizes)].mean() for sizes in found])
        # The error of the quantile adds (q - mean)^2 / 1000 to the variance.
        sem = ((square - limit**2 + (q - limit) ** 2 / 1000) / n) ** 0.5
        off.append(np.square(kept - limit).mean() ** 0.5)
        assert off[-1] < 2 * sem
        assert np.abs(np.array([sizes.mean() for sizes in found]) - limit).max() > 8 * sem
    assert off[0] > 2 * off[1] > 4 * off[2]


def test_the_worst_are_those_of_a_thousand_and_undefined_sizes_come_first():
    sizes = np.arange(2999.0)
    assert without_worst(sizes).sum() == 2997
    assert not without_worst(sizes)[-2:].any()
    assert without_worst(sizes[:999]).all()
    sizes[7] = np.nan
    assert np.flatnonzero(~without_worst(sizes)).tolist() == [7, 2998]


def test_faithfulness_of_a_known_gap():
    prediction = torch.tensor([[1.0], [2.0], [3.0]])
    found = faithfulness(prediction, prediction - torch.tensor([[0.1], [-0.1], [0.1]]))
    assert found.rms == pytest.approx(0.1, rel=1e-5)
    assert found.rms_sem == pytest.approx(0, abs=1e-6)  # the gap is the same on all prompts
    assert found.r2 == pytest.approx(1 - 0.01 * 3 / 14, rel=1e-6)
    same = faithfulness(prediction, prediction)
    assert (same.r2, same.rms, same.rms_sem) == (1, 0, 0)
    two = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    found = faithfulness(two, two - 0.1)
    assert (found.rms, found.r2) == (pytest.approx(0.1), pytest.approx(1 - 4 * 0.01 / 30))


def test_idealised_heads_lose_their_leaks_and_nothing_else():
    law = {"score": "1+Cx", "score_slope": 0.5, "attend_to_self": True}
    clean = diagonal_heads([0.3, -0.2], [2.0, -1.0], d_x=5).with_model(**law)
    dirty = clean.with_tensors({"attn.W_Q": clean.W_Q + 0.1, "attn.W_V": clean.W_V + 0.1})
    found = idealised(dirty, torch.diag_embed(clean.omega), clean.mu)
    assert {name: getattr(found.model, name) for name in law} == law
    torch.testing.assert_close(found.QK, clean.QK)
    torch.testing.assert_close(found.OV, clean.OV)


def test_a_gradient_step_is_that_of_the_predictors():
    task = TaskConfig(d_x=3, d_y=2, context_length=9)
    found = evaluation(task, 16, 0, False)
    step = 0.7 * torch.eye(3, dtype=torch.float64).expand(2, -1, -1)
    for centred, predictor in ((True, debiased_gd), (False, vanilla_gd)):
        expected = predictor(found.prompts, eta=0.7)
        torch.testing.assert_close(found.gradient_step(step, centred=centred), expected)


@pytest.mark.parametrize("attend_to_self", [False, True])
def test_small_heads_take_the_step_with_their_matrix_and_linear_ones_exactly(attend_to_self: bool):
    task = TaskConfig(d_x=3, context_length=9)
    weights = initial_weights(ExperimentConfig(task=task)).to(torch.float64)
    blocks, mu = weights.QK[:, :3, :3], torch.tensor([[1e4], [-1e4]], dtype=torch.float64)
    found = evaluation(task, 16, 0, attend_to_self)
    heads = idealised(weights, 1e-4 * blocks, mu).with_model(attend_to_self=attend_to_self)
    step = torch.einsum("hn,hij->nij", mu, 1e-4 * blocks)
    expected = found.gradient_step(step, centred=True)
    torch.testing.assert_close(predict(heads, found.prompts), expected, rtol=1e-3, atol=1e-4)
    law = weights.with_model(score="linear", score_slope=1 / 9, attend_to_self=attend_to_self)
    step = torch.einsum("hn,hij->nij", weights.mu, blocks)
    expected = found.gradient_step(step, centred=False)
    torch.testing.assert_close(predict(idealised(law, blocks, weights.mu), found.prompts), expected)


TASK = TaskConfig()


@pytest.mark.slow
def test_models_of_close_predictions_are_told_apart_by_the_paired_difference():
    best = debiased_step_size(d_x=5, context_length=40, noise_var=0.1)
    models = {
        "best": debiased_gradient_step(best, 0.01, d_x=5),
        "near": debiased_gradient_step(0.97 * best, 0.01, d_x=5),
        "zero": zero_head(d_x=5),
    }
    found = shared_losses(models, TASK, n_prompts=100_000)
    assert found.gap_sem[0, 1] < found.loss_sem[0, 1] / 3
    exact = debiased_risk(best, d_x=5, context_length=40, noise_var=0.1)
    assert abs(found.loss[0, 0] - exact) < 4 * found.loss_sem[0, 0]
    assert abs(found.loss[0, 2] - 1.1) < 4 * found.loss_sem[0, 2]
    assert not found.gap[:, 0].any()
    assert not found.gap_sem[:, 0].any()
    np.testing.assert_allclose(found.gap, found.loss - found.loss[:, :1], atol=1e-12)
    rise = debiased_risk(0.97 * best, d_x=5, context_length=40, noise_var=0.1)
    assert abs(found.gap[0, 1] - (rise - exact)) < 4 * found.gap_sem[0, 1]


def test_learners_stand_beside_models_on_the_same_prompts():
    pair = debiased_gradient_step(0.88, 1e-4, d_x=5)
    models = {
        "pair": pair,
        "step": partial(debiased_gd, eta=0.88),
        "hooked": ICLTransformer.from_weights(pair, task=TASK),
    }
    found = shared_losses(models, TASK, context_lengths=[10, 40], n_prompts=2000)
    np.testing.assert_allclose(found.gap, 0, atol=2e-4)
    exact = debiased_risk(0.88, d_x=5, context_length=10, noise_var=0.1)
    assert abs(found.loss[0, 1] - exact) < 4 * found.loss_sem[0, 1]
    assert len(found.plot().data) == 3
    with refused("at least one model"):
        shared_losses({}, TASK)
