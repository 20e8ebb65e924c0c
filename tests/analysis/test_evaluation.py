from functools import partial

import numpy as np
import pytest

from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.softmax import debiased_risk
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import debiased_gd
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.theory.softmax import debiased_step_size

TASK = TaskConfig()


@pytest.mark.slow
def test_losses_meet_the_exact_risk_and_gaps_are_paired():
    lengths = (10, 40)
    models = {"step": debiased_gradient_step(0.88, 1e-3, d_x=5), "zero": zero_head(d_x=5)}
    found = shared_losses(models, TASK, context_lengths=lengths, n_prompts=50_000)
    for row, length in enumerate(lengths):
        exact = debiased_risk(0.88, d_x=5, context_length=length, noise_var=0.1)
        assert abs(found.loss[row, 0] - exact) < 4 * found.loss_sem[row, 0]
        assert abs(found.loss[row, 1] - 1.1) < 4 * found.loss_sem[row, 1]
        assert abs(found.gap[row, 1] - (1.1 - exact)) < 4 * found.gap_sem[row, 1]
    assert not found.gap[:, 0].any()
    assert not found.gap_sem[:, 0].any()
    np.testing.assert_allclose(found.gap, found.loss - found.loss[:, :1], atol=1e-12)


@pytest.mark.slow
def test_models_of_close_predictions_are_told_apart_by_the_paired_difference():
    best = debiased_step_size(d_x=5, context_length=40, noise_var=0.1)
    models = {
        "best": debiased_gradient_step(best, 0.01, d_x=5),
        "near": debiased_gradient_step(0.97 * best, 0.01, d_x=5),
    }
    found = shared_losses(models, TASK, n_prompts=200_000)
    assert found.gap_sem[0, 1] < found.loss_sem[0, 1] / 3
    rise = debiased_risk(0.97 * best, d_x=5, context_length=40, noise_var=0.1)
    rise -= debiased_risk(best, d_x=5, context_length=40, noise_var=0.1)
    assert abs(found.gap[0, 1] - rise) < 4 * found.gap_sem[0, 1]


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


def test_frame_figure_and_repr():
    found = shared_losses(
        {"a": kernel_head(0.5, 1.5, d_x=5)}, TASK, context_lengths=[10, 20], n_prompts=64
    )
    assert found.to_frame()["context_length"].tolist() == [10, 20]
    assert len(found.plot().data) == 1
    assert repr(found).startswith("SharedLosses(L = 10: a ")


def test_no_model_is_refused():
    with pytest.raises(ValueError, match="at least one model, got none"):
        shared_losses({}, TASK)
