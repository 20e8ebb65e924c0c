"""Learners at their best beside a model, on the same prompts."""

import numpy as np
import pytest
import torch

from mechinterp.analysis.learners.compare import PENALTIES, baselines
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.one_layer import zero_head
from mechinterp.models.hooked.transformer import ICLTransformer
from tests.deep_models import random_gpt2

SPARSE = TaskConfig(d_x=8, context_length=12, sparsity=2, nonzeros="signs", noise_var=0.3)


def zero_model(task: TaskConfig) -> ICLTransformer:
    return ICLTransformer.from_weights(zero_head(d_x=task.d_x), task=task).double()


def drawn(task: TaskConfig, n_prompts: int = 200):
    generator = generator_for(0, "eval", 0)
    return sample_prompts(task, n_prompts, generator=generator, dtype=torch.float64)


def test_a_model_that_predicts_0_is_once_as_bad_as_predicting_0():
    prompts = drawn(SPARSE)
    found = baselines(zero_model(SPARSE), prompts)
    assert found.learners == ("zero", "least squares", "ridge", "GD", "Algorithm 1")
    assert (found.ratio[0, 0], found.ratio_sem[0, 0]) == (1.0, 0.0)
    assert found.model_risk[0] == pytest.approx(
        prompts.y_query_clean.square().mean().item(), rel=1e-9
    )


def test_each_learner_has_the_setting_that_is_best_on_the_prompts():
    prompts = drawn(SPARSE)
    found = baselines(zero_model(SPARSE), prompts)

    def risks(predictions: torch.Tensor) -> np.ndarray:
        return (predictions - prompts.y_query_clean).square().mean((-2, -1)).numpy()

    by_penalty = risks(torch.stack([ridge(prompts, penalty=p) for p in PENALTIES]))
    by_step = risks(preprocess_then_optimise(prompts, steps=128))
    assert 0 < by_penalty.argmin() < len(PENALTIES) - 1
    assert found.tuned[0, 2] == PENALTIES[by_penalty.argmin()]
    assert found.tuned[0, 4] == by_step.argmin()
    assert found.risk[0, [1, 2, 4]] == pytest.approx(
        [by_penalty[0], by_penalty.min(), by_step.min()], rel=1e-9
    )
    assert found.ratio[0, 2] == pytest.approx(found.model_risk[0] / by_penalty.min(), rel=1e-9)
    assert np.isnan(found.tuned[0, :2]).all()
    assert found.to_frame().columns.tolist() == [
        *("learner", "tuned", "risk", "risk_sem", "ratio", "ratio_sem")
    ]
    # Predicting 0 has no bar: the others would be too small beside it.
    assert list(found.plot().data[0].x) == [
        *("the model", "least squares", "ridge", "GD", "Algorithm 1")
    ]
    assert repr(found).startswith("Baselines(The model's excess risk is ")


def test_no_ratio_is_formed_to_a_learner_that_makes_no_error():
    exact = TaskConfig(d_x=3, context_length=12, noise_var=0.0)
    found = baselines(zero_model(exact), drawn(exact))
    assert np.isnan(found.ratio[0]).tolist() == [False, True, True, False, False]
    assert found.tuned[0, 2] == 0


def test_a_function_of_prompts_is_a_source():
    """The last of its predictions counts, where it gives one after every layer."""
    task = TaskConfig(d_x=3)
    prompts = sample_prompts(task, 64, seed=0, dtype=torch.float64)

    def path(prompts):
        return torch.stack([prompts.y_query_clean + 5, ridge(prompts, penalty=1.0)])

    found = baselines(path, prompts)
    error = (ridge(prompts, penalty=1.0) - prompts.y_query_clean).square().mean()
    assert found.model_risk[0] == pytest.approx(error.item(), rel=1e-12)
    assert baselines(path, task=task, n_prompts=64).model_risk[0] > 0
    with pytest.raises(ValueError, match="baselines needs a task for a"):
        baselines(path)


def test_prompts_are_enough_for_a_model_without_a_task():
    model = random_gpt2()
    prompts = drawn(TaskConfig(d_x=4, context_length=8))
    error = (model.predict(prompts) - prompts.y_query_clean).square().mean()
    assert baselines(model, prompts).model_risk[0] == pytest.approx(error.item(), rel=1e-12)
    with pytest.raises(ValueError, match="baselines needs a task for a"):
        baselines(model)
