"""What stands in for a model: faithfulness with its errors, idealised heads, one gradient step."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.learners.nearest import evaluation
from mechinterp.analysis.one_layer.label_rules import faithfulness, idealised
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.predictors import debiased_gd, vanilla_gd
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.heads import predict
from mechinterp.training.one_layer.step import initial_weights


def test_faithfulness_of_a_known_gap():
    prediction = torch.tensor([[1.0], [2.0], [3.0]])
    found = faithfulness(prediction, prediction - torch.tensor([[0.1], [-0.1], [0.1]]))
    assert found.rms == pytest.approx(0.1, rel=1e-5)
    assert found.rms_sem == pytest.approx(0, abs=1e-6)  # the gap is the same on all prompts
    assert found.r2 == pytest.approx(1 - 0.01 * 3 / 14, rel=1e-6)
    same = faithfulness(prediction, prediction)
    assert (same.r2, same.rms, same.rms_sem) == (1, 0, 0)


def test_standard_errors_of_survival_are_those_of_repetition():
    random = np.random.default_rng(0)
    draws = [
        faithfulness(torch.from_numpy(p), torch.from_numpy(p + 0.5 * random.normal(size=p.shape)))
        for p in random.normal(size=(400, 200, 1))
    ]
    for name in ("r2", "rms"):
        values = np.array([getattr(draw, name) for draw in draws])
        stated = np.mean([getattr(draw, f"{name}_sem") for draw in draws])
        assert stated == pytest.approx(values.std(ddof=1), rel=0.12)


def test_idealised_heads_lose_their_leaks_and_nothing_else():
    law = {"score": "1+Cx", "score_slope": 0.5, "attend_to_self": True}
    clean = replace(diagonal_heads([0.3, -0.2], [2.0, -1.0], d_x=5), **law)
    dirty = clean.with_tensors({"W_Q": clean.W_Q + 0.1, "W_V": clean.W_V + 0.1})
    found = idealised(dirty, torch.diag_embed(clean.omega), clean.mu)
    assert {name: getattr(found, name) for name in law} == law
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
def test_small_heads_take_the_step_with_their_matrix(attend_to_self: bool):
    task = TaskConfig(d_x=3, context_length=9)
    weights = initial_weights(ExperimentConfig(task=task))
    blocks = weights.to(torch.float64).QK[:, :3, :3] * 1e-4
    mu = torch.tensor([[1e4], [-1e4]], dtype=torch.float64)
    heads = replace(idealised(weights, blocks, mu), attend_to_self=attend_to_self)
    found = evaluation(task, 16, 0, attend_to_self)
    step = torch.einsum("hn,hij->nij", mu, blocks)
    expected = found.gradient_step(step, centred=True)
    torch.testing.assert_close(predict(heads, found.prompts), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attend_to_self", [False, True])
def test_linear_attention_takes_the_step_exactly(attend_to_self: bool):
    task = TaskConfig(d_x=3, context_length=9)
    weights = initial_weights(ExperimentConfig(task=task)).to(torch.float64)
    blocks, mu = weights.QK[:, :3, :3], weights.mu
    law = replace(weights, score="linear", score_slope=1 / 9, attend_to_self=attend_to_self)
    found = evaluation(task, 16, 0, attend_to_self)
    expected = found.gradient_step(torch.einsum("hn,hij->nij", mu, blocks), centred=False)
    torch.testing.assert_close(predict(idealised(law, blocks, mu), found.prompts), expected)


def test_faithfulness_is_over_prompts_and_responses():
    prediction = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    found = faithfulness(prediction, prediction - 0.1)
    assert found.rms == pytest.approx(0.1)
    assert found.r2 == pytest.approx(1 - 4 * 0.01 / 30)
