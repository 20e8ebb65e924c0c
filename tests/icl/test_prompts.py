"""Prompts: the law they are drawn from, and that a batch is a function of (seed, stream, step)."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.config.vectors import STREAMS
from mechinterp.icl.prompts import (
    Prompts,
    covariance_matrix,
    draw_prompts,
    generator_for,
    prompt_chunks,
)
from tests.conftest import refused

KMS = CovarianceConfig(kind="kms", rho=0.5)
EIGENVALUES = CovarianceConfig(kind="eigenvalues", eigenvalues=(0.5, 1.0, 4.0))


def draw(task: TaskConfig, n_prompts: int = 4000, **options: object) -> Prompts:
    generator = generator_for(0, "eval", 0)
    return draw_prompts(task, n_prompts, generator=generator, dtype=torch.float64, **options)


def assert_mean(samples: Tensor, expected: Tensor | float):
    """The mean over independent samples is what it should be, within four standard errors."""
    error = samples.std(0) / samples.shape[0] ** 0.5
    assert error.max() > 0
    assert ((samples.mean(0) - expected).abs() < 4 * error).all()


def assert_equal(left: Prompts, right: Prompts):
    for field in fields(Prompts):
        both = [getattr(each, field.name) for each in (left, right)]
        assert both == [None, None] or torch.equal(*both), field.name


def test_a_batch_is_a_function_of_seed_stream_and_step():
    def batch(seed: int, stream: str, step: int) -> Prompts:
        return draw_prompts(TaskConfig(), 8, generator=generator_for(seed, stream, step))

    assert_equal(batch(1, "train", 5), batch(1, "train", 5))
    # A seed and a step that are swapped, or stand in each other's place, make another batch as well.
    keys = [(s, stream, t) for s in (0, 1, 5) for stream in STREAMS for t in (0, 1, 5)]
    first_numbers = {batch(*key).x[0, 0, 0].item() for key in keys}
    assert len(first_numbers) == len(keys)
    first, second = batch(0, "train", 0), batch(0, "train", 1)
    for name, values in vars(first).items():
        assert values is None or not torch.isin(values, getattr(second, name)).any()


@pytest.mark.parametrize(
    ("covariance", "expected"),
    [
        (CovarianceConfig(), np.eye(3)),
        (KMS, np.array([[1, 0.5, 0.25], [0.5, 1, 0.5], [0.25, 0.5, 1]])),
        (EIGENVALUES, np.diag([0.5, 1.0, 4.0])),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_covariates_have_mean_zero_and_the_covariance(
    covariance: CovarianceConfig, expected: np.ndarray
):
    np.testing.assert_allclose(covariance_matrix(covariance, 3), expected)
    prompts = draw(TaskConfig(d_x=3, context_length=6, covariance=covariance))
    for x in (prompts.x.flatten(0, 1), prompts.x_query):
        assert_mean(x, 0.0)
        assert_mean(x[:, :, None] * x[:, None, :], torch.from_numpy(expected))
        # Normal, not merely of that variance: the fourth moment is three variances squared.
        assert_mean(x**4, torch.from_numpy(3 * np.diag(expected) ** 2))


def test_covariates_of_a_prompt_are_independent():
    x = draw(TaskConfig(d_x=2, context_length=2)).tokens[:, :, :2]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert_mean(x[:, left, :, None] * x[:, right, None, :], 0.0)


@pytest.mark.parametrize(("beta_var", "expected"), [(None, 0.25), (3.0, 3.0)])
def test_task_vectors_have_mean_zero_and_their_variance(beta_var: float | None, expected: float):
    beta = draw(TaskConfig(d_x=4, d_y=2, context_length=1, beta_var=beta_var)).beta
    assert_mean(beta, 0.0)
    flat = beta.flatten(1)
    assert_mean(flat[:, :, None] * flat[:, None, :], expected * torch.eye(8, dtype=torch.float64))


def test_noise_has_its_variance_and_is_independent_of_everything():
    prompts = draw(TaskConfig(d_x=2, d_y=2, context_length=3, noise_var=0.4))
    context_noise = prompts.y - prompts.x @ prompts.beta
    query_noise = prompts.y_query - prompts.y_query_clean
    noise = torch.cat([context_noise, query_noise[:, None]], dim=1).flatten(1)
    assert_mean(noise, 0.0)
    expected = 0.4 * torch.eye(8, dtype=torch.float64)
    assert_mean(noise[:, :, None] * noise[:, None, :], expected)
    others = torch.cat([prompts.x.flatten(1), prompts.x_query, prompts.beta.flatten(1)], dim=1)
    assert_mean(noise[:, :, None] * others[:, None, :], 0.0)


def test_query_noise_can_be_left_out():
    noisy, clean = draw(TaskConfig(), 20), draw(TaskConfig(query_noise=False), 20)
    assert torch.equal(clean.y_query, clean.y_query_clean)
    # Everything else stays as it was.
    assert torch.equal(clean.y, noisy.y)
    assert torch.equal(clean.y_query_clean, noisy.y_query_clean)
    assert (noisy.y_query - noisy.y_query_clean).abs().min() > 0


def test_tokens_are_pairs_and_a_query_without_response():
    prompts = draw(TaskConfig(d_x=3, d_y=2, context_length=4), 7)
    assert prompts.tokens.shape == (7, 5, 5)
    assert torch.equal(prompts.tokens[:, :4], prompts.context_tokens)
    assert torch.equal(prompts.tokens[:, :4, :3], prompts.x)
    assert torch.equal(prompts.tokens[:, :4, 3:], prompts.y)
    assert torch.equal(prompts.tokens[:, 4, :3], prompts.x_query)
    assert prompts.tokens[:, 4, 3:].abs().max() == 0


def test_a_long_evaluation_begins_with_the_chunks_of_a_short_one():
    task = TaskConfig(context_length=3)
    short = list(prompt_chunks(task, 12, seed=4, size=6))
    long = list(prompt_chunks(task, 20, seed=4, size=6, context_length=3))
    assert [len(chunk) for chunk in long] == [6, 6, 6, 2]
    for left, right in zip(short, long[:2], strict=True):
        assert_equal(left, right)
    assert_equal(long[1], draw_prompts(task, 6, generator=generator_for(4, "eval", 1)))
    assert not torch.isin(long[0].x, long[1].x).any()
    other_length = next(prompt_chunks(task, 6, seed=4, size=6, context_length=9))
    assert other_length.x.shape == (6, 9, 5)


def test_responses_depend_on_their_supports_alone(generator: torch.Generator):
    task = TaskConfig(d_x=3, d_y=2, supports=((0, 1), (2,)), noise_var=0.0, beta_var=2.0)
    prompts = draw_prompts(task, 2000, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert (prompts.beta[:, mask == 0] == 0).all()
    assert prompts.beta[:, mask == 1].var(0) == pytest.approx([2.0] * 3, rel=0.1)
    torch.testing.assert_close(prompts.y, prompts.x @ prompts.beta)
    assert task.signal_var == 3  # 4 for one response and 2 for the other
    # The numbers drawn are those of the task without supports.
    whole = draw_prompts(replace(task, supports=None), 8, generator=generator_for(0, "eval", 0))
    part = draw_prompts(task, 8, generator=generator_for(0, "eval", 0))
    assert torch.equal(part.x, whole.x)
    assert torch.equal(part.beta, whole.beta * mask)


def test_responses_can_share_one_task_vector():
    supports = ((0, 1), (1, 2))
    task = TaskConfig(d_x=3, d_y=2, supports=supports, shared_beta=True, noise_var=0.0)
    prompts = draw_prompts(task, 2000, generator=generator_for(0, "eval", 0), dtype=torch.float64)
    assert torch.equal(prompts.beta[:, 1, 0], prompts.beta[:, 1, 1])
    assert (prompts.beta[:, [2, 0], [0, 1]] == 0).all()
    assert prompts.beta[:, [0, 1, 2], [0, 1, 1]].var(0) == pytest.approx([1 / 3] * 3, rel=0.1)
    torch.testing.assert_close(prompts.y, prompts.x @ prompts.beta)
    # One response is the same task either way, number for number.
    alone, again = (
        draw_prompts(TaskConfig(shared_beta=shared), 4, generator=generator_for(0, "eval", 0)).beta
        for shared in (False, True)
    )
    assert torch.equal(alone, again)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: draw_prompts(TaskConfig(), 8, seed=-1), ("seed", ">= 0", -1)),
        (lambda: generator_for(0, "test", 0), ("stream", "init, train, eval, pool", "'test'")),
        (lambda: draw(TaskConfig(), 0), ("n_prompts", ">= 1", 0)),
        (lambda: draw(TaskConfig(), 5, context_length=0), ("context_length", ">= 1", 0)),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, words: tuple):
    with refused(*words):
        call()
