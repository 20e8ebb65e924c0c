"""Numbers behind the labels: common matrices, shares, equal heads, and random models one by one and their p-values."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag

from mechinterp.analysis.circuits import circuits
from mechinterp.analysis.learners.nearest import evaluation
from mechinterp.analysis.one_layer import random_null
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.one_layer.head_statistics import equal_heads, read_heads
from mechinterp.analysis.one_layer.qk_form import QKForm, common_matrix, is_definite, rotation_angle
from mechinterp.analysis.one_layer.random_null import (
    SMALL_IS_STRUCTURE,
    Null,
    is_bare,
    null_of,
    stripped,
)
from mechinterp.analysis.one_layer.scales import spread_over_heads
from mechinterp.analysis.one_layer.substitution import faithfulness, idealised
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    from_circuits,
    linear_attention,
)
from mechinterp.models.heads import head_outputs, predict, stack
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.training.linear_models import initial_heads
from mechinterp.training.one_layer.step import initial_weights
from tests.analysis.test_labels import EYE, antisymmetric, pair, with_blocks

OF_NULL = TaskConfig(d_x=3, d_y=2)
MODEL = ModelConfig(n_heads=2, d_head=5, attend_to_self=True)
SERVES = 0.25  # a head serves a response where |mu_n| is above this part of its largest


@cache
def random_models() -> list[Weights]:
    """The initial models of the seeds from 0, one by one; how they are drawn does not depend on their keys."""
    config = ExperimentConfig(task=OF_NULL, model=replace(MODEL, attend_to_self=False))
    drawn = [initial_weights(replace(config, seed=seed)) for seed in range(100)]
    return [each.to(torch.float64).with_model(attend_to_self=True) for each in drawn]


def spread(weights: Weights) -> float:
    """The largest max/min - 1 of |omega| over the heads that serve one response."""
    sizes, mu = weights.omega.norm(dim=1), weights.mu.abs()
    spreads = []
    for n in range(2):
        served = [sizes[h].item() for h in range(2) if mu[h, n] > SERVES * mu[h].max()]
        if served:
            spreads.append(max(served) / min(served) - 1)
    return max(spreads)


def zero_sum(weights: Weights) -> float:
    total, size = weights.mu.sum(0).abs(), weights.mu.abs().sum(0)
    return (total / size).max().item()


def prompts_of_the_null() -> Prompts:
    return evaluation(OF_NULL, random_null.N_NULL_PROMPTS, 0, True).prompts


def substitution_r2(weights: Weights) -> float:
    ideal, prompts = (
        idealised(weights, torch.diag_embed(weights.omega), weights.mu),
        prompts_of_the_null(),
    )
    return faithfulness(predict(weights, prompts), predict(ideal, prompts)).r2


def task_r2(weights: Weights) -> float:
    prompts = prompts_of_the_null()
    missed = (predict(weights, prompts) - prompts.y_query).square().mean()
    return (1 - missed / prompts.y_query.square().mean()).item()


def share_of(weights: Weights) -> torch.Tensor:
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
IN_FLOAT32 = {"substitution_r2": substitution_r2, "task_r2": task_r2, "share": share_of}


@pytest.mark.slow
def test_statistics_are_those_of_the_models_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """Zero sum is the largest over responses, the spread that of heads of one response; the best head stands for its model."""
    monkeypatch.setattr(random_null, "MODELS", (100, 100))
    null_of.cache_clear()
    values = null_of(OF_NULL, MODEL, form="diagonal").values
    null_of.cache_clear()
    for name, statistic in (EXACT | IN_FLOAT32).items():
        each = np.concatenate([np.atleast_1d(statistic(weights)) for weights in random_models()])
        tolerance = {"rel": 1e-6, "abs": 1e-12} if name in EXACT else {"rel": 1e-4, "abs": 1e-5}
        assert values[name] == pytest.approx(np.sort(each), **tolerance), name


def test_p_values_count_the_value_itself_and_all_as_structured():
    values = np.array([1.0, 2.0, 2.0])
    null = Null(3, {"qk_diagonal": values, "zero_sum": values, "omega_spread": values})
    assert [null.p_value("qk_diagonal", value) for value in (1.0, 2.0, 3.0)] == [1, 0.75, 0.25]
    for name in ("zero_sum", "omega_spread"):
        assert [null.p_value(name, value) for value in (0.0, 1.0, 2.0)] == [0.25, 0.5, 1]
    assert np.isnan(null.p_value("zero_sum", float("nan")))


@pytest.mark.slow
@pytest.mark.parametrize("n_heads", [1, 20, 128])
def test_there_are_enough_models_for_a_p_value_below_a_hundredth(n_heads: int):
    task = TaskConfig(d_x=1, context_length=2)
    null = null_of(task, ModelConfig(n_heads=n_heads, d_head=1), form="scalar")
    for name, values in null.values.items():
        furthest = -np.inf if name in SMALL_IS_STRUCTURE else np.inf
        assert null.p_value(name, furthest) == 1 / (len(values) + 1) < 0.01, name
    assert len(null.values["zero_sum"]) == null.n_models
    assert len(null.values["qk_diagonal"]) == null.n_models * n_heads


def test_bare_heads_compare_x_with_x_and_read_y():
    whole = random_models()[0]
    found = stripped(whole)
    x, y = slice(3), slice(3, None)
    torch.testing.assert_close(found.QK[:, x, x], whole.QK[:, x, x])
    torch.testing.assert_close(found.OV[:, y], whole.OV[:, y])
    for unused in (found.QK[:, y], found.QK[:, :, y], found.OV[:, x]):
        assert not unused.any()
    linear = found.with_model(score="linear")
    assert is_bare(linear)
    assert not is_bare(found)  # softmax
    assert not is_bare(whole.with_model(score="linear"))


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
    assert torch.equal(QKForm("matrix", eye).fitted(whole), whole)
    diagonal = torch.stack([torch.diag(block.diagonal()) for block in whole])
    torch.testing.assert_close(QKForm("diagonal", eye).fitted(whole), diagonal)
    scalar = torch.stack([block.diagonal().mean() * eye for block in whole])
    torch.testing.assert_close(QKForm("scalar", eye).fitted(whole), scalar)
    matrix = common_matrix(whole, torch.ones(2).double())
    scale = (whole * matrix).sum((1, 2)) / 3
    fitted = QKForm("common", matrix).fitted(whole)
    torch.testing.assert_close(fitted, scale[:, None, None] * matrix)
    # Models on a leading axis are fitted one by one.
    both = torch.stack([whole, whole.mT])
    each = common_matrix(both, torch.ones(2, 2).double())
    torch.testing.assert_close(each[0], matrix)
    torch.testing.assert_close(QKForm("common", each[:, None]).fitted(both)[0], fitted)


def test_a_range_leaves_out_a_twentieth_on_each_side():
    values = np.append(np.arange(101.0), [np.nan, np.nan])
    null = Null(103, {"share": values, "mu": np.full(3, np.nan)})
    assert null.ranges["share"] == (5, 95)
    assert np.isnan(null.ranges["mu"]).all()


def random_blocks(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, 4, 4, dtype=torch.float64, generator=generator)


def common(blocks: torch.Tensor, weight: torch.Tensor) -> QKForm:
    return QKForm("common", common_matrix(blocks, weight))


def test_a_common_matrix_is_found_with_its_factors():
    matrix = random_blocks(1)[0]
    matrix *= 2 / matrix.norm() * matrix.trace().sign()  # norm sqrt(4), trace >= 0
    scales = torch.tensor([0.3, -2.0, 0.01], dtype=torch.float64)
    blocks = scales[:, None, None] * matrix
    found = common(blocks, torch.ones(3).double())
    torch.testing.assert_close(found.matrix, matrix)
    torch.testing.assert_close(found.omega(blocks), scales[:, None].expand(3, 4))
    torch.testing.assert_close(found.fitted(blocks), blocks)
    np.testing.assert_allclose(found.alignment(blocks), 1)


def test_the_common_matrix_explains_most_that_one_matrix_can():
    blocks, weight = random_blocks(5), torch.tensor([1.0, 2.0, 0.5, 1.0, 0.1]).double()
    flat = blocks.flatten(1)
    largest = torch.linalg.svdvals(weight[:, None] * flat / flat.norm(dim=1, keepdim=True))[0]
    explained = np.linalg.norm(weight.numpy() * common(blocks, weight).alignment(blocks))
    assert explained == pytest.approx(largest.item())


def test_zero_blocks_have_no_direction():
    zeros = torch.zeros(2, 3, 3).double()
    found = common(zeros, torch.ones(2).double())
    assert found.alignment(zeros).tolist() == [0, 0]
    assert not found.omega(zeros).any()
    blocks = torch.stack([torch.eye(3), torch.zeros(3, 3)]).double()
    mixed = common(blocks, torch.ones(2).double())
    assert mixed.alignment(blocks).tolist() == pytest.approx([1, 0])


def test_equal_heads_within_the_tolerance_and_through_others():
    base = random_blocks(1)[0]
    near, nearer, far = base * 1.04, base * 1.08, base * 1.3
    stack = torch.stack([base, far, nearer, near, -base])
    # base and nearer differ by more than 5%, but near is within 5% of both.
    assert equal_heads(stack, tolerance=0.05).tolist() == [0, 1, 0, 0, 2]
    assert equal_heads(stack, tolerance=0.001).tolist() == [0, 1, 2, 3, 4]
    # 0.051 / 1.051 is below 5%.
    close = torch.stack([torch.eye(3), 1.051 * torch.eye(3)])
    assert equal_heads(close, tolerance=0.05).tolist() == [0, 0]
    assert equal_heads(close, tolerance=0.048).tolist() == [0, 1]
    zeros = torch.zeros(2, 2, 3)
    assert equal_heads(zeros, tolerance=0.05).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ([[2.0, 1.0], [1.0, 2.0]], True),
        ([[-2.0, 1.0], [1.0, -2.0]], True),
        ([[1.0, 2.0], [2.0, 1.0]], False),
        ([[1.0, 1.0], [-1.0, 1.0]], False),
        ([[1.0, 0.2], [-0.2, 1.0]], True),
        ([[0.0, 0.0], [0.0, 0.0]], False),
    ],
)
def test_a_metric_is_symmetric_and_definite(matrix: list[list[float]], expected: bool):
    assert is_definite(torch.tensor(matrix), tolerance=0.05) is expected


def turn(degrees: float) -> np.ndarray:
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    return np.array([[c, -s], [s, c]])


def test_the_angle_of_a_rotation_of_any_size():
    angle = partial(rotation_angle, spread=0.25)
    for degrees in (0.0, 30.0, 120.0):
        matrix = 0.7 * block_diag(turn(degrees), 1)
        assert angle(matrix) == pytest.approx(degrees, abs=1e-6)
        assert np.isnan(angle(matrix @ np.diag([1, 1, 2])))
    assert angle(block_diag(turn(30), turn(90))) == pytest.approx(90)
    for diagonal in ([1.0, 1.0, 0.5], [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]):
        assert np.isnan(angle(np.diag(diagonal)))


def test_heads_of_other_responses_do_not_count_in_the_spread():
    sizes = torch.tensor([1.0, 1.2, 5.0, 6.5], dtype=torch.float64)
    mu = torch.tensor([[4.0, 0.9], [-4.0, 0.0], [0.5, 2.0], [0.0, -2.0]], dtype=torch.float64)
    assert spread_over_heads(sizes, mu, serving=0.25).item() == pytest.approx(0.3)
    # With leaks of 0.225 and 0.25 the first and third head serve both responses.
    assert spread_over_heads(sizes, mu, serving=0.2).item() == pytest.approx(5.5)
    both = spread_over_heads(sizes.expand(2, -1), torch.stack([mu, mu.flip(1)]), serving=0.25)
    assert both.tolist() == pytest.approx([0.3, 0.3])


ONE_HEAD = ModelConfig(n_heads=1, d_head=6)


def random_head(seed: int = 0) -> Weights:
    return initial_weights(ExperimentConfig(model=ONE_HEAD, seed=seed))


@pytest.mark.parametrize(("size", "pattern"), [(0.05, "undetermined"), (0.3, "unstructured")])
def test_the_prediction_alone_may_be_beyond_random_weights(size: float, pattern: str):
    weights = with_blocks(size * (EYE + 1.3 * antisymmetric())[None], [1.5])
    OV = weights.OV.clone()
    OV[0, 0, 0] = 0.9 * 1.5
    found = classify(from_circuits(weights.QK, OV))
    assert found.label == pattern
    assert min(found.p_values[f"{name}_best"] for name in ("qk_diagonal", "ov_last_entry")) > 0.01
    assert (found.p_values["substitution_r2"] <= 0.01) == (pattern == "undetermined")


def test_task_leak_is_the_second_largest_of_many_responses():
    weights = diagonal_heads([0.13, -0.13], [[3.0, 1.0, 0.5], [-3.0, -1.0, -0.5]], d_x=5, d_y=3)
    found = read_heads(circuits(weights), torch.zeros(2, 2, 3).double())
    assert found.task_leak == pytest.approx([1 / 3, 1 / 3])


def test_a_share_is_the_root_of_the_variance_of_all_responses():
    outputs = torch.tensor([[[3.0, 4.0], [5.0, 0.0]], [[-3.0, -4.0], [-5.0, 0.0]]]).double()
    weights = diagonal_heads([0.1, 0.1], [[1.0, 1.0], [1.0, 0.0]], d_x=5, d_y=2)
    assert read_heads(circuits(weights), outputs).share == pytest.approx([0.5, 0.5])


def test_heads_that_read_other_keys_are_not_equal():
    weights = diagonal_heads([0.13, 0.13, -0.13], [1.7, 1.7, -3.4], d_x=5)
    outputs = torch.zeros(2, 3, 1).double()
    assert read_heads(circuits(weights), outputs, tolerance=0.05).names == ("0+1", "2")
    QK = weights.QK.clone()
    QK[1, 0, 5] = 0.1  # a y among the keys
    apart = from_circuits(QK, weights.OV)
    assert read_heads(circuits(apart), outputs, tolerance=0.05).names == ("0", "1", "2")


@pytest.mark.slow
def test_p_values_of_a_pattern_are_the_least_possible_and_the_best_head_stands_for_its_model():
    found = classify(debiased_gradient_step(0.88, 0.13, d_x=5))
    assert set(found.p_values.values()) == {1 / 401}
    assert found.head_p_values["ov_last_entry"] == pytest.approx([1 / 801] * 2)
    found = classify(stack([pair(), random_head()]))
    assert found.p_values["qk_diagonal_best"] < 0.01
    assert found.p_values["ov_last_entry_best"] < 0.01


@pytest.mark.slow
def test_random_models_are_drawn_with_the_law_of_the_model():
    law = {"score": "1+Cx", "score_slope": 5.0, "attend_to_self": True}
    found = classify(random_head(3).with_model(**law))
    r2, p = found.substitution.r2, found.p_values["substitution_r2"]
    same = null_of(TaskConfig(), replace(ONE_HEAD, **law), form=found.form.kind)
    assert p == same.p_value("substitution_r2", r2)
    other = null_of(TaskConfig(), ONE_HEAD, form=found.form.kind)
    assert p != other.p_value("substitution_r2", r2)


# Seeds from 10,000 on are not those of the null.


@pytest.mark.slow
def test_a_linear_preset_is_held_against_random_weights_of_its_kind():
    config, tasks = preset("linear-merged"), []
    for seed in range(10_000, 10_015):
        heads = initial_heads(replace(config, seed=seed))
        found = classify(linear_attention(heads), task=config.task)
        assert found.label == "undetermined"
        assert found.p_values["substitution_r2"] == found.p_values["ov_last_entry_best"] == 1
        tasks.append(found.p_values["task_r2"])
    assert np.mean(tasks) == pytest.approx(0.5, abs=4 / (12 * len(tasks)) ** 0.5)


@pytest.mark.slow
def test_p_values_of_random_weights_are_uniform():
    values: dict[str, list[float]] = {}
    for seed in range(10_000, 10_200):
        for name, p in classify(initial_weights(ExperimentConfig(seed=seed))).p_values.items():
            values.setdefault(name, []).append(p)
    assert len(values) == 6
    for name, found in values.items():
        # Two standard errors of a mean of 200 uniform numbers are .041; the null itself has 400 models.
        if name != "zero_sum":  # it is exactly 1 for half of the models, whose p is 1
            assert np.mean(found) == pytest.approx(0.5, abs=0.07), name
        assert np.mean(np.array(found) <= 0.1) == pytest.approx(0.1, abs=0.06), name


def test_the_figure_of_a_label_shows_its_evidence_beside_limits_and_ranges():
    found = classify(pair())
    frame = found.evidence_frame().set_index("evidence")
    shown = frame[(frame.limit != "") | (frame.random_weights != "")]
    ranges, limits, values = found.figures()["evidence"].data
    assert list(values.y) == list(shown.index)
    np.testing.assert_array_equal(values.x, shown.value)
    assert {"omega_spread", "substitution_r2", "task_r2"} <= set(values.y)
    texts = ["" if np.isnan(limit) else f"{limit:g}" for limit in limits.x]
    assert texts == [limit.lstrip("≤≥ ") for limit in shown.limit]
    low, high = found.random_ranges["task_r2"]
    place = list(ranges.y).index("task_r2")
    assert list(ranges.x[place : place + 2]) == [low, high]
