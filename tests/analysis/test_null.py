"""Random models as the classifier sees them, against the same numbers computed one model at a time."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from mechinterp.analysis.learners.nearest import evaluation
from mechinterp.analysis.one_layer.label_rules import Form, common_matrix, faithfulness, idealised
from mechinterp.analysis.one_layer.random_null import (
    N_PROMPTS,
    Null,
    is_bare,
    null_of,
    stripped,
)
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights, head_outputs, predict
from mechinterp.training.one_layer.step import initial_weights

TASK = TaskConfig(d_x=3, d_y=2)
MODEL = ModelConfig(n_heads=2, d_head=5, attend_to_self=True)
SERVES = 0.25  # a head serves a response where |mu_n| is above this part of its largest


@cache
def random_models() -> list[AttentionWeights]:
    """The initial models of the seeds from 0, one by one; how they are drawn does not depend on their keys."""
    config = ExperimentConfig(task=TASK, model=replace(MODEL, attend_to_self=False))
    drawn = [initial_weights(replace(config, seed=seed)) for seed in range(400)]
    return [replace(weights.to(torch.float64), attend_to_self=True) for weights in drawn]


def spread(weights: AttentionWeights) -> float:
    """The largest max/min - 1 of |omega| over the heads that serve one response."""
    sizes, mu = weights.omega.norm(dim=1), weights.mu.abs()
    spreads = []
    for n in range(2):
        served = [sizes[h].item() for h in range(2) if mu[h, n] > SERVES * mu[h].max()]
        if served:
            spreads.append(max(served) / min(served) - 1)
    return max(spreads)


def zero_sum(weights: AttentionWeights) -> float:
    total, size = weights.mu.sum(0).abs(), weights.mu.abs().sum(0)
    return (total / size).max().item()


def prompts_of_the_null() -> Prompts:
    return evaluation(TASK, N_PROMPTS, 0, True).prompts


def substitution_r2(weights: AttentionWeights) -> float:
    ideal, prompts = (
        idealised(weights, torch.diag_embed(weights.omega), weights.mu),
        prompts_of_the_null(),
    )
    return faithfulness(predict(weights, prompts), predict(ideal, prompts)).r2


def task_r2(weights: AttentionWeights) -> float:
    prompts = prompts_of_the_null()
    missed = (predict(weights, prompts) - prompts.y_query).square().mean()
    return (1 - missed / prompts.y_query.square().mean()).item()


def share(weights: AttentionWeights) -> torch.Tensor:
    sizes = head_outputs(weights, prompts_of_the_null()).var(0).sum(1).sqrt()
    return sizes / sizes.sum()


EXACT = {
    "zero_sum": zero_sum,
    "omega_spread": spread,
    "omega_mean": lambda weights: weights.omega.mean(1),
    "mu": lambda weights: weights.mu.flatten(),
    "qk_diagonal": lambda weights: weights.qk_diagonal,
    "qk_diagonal_best": lambda weights: weights.qk_diagonal.max(),
    "ov_last_entry": lambda weights: weights.ov_last_entry,
    "ov_last_entry_best": lambda weights: weights.ov_last_entry.max(),
}
IN_FLOAT32 = {"substitution_r2": substitution_r2, "task_r2": task_r2, "share": share}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT | IN_FLOAT32)
def test_a_statistic_is_that_of_the_models_one_by_one(name: str):
    """Zero sum is the largest over responses, the spread that of heads of one response; the best head stands for its model."""
    statistic = (EXACT | IN_FLOAT32)[name]
    each = np.concatenate([np.atleast_1d(statistic(weights)) for weights in random_models()])
    found = null_of(TASK, MODEL, form="diagonal").values[name]
    tolerance = {"rel": 1e-6, "abs": 1e-12} if name in EXACT else {"rel": 1e-4, "abs": 1e-5}
    assert found == pytest.approx(np.sort(each), **tolerance)


def test_p_values_count_the_value_itself_and_all_as_structured():
    values = np.array([1.0, 2.0, 2.0])
    null = Null(3, {"qk_diagonal": values, "zero_sum": values, "omega_spread": values})
    assert [null.p_value("qk_diagonal", value) for value in (1.0, 2.0, 3.0)] == [1, 0.75, 0.25]
    for name in ("zero_sum", "omega_spread"):
        assert [null.p_value(name, value) for value in (0.0, 1.0, 2.0)] == [0.25, 0.5, 1]
    assert np.isnan(null.p_value("zero_sum", float("nan")))


@pytest.mark.slow
@pytest.mark.parametrize(("n_heads", "n_models"), [(1, 400), (20, 320), (128, 100)])
def test_there_are_enough_models_for_a_small_p_value(n_heads: int, n_models: int):
    task = TaskConfig(d_x=1, context_length=2)
    null = null_of(task, ModelConfig(n_heads=n_heads, d_head=1), form="scalar")
    assert null.n_models == n_models
    assert len(null.values["zero_sum"]) == n_models
    assert len(null.values["qk_diagonal"]) == n_models * n_heads


def test_bare_heads_compare_x_with_x_and_read_y():
    whole = random_models()[0]
    found = stripped(whole)
    x, y = slice(3), slice(3, None)
    torch.testing.assert_close(found.QK[:, x, x], whole.QK[:, x, x])
    torch.testing.assert_close(found.OV[:, y], whole.OV[:, y])
    for unused in (found.QK[:, y], found.QK[:, :, y], found.OV[:, x]):
        assert not unused.any()
    linear = replace(found, score="linear")
    assert is_bare(linear)
    assert not is_bare(found)  # softmax
    assert not is_bare(replace(whole, score="linear"))


@pytest.mark.slow
def test_random_weights_of_bare_heads_are_bare():
    task = TaskConfig(d_x=2, context_length=4)
    model = ModelConfig(n_heads=2, score="linear/L")
    found = null_of(task, model, form="matrix", bare=True).values
    for name in ("ov_last_entry", "ov_last_entry_best", "substitution_r2"):
        assert found[name] == pytest.approx(1, abs=1e-5), name
    whole = null_of(task, model, form="matrix").values
    assert whole["substitution_r2"].max() < 1 - 1e-5
    assert found["qk_diagonal"] == pytest.approx(whole["qk_diagonal"])


def test_blocks_are_fitted_by_their_form():
    whole = random_models()[0].QK[:, :3, :3]
    eye = torch.eye(3, dtype=torch.float64)
    assert torch.equal(Form("matrix", eye).fitted(whole), whole)
    diagonal = torch.stack([torch.diag(block.diagonal()) for block in whole])
    torch.testing.assert_close(Form("diagonal", eye).fitted(whole), diagonal)
    scalar = torch.stack([block.diagonal().mean() * eye for block in whole])
    torch.testing.assert_close(Form("scalar", eye).fitted(whole), scalar)
    matrix = common_matrix(whole, torch.ones(2).double())
    scale = (whole * matrix).sum((1, 2)) / 3
    common = Form("common", matrix).fitted(whole)
    torch.testing.assert_close(common, scale[:, None, None] * matrix)
    # Models on a leading axis are fitted one by one.
    both = torch.stack([whole, whole.mT])
    each = common_matrix(both, torch.ones(2, 2).double())
    torch.testing.assert_close(Form("common", each[:, None]).fitted(both)[0], common)


def test_blocks_that_have_a_common_matrix_are_their_own_idealised_selves():
    matrix = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0, 0.5]).double())
    blocks = torch.stack([0.1 * matrix, -0.2 * matrix])
    common = Form("common", common_matrix(blocks, torch.ones(2).double()))
    torch.testing.assert_close(common.fitted(blocks), blocks)


def test_a_range_leaves_out_a_twentieth_on_each_side():
    values = np.append(np.arange(101.0), [np.nan, np.nan])
    null = Null(103, {"share": values, "mu": np.full(3, np.nan)})
    assert null.ranges["share"] == (5, 95)
    assert np.isnan(null.ranges["mu"]).all()
