"""The written-out gradient against automatic differentiation, and the law of the initial weights."""

from dataclasses import replace

import pytest
import torch

from mechinterp.config import SCORES, ExperimentConfig, ModelConfig, TaskConfig, override
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.heads import NAMES, AttentionWeights, stack
from mechinterp.training.one_layer.step import initial_weights, loss_and_gradients, membership
from tests.conftest import assert_close_to_rounding, predictions_of_each

HEADS = (1, 2, 3, 8)


def random_models(task: TaskConfig, score: str = "softmax") -> list[AttentionWeights]:
    """One model per entry of HEADS, in float64, large enough for its scores to matter."""
    models = []
    for seed, n_heads in enumerate(HEADS):
        model = ModelConfig(n_heads=n_heads, score=score, score_slope=0.7)
        weights = initial_weights(ExperimentConfig(task=task, model=model, seed=seed))
        models.append(scaled(weights.to(torch.float64), 1.5))
    return models


def scaled(weights: AttentionWeights, factor: float) -> AttentionWeights:
    return replace(weights, **{name: factor * getattr(weights, name) for name in NAMES})


def some_prompts(task: TaskConfig) -> Prompts:
    return sample_prompts(task, 32, generator=generator_for(0, "train", 0), dtype=torch.float64)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("d_y", [1, 2])
def test_gradients_equal_automatic_differentiation(score: str, d_y: int):
    task = TaskConfig(d_x=4, d_y=d_y, context_length=9)
    prompts, weights = some_prompts(task), stack(random_models(task, score))
    loss, gradients = loss_and_gradients(weights, prompts, membership(HEADS))

    leaves = {name: getattr(weights, name).clone().requires_grad_() for name in NAMES}
    predictions = predictions_of_each(replace(weights, **leaves), prompts, HEADS)
    expected_loss = (predictions - prompts.y_query[:, None]).square().mean((0, 2))
    expected = torch.autograd.grad(expected_loss.sum(), list(leaves.values()))

    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-12, atol=0)
    for name, gradient in zip(NAMES, expected, strict=True):
        assert gradient.abs().max() > 1e-3
        assert_close_to_rounding(getattr(gradients, name), gradient)


def test_membership_sums_the_heads_of_each_model():
    members = membership([1, 2, 1])
    assert members.owner.tolist() == [0, 1, 1, 2]
    assert members.slots.tolist() == [[0, 4], [1, 2], [3, 4]]
    outputs = torch.tensor([1.0, 10.0, 100.0, 1000.0])[None, :, None]
    assert members.sum(outputs).flatten().tolist() == [1, 110, 1000]


def test_a_model_that_diverged_leaves_the_others_of_its_pack_alone():
    task = TaskConfig(context_length=9)
    prompts, models = some_prompts(task), random_models(task)
    sane_loss, sane = loss_and_gradients(stack(models), prompts, membership(HEADS))
    lost = replace(models[1], W_Q=torch.full_like(models[1].W_Q, torch.nan))
    loss, gradients = loss_and_gradients(
        stack([models[0], lost, *models[2:]]), prompts, membership(HEADS)
    )
    others = [index for index in range(len(HEADS)) if index != 1]
    assert torch.isnan(loss[1])
    assert torch.equal(loss[others], sane_loss[others])
    first, last = HEADS[0], HEADS[0] + HEADS[1]
    for name in NAMES:
        for heads in (slice(0, first), slice(last, None)):
            assert torch.equal(getattr(gradients, name)[heads], getattr(sane, name)[heads])


@pytest.mark.slow
def test_initial_weights_are_uniform_within_one_over_root_fan_in():
    config = ExperimentConfig(
        task=TaskConfig(d_x=3, d_y=2), model=ModelConfig(n_heads=4, d_head=7), seed=0
    )
    draws = [initial_weights(replace(config, seed=seed)) for seed in range(300)]
    for name, fan_in in {"W_Q": 5, "W_K": 5, "W_V": 5, "W_O": 28}.items():
        values = torch.stack([getattr(draw, name) for draw in draws]).double()
        bound = fan_in**-0.5
        assert 0.999 * bound < values.abs().max() <= bound
        # Each entry on its own, then all of them: mean 0 and variance bound^2 / 3.
        assert (values.mean(0).abs() < 4.5 * values.std(0) / len(draws) ** 0.5).all()
        squares = values.square()
        error = 4 * squares.std() / squares.numel() ** 0.5
        assert abs(squares.mean() - bound**2 / 3) < error


def test_initial_weights_of_the_four_matrices_are_independent():
    weights = initial_weights(ExperimentConfig(model=ModelConfig(n_heads=8)))
    matrices = torch.stack([weights.W_Q, weights.W_K, weights.W_V]).flatten(1)
    correlation = torch.corrcoef(matrices) - torch.eye(3)
    assert correlation.abs().max() < 4 / matrices.shape[1] ** 0.5


def test_initial_weights_depend_on_the_seed_and_the_shapes_only():
    config = ExperimentConfig(seed=3)
    others = ["train.data_seed=9", "train.steps=5", "train.learning_rate=1", "task.noise_var=2"]
    expected, same = initial_weights(config), initial_weights(override(config, *others))
    other_seed = initial_weights(replace(config, seed=4))
    for name in NAMES:
        assert torch.equal(getattr(same, name), getattr(expected, name))
        assert not torch.equal(getattr(other_seed, name), getattr(expected, name))


def test_initial_weights_carry_scale_and_score():
    config = ExperimentConfig(model=ModelConfig(d_head=4, score="1+Cx", score_slope=0.8))
    weights = initial_weights(config)
    assert (weights.scale, weights.score, weights.score_slope) == (0.5, "1+Cx", 0.8)
