"""Where the classifier draws its lines, the numbers behind them, and what its answers say."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify, classify_circuits
from mechinterp.analysis.one_layer.label_rules import Form, Thresholds, common_matrix, read_heads
from mechinterp.analysis.one_layer.random_null import null_of
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    from_circuits,
)
from mechinterp.models.heads import AttentionWeights, stack
from mechinterp.training.one_layer.step import initial_weights
from tests.analysis.test_labels import (
    MODE_2,
    MODE_3,
    TABLE_2,
    TWO,
    assert_undetermined,
    rotation,
    with_blocks,
)

FREE = replace(TWO, supports=None)
ONE_HEAD = ModelConfig(n_heads=1, d_head=6)
EYE = torch.eye(5, dtype=torch.float64)
UNEVEN = [0.15, 0.15, 0.2, 0.2, 0.15, 0.15]


def two_responses(
    omega: list[list[float]], mu: list[list[float]], task: TaskConfig = FREE
) -> Classification:
    """The label of heads with six coordinates and two responses."""
    return classify(diagonal_heads(omega, mu, d_x=6, d_y=2), task)


def opposite(omega: list[float], mu: list[float]) -> Classification:
    """The label of a head with its exact opposite."""
    return two_responses([omega, [-o for o in omega]], [mu, [-m for m in mu]])


def pair() -> AttentionWeights:
    return diagonal_heads([0.13, -0.13], [3.4, -3.4], d_x=5)


def random_head(seed: int = 0) -> AttentionWeights:
    return initial_weights(ExperimentConfig(model=ONE_HEAD, seed=seed))


def antisymmetric() -> Tensor:
    """A matrix at right angles to I and to all symmetric ones, of I's norm."""
    random = torch.Generator().manual_seed(0)
    matrix = torch.randn(5, 5, dtype=torch.float64, generator=random)
    matrix = matrix - matrix.T
    return matrix * 5**0.5 / matrix.norm()


def two_shapes(apart: float) -> Tensor:
    """Two QK x blocks that leave I in one direction, and each other in a second one."""
    along = 0.5 * torch.diag(torch.tensor([1.0, -0.5, 0.5, -1.0, 0.0]).double())
    across = 0.5 * torch.diag(torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0]).double())
    return torch.stack([0.1 * (EYE + along), -0.1 * (EYE + along + apart * across)])


@pytest.mark.slow
def test_heads_that_serve_one_response_with_the_wrong_sign_are_no_task_heads():
    found = two_responses(MODE_3.omega.tolist(), [[0, -3.2], [0, 3.2], [3.3, 0], [-3.3, 0]], TWO)
    labels = ("mismatched", "mismatched", "positive", "negative")
    assert_undetermined(found, "and support_leak is not defined", *labels)
    assert np.isnan(found.scales.support_leak)
    assert np.isnan(found.scales.theta_spread)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.6, 0.5])
def test_opposite_heads_may_serve_a_response_half_as_much(part: float):
    found = opposite(UNEVEN, [2, 2 * part])
    assert found.pattern == "weighted_preconditioned_gd"
    assert f"mu within {1 - part:.0%}" in found.reason


def test_opposite_heads_that_serve_a_response_too_little_do_not_weigh():
    found = opposite(UNEVEN, [2, 0.8])
    assert_undetermined(found, "theta_spread is 0.333, above the limit 0.25")


@pytest.mark.slow
def test_all_heads_must_serve_all_responses_for_a_weighted_step():
    first, second = [0.15] * 3 + [0.2] * 3, [0.2] * 3 + [0.14] * 3
    omega = [first, [-o for o in first], second, [-o for o in second]]
    found = two_responses(omega, [[2, 2], [-2, -2], [2, 0.6], [-2, -0.6]])
    assert found.pattern == "superposition"
    assert found.task_leak == pytest.approx([1, 1, 0.3, 0.3])


@pytest.mark.slow
def test_a_step_is_plain_only_where_all_supports_are_full():
    weights = debiased_gradient_step(0.9, 0.1, d_x=6, d_y=2)
    full, part = tuple(range(6)), (0, 1, 2, 3)
    half = classify(weights, replace(TWO, supports=(full, part)))
    assert half.pattern == "weighted_preconditioned_gd"
    assert classify(weights, replace(TWO, supports=(full, full))).pattern == "debiased_gd"


@pytest.mark.parametrize(
    ("omega", "mu", "reason"),
    [
        ((0.08, -0.16), (3.4, -3.4), "omega_spread is 1.000, above the limit 0.25"),
        ((0.13, -0.13), (3.4, -2.4), "zero_sum is 0.172, above the limit 0.05"),
    ],
)
def test_what_is_not_even_is_undetermined_with_several_responses(omega, mu, reason):
    found = two_responses([[each] * 6 for each in omega], [[each] * 2 for each in mu])
    assert_undetermined(found, reason)


@pytest.mark.slow
def test_an_uneven_theta_is_no_superposition():
    omega = TABLE_2.omega * torch.tensor([1, 1.6, 1, 1, 1, 1])
    found = two_responses(omega.tolist(), TABLE_2.mu.tolist(), TWO)
    assert_undetermined(
        found, "heads serve several responses and theta_spread is 0.600, above the limit 0.25"
    )


def test_a_response_that_is_pushed_away_is_undetermined():
    found = opposite([0.13] * 6, [3.4, -3.4])
    assert_undetermined(
        found, "heads serve several responses and support_leak is not defined", "mixed", "mixed"
    )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_response_that_no_head_serves_is_named(missing: int):
    mu = [0.0, 0.0]
    mu[1 - missing] = 3.4
    found = opposite([0.13] * 6, mu)
    assert_undetermined(found, f"no head serves response {missing}", "positive", "negative")
    assert found.scales.unserved == (missing,)
    assert np.isnan(found.scales.zero_sum)


def test_heads_that_all_cancel_are_no_model():
    found = classify(diagonal_heads([0.13, 0.13], [3.4, -3.4], d_x=5))
    assert_undetermined(found, "no head is active, or the active heads cancel each other")


@pytest.mark.slow
def test_predictions_of_zero_are_undetermined():
    weights = diagonal_heads([0.5, -0.5], [1.0, 1.0], d_x=5)
    found = classify(replace(weights, score="linear", score_slope=0.025))
    assert_undetermined(found, "the predictions are all 0, or not finite")


def test_a_leaning_head_needs_a_better_substitute():
    found = classify(with_blocks(0.1 * (EYE + 0.55 * antisymmetric())[None], [1.5]))
    assert found.labels == ("positive",)
    assert found.pattern == "undetermined"
    assert 0.9 < found.substitution.r2 < 0.95
    cosine = 1 / (1 + 0.55**2) ** 0.5
    assert f"with its form is {cosine:.3f}, below the limit 0.9" in found.reason
    assert f"R² = {found.substitution.r2:.3f}, below the limit 0.95" in found.reason


def test_one_leaning_head_among_clean_ones_is_enough():
    blocks = torch.stack([0.1 * EYE, 0.1 * (EYE + 0.7 * antisymmetric())])
    found = classify(with_blocks(blocks, [0.7, 1.5]))
    assert found.labels == ("positive", "positive")
    cosine = 1 / (1 + 0.7**2) ** 0.5
    assert f"with its form is {cosine:.3f}, below" in found.reason


@pytest.mark.slow
def test_dummies_do_not_lean():
    weights = pair()
    OV = weights.OV.clone()
    OV[:, 0, 0] = 0.9  # both read x, so that idealised heads lose some of the prediction
    dummy = with_blocks(0.1 * antisymmetric()[None], [1e-4])
    found = classify(stack([from_circuits(weights.QK, OV), dummy]))
    assert 0.9 < found.substitution.r2 < 0.95
    assert found.labels[2] == "dummy"
    assert found.pattern == "debiased_gd"


def test_a_head_that_reads_x_is_named_with_its_number():
    weights = pair()
    OV = weights.OV.clone()
    OV[0, 0, 0] = 3.0
    found = classify(from_circuits(weights.QK, OV))
    assert found.pattern == "undetermined"
    value = 3.4 / np.hypot(3.4, 3.0)
    assert (
        f"head 0 is unstructured: ov_last_entry is {value:.3f}, below the limit 0.9" in found.reason
    )


@pytest.mark.parametrize(("size", "pattern"), [(0.05, "undetermined"), (0.3, "unstructured")])
def test_the_prediction_alone_may_be_beyond_random_weights(size: float, pattern: str):
    weights = with_blocks(size * (EYE + 1.3 * antisymmetric())[None], [1.5])
    OV = weights.OV.clone()
    OV[0, 0, 0] = 0.9 * 1.5
    found = classify(from_circuits(weights.QK, OV))
    assert found.pattern == pattern
    assert min(found.p_values[f"{name}_best"] for name in ("qk_diagonal", "ov_last_entry")) > 0.01
    assert (found.p_values["substitution_r2"] <= 0.01) == (pattern == "undetermined")


@pytest.mark.slow
def test_linear_heads_are_labelled_by_their_own_diagonal():
    # Their sum is .9 I, a step; alone none of them is near a multiple of I.
    turn = 3 * antisymmetric()
    blocks = torch.stack([0.45 * EYE + turn, 0.45 * EYE - turn])
    found = classify(replace(with_blocks(blocks, [1.0, 1.0]), score="linear", score_slope=0.025))
    assert found.pattern == "linear_gd"
    assert found.labels == ("unstructured",) * 2


def test_a_leak_below_its_limit_has_no_sign():
    mu = [[-0.5, 3.2], [0.5, -3.2], [3.3, 0], [-3.3, 0]]
    found = two_responses(MODE_3.omega.tolist(), mu, TWO)
    assert found.pattern == "task_heads"
    assert found.labels == ("positive", "negative") * 2
    assert f"leak up to {0.5 / 3.2:.3f}" in found.reason


def test_a_small_entry_of_a_negative_head_has_no_sign():
    found = classify(diagonal_heads([[-0.4, -0.4, -0.4, -0.4, 0.01]], [-1.5], d_x=5))
    assert found.labels == ("negative",)


def test_reasons_of_several_responses_say_what_there_is():
    assert "mu within 0%" in classify(MODE_2, FREE).reason
    superposed = classify(TABLE_2, TWO)
    assert "superposition" in repr(superposed)
    assert "; head" not in superposed.reason


@pytest.mark.slow
def test_other_score_functions_count_with_their_slope():
    weights = replace(debiased_gradient_step(0.8, 0.05, d_x=5), score="1+Cx", score_slope=0.5)
    found = classify(weights)
    assert found.pattern == "debiased_gd"
    assert found.substitution.r2 > 0.999
    assert found.scales.eta[0] == pytest.approx(0.4)
    assert found.scales.theta == pytest.approx(np.full((1, 5), 0.4))
    torch.testing.assert_close(found.scales.step, 0.4 * EYE[None])


def test_omega_spread_of_several_responses_compares_norms():
    norms = np.linalg.norm(TABLE_2.omega.numpy(), axis=1)
    spread = classify(TABLE_2, TWO).scales.omega_spread
    assert spread == pytest.approx(norms.max() / norms.min() - 1)


def test_omega_spread_compares_heads_of_one_response():
    omega = [[0.1] * 6, [-0.1] * 6, [0.2] * 6, [-0.2] * 6]
    found = two_responses(omega, [[4, 0], [-4, 0], [0, 2], [0, -2]], TWO)
    assert found.scales.omega_spread == pytest.approx(0)


@pytest.mark.parametrize("mu", [[[3, 3], [-3, -2]], [[3, 3], [-2, -3]]])
def test_zero_sum_is_the_largest_over_responses(mu: list[list[float]]):
    found = two_responses([[0.13] * 6, [-0.13] * 6], mu)
    assert found.scales.zero_sum == pytest.approx(0.2)


def test_supports_hold_what_is_above_half_the_largest():
    found = opposite([0.15, 0.15, 0.12, 0.12, 0.03, -0.13], [3.0, 3.0])
    assert found.scales.supports == ((0, 1, 2, 3),) * 2
    assert found.scales.support_leak == pytest.approx(0.13 / 0.135)  # over the mean on the support
    assert found.scales.theta_spread == pytest.approx(0.15 / 0.12 - 1)


def test_no_step_is_the_best_for_all_where_responses_have_supports():
    assert np.isnan(classify(TABLE_2, TWO).scales.eta_optimal)


def test_task_leak_is_the_second_largest_of_many_responses():
    weights = diagonal_heads([0.13, -0.13], [[3.0, 1.0, 0.5], [-3.0, -1.0, -0.5]], d_x=5, d_y=3)
    found = read_heads(circuits(weights), torch.zeros(2, 2, 3).double())
    assert found.task_leak == pytest.approx([1 / 3, 1 / 3])


def test_nearly_equal_heads_take_the_step_of_their_sum():
    found = classify(diagonal_heads([0.13, 0.134, -0.13], [3.0, 0.4, -3.4], d_x=5))
    assert found.scales.eta[0] == pytest.approx(0.13 * 3 + 0.134 * 0.4 + 0.13 * 3.4)


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
def test_one_head_that_turns_its_input_is_kernel_regression():
    turned = rotation()
    turned = turned * torch.linalg.det(turned).sign()
    found = classify(with_blocks(0.5 * turned[None], [1.5]))
    assert (found.form.kind, found.pattern) == ("common", "kernel_regression")
    torch.testing.assert_close(found.form.matrix, turned)


@pytest.mark.slow
def test_heads_count_by_their_share_in_the_common_matrix():
    first = torch.diag(torch.tensor([2.0, 1.0, 1.0, 1.0, 0.5]).double())
    second = first + torch.diag(torch.tensor([0.0, 0.3, 0.0, -0.3, 0.2]).double())
    blocks = torch.stack([0.1 * first, -0.1 * first, 0.1 * second, -0.1 * second])
    found = classify(with_blocks(blocks, [4.0, -4.0, 0.2, -0.2]))
    assert found.form.kind == "common"
    expected = common_matrix(blocks, torch.from_numpy(found.share))
    torch.testing.assert_close(found.form.matrix, expected)


def test_a_matrix_is_common_only_if_it_explains_most_deviations_from_the_identity():
    found = classify(with_blocks(two_shapes(1.2), [4.0, -4.0]))
    assert 1 - found.form.isotropy**2 > 0.05
    assert 0.5 < found.form.shared < 0.85
    assert found.form.kind == "scalar"


@pytest.mark.slow
def test_shared_is_the_part_of_the_squared_sines_that_one_matrix_explains():
    blocks = two_shapes(0.5)
    found = classify(with_blocks(blocks, [4.0, -4.0]))
    common = Form("common", common_matrix(blocks, torch.from_numpy(found.share)))
    traces = blocks.diagonal(dim1=1, dim2=2).sum(1)
    cosines = traces / (5**0.5 * blocks.flatten(1).norm(dim=1))
    expected = 1 - (1 - common.alignment(blocks) ** 2).sum() / (1 - cosines**2).sum()
    assert found.form.shared == pytest.approx(float(expected))


@pytest.mark.slow
def test_circuits_are_read_with_their_law():
    weights = pair()
    sloped = classify_circuits(weights.QK, weights.OV, score="1+Cx", score_slope=0.5)
    assert sloped.scales.eta[0] == pytest.approx(0.5 * 2 * 0.13 * 3.4)
    to_self = classify_circuits(weights.QK, weights.OV, attend_to_self=True)
    expected = classify(replace(weights, attend_to_self=True))
    assert to_self.learner.rms == pytest.approx(expected.learner.rms)
    assert to_self.learner.rms != pytest.approx(classify(weights).learner.rms)


def test_prompts_are_those_of_the_seed_and_as_many_as_asked_for():
    weights = pair()
    before = classify(weights).learner.rms
    for prompts in ({"seed": 1}, {"n_prompts": 4096}):
        found = classify(weights, **prompts).learner.rms
        assert found != pytest.approx(before)
        by_circuits = classify_circuits(weights.QK, weights.OV, **prompts).learner.rms
        assert by_circuits == pytest.approx(found)


def test_thresholds_are_arguments():
    weights, limits = diagonal_heads([0.13, -0.2], [3.0, -3.0], d_x=5), Thresholds(omega_spread=0.6)
    assert classify(weights, thresholds=limits).pattern == "debiased_gd"
    found = classify_circuits(weights.QK, weights.OV, thresholds=limits)
    assert found.pattern == "debiased_gd"


def test_the_best_head_stands_for_its_model():
    found = classify(stack([pair(), random_head()]))
    assert found.p_values["qk_diagonal_best"] < 0.01
    assert found.p_values["ov_last_entry_best"] < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "law", [{"score": "1+tanh"}, {"attend_to_self": True}, {"score": "1+Cx", "score_slope": 5.0}]
)
def test_random_models_are_drawn_with_the_law_of_the_model(law: dict):
    found = classify(replace(random_head(3), **law))
    r2, p = found.substitution.r2, found.p_values["substitution_r2"]
    same = null_of(TaskConfig(), replace(ONE_HEAD, **law), form=found.form.kind)
    assert p == same.p_value("substitution_r2", r2)
    other = null_of(TaskConfig(), ONE_HEAD, form=found.form.kind)
    assert p != other.p_value("substitution_r2", r2)


@pytest.mark.parametrize("n_prompts", [1, 0])
def test_too_few_prompts_are_refused(n_prompts: int):
    with pytest.raises(ValueError, match=f"n_prompts must be >= 8, .*, got {n_prompts}"):
        classify(pair(), n_prompts=n_prompts)


@pytest.mark.parametrize("shape", [(6, 6), (1, 2, 6, 6)])
def test_circuits_with_other_than_three_axes_are_refused(shape: tuple[int, ...]):
    good = pair()
    message = r"must have three axes, head first, got shape \[" + ", ".join(map(str, shape))
    for found in (np.zeros(shape), torch.zeros(shape)):
        with pytest.raises(ValueError, match=f"QK {message}"):
            classify_circuits(found, good.OV)
        with pytest.raises(ValueError, match=f"OV {message}"):
            classify_circuits(good.QK, found)


def test_complex_circuits_are_refused():
    weights = pair()
    unchecked = inspect.unwrap(classify_circuits)  # the tests' own check of types comes first
    imaginary = weights.QK * 1j
    with pytest.raises(ValueError, match=r"QK must hold real numbers, got torch\.complex128"):
        unchecked(imaginary, weights.OV)
    with pytest.raises(ValueError, match="QK must hold real numbers, got complex128"):
        unchecked(imaginary.numpy(), weights.OV)


def test_reversed_views_are_read():
    weights = pair()
    found = classify_circuits(weights.QK.numpy()[::-1], weights.OV.numpy()[::-1])
    assert (found.pattern, found.labels) == ("debiased_gd", ("negative", "positive"))


def test_circuits_that_require_gradients_are_read():
    weights = pair()
    QK, OV = weights.QK.clone().requires_grad_(), weights.OV.clone().requires_grad_()
    assert classify_circuits(QK, OV).pattern == "debiased_gd"
    assert QK.grad is None
