"""The step of one layer, written out and compiled, against automatic differentiation in float64; the initial weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numba import njit, types

from mechinterp.config import SCORES, ExperimentConfig, ModelConfig, TaskConfig, override
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.models.heads import head_outputs, stack
from mechinterp.models.weights import Weights
from mechinterp.training.batches import LANES, WHOLE
from mechinterp.training.lanes import aligned, exponential, fill, load_lanes, store_lanes
from mechinterp.training.one_layer.kernel import (
    eight_products_with,
    product_with,
    set_weighted_sums,
    weighted_sum,
)
from mechinterp.training.one_layer.step import (
    by_tensors,
    initial_weights,
    loss_and_gradients,
    membership,
)
from tests.conftest import assert_close_to_rounding, by_head

HEADS = (1, 2, 3, 8)


def some_models(
    task: TaskConfig, *, score: str = "softmax", factor: float = 1.5, d_head: int | None = None
) -> list[Weights]:
    models = []
    for seed, n_heads in enumerate(HEADS):
        model = ModelConfig(n_heads=n_heads, score=score, score_slope=0.3, d_head=d_head)
        weights = initial_weights(ExperimentConfig(task=task, model=model, seed=seed))
        models.append(weights.with_tensors({n: factor * t for n, t in weights.tensors.items()}))
    return models


def some_prompts(task: TaskConfig, n_prompts: int = 2 * LANES + 13) -> Prompts:
    return draw_prompts(task, n_prompts, generator=generator_for(0, "train", 0))


def assert_close(actual: Weights, expected: Weights, tolerance: float):
    """Equal for every head, relative to the norm of its matrix."""
    for name, each in by_head(expected).items():
        wanted = each.double()
        error = (by_head(actual)[name].double() - wanted).flatten(1).norm(dim=1)
        assert (error <= tolerance * wanted.flatten(1).norm(dim=1)).all(), name


def in_float64(weights: Weights, prompts: Prompts) -> tuple[torch.Tensor, Weights]:
    """The loss and gradients by tensor operations."""
    double = torch.float64
    return by_tensors(weights.to(double), prompts.to(double), membership(HEADS))


def assert_equals_float64(weights: Weights, prompts: Prompts) -> Weights:
    """That the kernel's loss and gradients are those of the tensor operations in float64."""
    loss, gradients = loss_and_gradients(weights, prompts, membership(HEADS))
    expected_loss, expected = in_float64(weights, prompts)
    assert loss.dtype == gradients.W_Q.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-5, atol=0)
    assert_close(gradients, expected, 1e-5)
    return gradients


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("d_y", [1, 2])
def test_gradients_equal_automatic_differentiation(score: str, d_y: int):
    task = TaskConfig(d_x=4, d_y=d_y, context_length=9)
    prompts = some_prompts(task).to(torch.float64)
    weights = stack(some_models(task, score=score)).to(torch.float64)
    loss, gradients = loss_and_gradients(weights, prompts, membership(HEADS))

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.tensors.items()}
    outputs = head_outputs(weights.with_tensors(leaves), prompts).split(list(HEADS), dim=1)
    predictions = torch.stack([each.sum(1) for each in outputs], dim=1)
    expected_loss = (predictions - prompts.y_query[:, None]).square().mean((0, 2))
    expected = torch.autograd.grad(expected_loss.sum(), list(leaves.values()))

    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    for name, gradient in zip(leaves, expected, strict=True):
        assert gradient.abs().max() > 1e-3
        assert_close_to_rounding(gradients.tensors[name], gradient)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("d_y", [1, 2])
def test_kernel_equals_the_tensor_operations(score: str, d_y: int):
    task = TaskConfig(d_x=4, d_y=d_y, context_length=9)
    weights = stack(some_models(task, score=score, d_head=5))
    gradients = assert_equals_float64(weights, some_prompts(task))
    for name in NAMES:
        assert getattr(gradients, name).abs().max() > 1e-3
    # The query's y slot is 0.
    assert not gradients.W_Q[0, :, task.d_x :].any()
    assert not gradients.W_O[..., : task.d_x].any()


@pytest.mark.parametrize("n_prompts", [1, LANES - 1, LANES, LANES + 1, WHOLE + 1, 3 * WHOLE])
def test_batches_need_not_fill_their_blocks(n_prompts: int):
    task = TaskConfig(d_x=3, context_length=5)
    assert_equals_float64(stack(some_models(task)), some_prompts(task, n_prompts))


@pytest.mark.parametrize("score", ["softmax", "1+tanh"])
def test_large_scores_do_not_overflow(score: str):
    task = TaskConfig(context_length=20)
    weights, prompts = stack(some_models(task, score=score, factor=1.0)), some_prompts(task)
    large = weights.with_tensors({"attn.W_Q": 500 * weights.W_Q, "attn.W_K": 10 * weights.W_K})
    context, query = prompts.context_tokens, prompts.x_query
    scores = torch.einsum("bi,him,blm->bhl", query, large.QK[:, : task.d_x], context)
    assert scores.abs().max() > 1000
    loss, gradients = loss_and_gradients(large, prompts, membership(HEADS))
    expected_loss, expected = in_float64(large, prompts)
    # Rounding moves a score of thousands by 1e-4, and many a pattern is 0 or 1 and has no slope left.
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-4, atol=0)
    for name in NAMES:
        wanted = getattr(expected, name)
        assert (getattr(gradients, name) - wanted).norm() < 1e-3 * wanted.norm()


@njit(types.void(types.float32[::1], types.float32[::1]))
def exponentials(numbers, out):
    for index in range(numbers.size // LANES):
        store_lanes(out, index, exponential(load_lanes(numbers, index)))


def exp(numbers: np.ndarray) -> np.ndarray:
    out = np.empty_like(numbers)
    exponentials(numbers, out)
    return out


def test_exponential_is_accurate_over_its_range():
    numbers = np.linspace(-87, 88, 2**16 * LANES, dtype=np.float32)
    exact = np.exp(numbers.astype(float))
    assert np.abs(exp(numbers) / exact - 1).max() < 2e-7


def test_exponential_ends_at_its_bounds_and_hands_on_nan():
    special = np.resize(np.float32([0, -87, -1e4, -np.inf, 88, 1e4, np.inf, np.nan]), LANES)
    values = exp(special)[:8]
    assert values[0] == 1
    assert 0 < values[1] == values[2] == values[3] < 1.7e-38
    assert np.isfinite(values[4])
    assert values[4] == values[5] == values[6]
    assert np.isnan(values[7])


@njit
def sums_one_by_one(values, context, sums):
    d_model = sums.size // LANES
    for m in range(d_model):
        store_lanes(sums, m, weighted_sum(values, context, d_model, m))


@pytest.mark.parametrize("d_model", [2, 3, 4, 6, 8, 13])
def test_sums_side_by_side_have_the_bits_of_sums_one_by_one(d_model: int):
    random = np.random.default_rng(d_model)
    weights, tokens = random.normal(size=(11, 1, LANES)), random.normal(size=(11, d_model, LANES))
    values, context = (each.astype(np.float32).ravel() for each in (weights, tokens))
    sums, expected = np.empty((2, d_model * LANES), np.float32)
    set_weighted_sums(values, context, sums)
    sums_one_by_one(values, context, expected)
    np.testing.assert_array_equal(sums, expected)
    exact, size = (weights * tokens).sum(0), np.abs(weights * tokens).sum(0)
    rounding = 12 * np.finfo(np.float32).eps * size  # 11 products and sums, and rounded inputs
    assert (np.abs(sums.reshape(d_model, LANES) - exact) < rounding).all()


@njit
def products_one_by_one(factors, context, products):
    for pair in range(products.size // LANES):
        store_lanes(products, pair, product_with(factors, context, pair, fill(0.5)))


@njit
def eight_products(factors, context, products):
    for k, product in enumerate(eight_products_with(factors, context, 1, fill(0.5))):
        store_lanes(products, k, product)


@pytest.mark.parametrize("d_model", [2, 5, 6])
def test_eight_products_have_the_bits_of_products_one_by_one(d_model: int):
    random = np.random.default_rng(d_model)
    factors, tokens = (
        random.normal(size=(1, d_model, LANES)),
        random.normal(size=(9, d_model, LANES)),
    )
    flat = [each.astype(np.float32).ravel() for each in (factors, tokens)]
    eight, one_by_one = np.empty(8 * LANES, np.float32), np.empty(9 * LANES, np.float32)
    eight_products(*flat, eight)
    products_one_by_one(*flat, one_by_one)
    np.testing.assert_array_equal(eight, one_by_one[LANES:])
    exact, size = 0.5 + (factors * tokens).sum(1), 0.5 + np.abs(factors * tokens).sum(1)
    rounding = (d_model + 2) * np.finfo(np.float32).eps * size
    assert (np.abs(one_by_one.reshape(9, LANES) - exact) < rounding).all()


def lane_by_lane(numbers: np.ndarray) -> np.float32:
    """Sum of WHOLE numbers, halves added to halves."""
    while len(numbers) > 1:
        low, high = np.split(numbers, 2)
        numbers = low + high
    return numbers[0]


def test_the_order_of_sums_over_prompts_is_that_of_whole_blocks():
    """A model without heads that write predicts 0, so that its loss is a sum of squares, known to the last bit."""
    task = TaskConfig(d_x=3, context_length=5)
    (weights, *_), prompts = some_models(task), some_prompts(task, 100 * WHOLE)
    # Squares of twelve bits are exact, so that only the order of the sums is left.
    prompts = replace(prompts, y_query=(prompts.y_query.clamp(-3, 3) * 2**10).round() / 2**10)
    silent = weights.without([(0, head) for head in range(weights.n_heads)])
    loss, _ = loss_and_gradients(silent, prompts, membership([weights.n_heads]))
    sums = np.zeros(WHOLE, np.float32)
    for rows in prompts.y_query[:, 0].numpy().reshape(-1, WHOLE):
        sums += rows**2
    assert loss.item() == lane_by_lane(sums) * (np.float32(1) / np.float32(len(prompts)))


@njit
def first_addresses(n):
    return [aligned(size * LANES).ctypes.data for size in range(n)]


def test_arrays_of_the_kernel_begin_with_a_cache_line():
    assert not any(address % 64 for address in first_addresses(20))


@pytest.mark.parametrize("score", ["softmax", "1+tanh", "linear/L"])
def test_a_model_has_the_same_bits_in_a_pack_as_alone(score: str):
    task = TaskConfig(context_length=9)
    prompts, models = some_prompts(task), some_models(task, score=score)
    loss, gradients = loss_and_gradients(stack(models), prompts, membership(HEADS))
    parts = [gradients[end - n : end] for n, end in zip(HEADS, np.cumsum(HEADS), strict=True)]
    for index, (model, part) in enumerate(zip(models, parts, strict=True)):
        alone_loss, alone = loss_and_gradients(model, prompts, membership([model.n_heads]))
        assert torch.equal(loss[index], alone_loss[0])
        for name in NAMES:
            assert torch.equal(getattr(part, name), getattr(alone, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "written out"])
@pytest.mark.parametrize("score", SCORES)
def test_nan_stays_in_its_model(score: str, dtype: torch.dtype):
    task = TaskConfig(context_length=9)
    prompts, models = some_prompts(task).to(dtype), some_models(task, score=score)
    sane_loss, sane = loss_and_gradients(stack(models).to(dtype), prompts, membership(HEADS))
    models[1] = models[1].with_tensors({"attn.W_Q": torch.full_like(models[1].W_Q, torch.nan)})
    loss, gradients = loss_and_gradients(stack(models).to(dtype), prompts, membership(HEADS))
    assert torch.isnan(loss).tolist() == [False, True, False, False]
    assert torch.equal(loss[[0, 2, 3]], sane_loss[[0, 2, 3]])
    for name, part in by_head(gradients).items():
        sane_part = by_head(sane)[name]
        assert torch.equal(part[:1], sane_part[:1])
        assert torch.equal(part[3:], sane_part[3:])
        rows = slice(task.d_x) if name == "W_Q" else slice(None)
        assert torch.isnan(part[1:3, rows]).all()


@pytest.mark.slow
def test_initial_weights_are_uniform_within_one_over_root_fan_in():
    config = ExperimentConfig(TaskConfig(d_x=3, d_y=2), ModelConfig(n_heads=4, d_head=7))
    draws = [initial_weights(replace(config, seed=seed)) for seed in range(300)]
    for name, fan_in in {"W_Q": 5, "W_K": 5, "W_V": 5, "W_O": 28}.items():
        values = torch.stack([by_head(draw)[name] for draw in draws]).double()
        bound = fan_in**-0.5
        assert 0.999 * bound < values.abs().max() <= bound
        # Each entry on its own, then all of them: mean 0 and variance bound^2 / 3.
        assert (values.mean(0).abs() < 4.5 * values.std(0) / len(draws) ** 0.5).all()
        squares = values.square()
        error = 4 * squares.std() / squares.numel() ** 0.5
        assert abs(squares.mean() - bound**2 / 3) < error


def test_initial_weights_depend_on_the_seed_and_the_shapes_only():
    config = ExperimentConfig(seed=3)
    others = ["train.data_seed=9", "train.steps=5", "train.learning_rate=1", "task.noise_var=2"]
    expected, same = initial_weights(config), initial_weights(override(config, *others))
    other_seed = initial_weights(replace(config, seed=4))
    for name in NAMES:
        assert torch.equal(getattr(same, name), getattr(expected, name))
        assert not torch.equal(getattr(other_seed, name), getattr(expected, name))
