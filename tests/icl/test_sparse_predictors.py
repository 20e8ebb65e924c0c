"""Learners of sparse regression: identities between them, and the laws of the prompts they meet."""

from dataclasses import replace

import pytest
import torch

from analyses.lib.theory.learners import lasso
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import (
    descend,
    gradient_descent,
    preprocess_then_optimise,
)
from tests.conftest import refused

TASK = TaskConfig(d_x=6, d_y=2, context_length=20, sparsity=2, nonzeros="signs", noise_var=0.2)


@pytest.fixture
def sparse() -> Prompts:
    return sample_prompts(TASK, 32, generator=generator_for(4, "eval", 0), dtype=torch.float64)


def test_supports_are_random_and_of_one_size():
    task = replace(TASK, d_y=1)
    beta = sample_prompts(task, 6000, generator=generator_for(0, "eval", 0)).beta[..., 0]
    live = beta != 0
    assert (live.sum(1) == 2).all()
    share = live.double().mean(0)
    assert ((share - 1 / 3).abs() < 4 * (2 / 9 / 6000) ** 0.5).all()
    assert beta.abs().unique().tolist() == pytest.approx([0, 2**-0.5])
    assert abs((beta[live] > 0).double().mean() - 0.5) < 4 * 0.5 / 12_000**0.5


@pytest.mark.parametrize("nonzeros", ["signs", "gaussian"])
def test_signal_variance_is_that_of_the_prompts(nonzeros: str):
    covariance = CovarianceConfig(kind="eigenvalues", eigenvalues=(3.0, 1.0, 1.0, 0.5))
    task = TaskConfig(d_x=4, sparsity=2, nonzeros=nonzeros, covariance=covariance)
    prompts = sample_prompts(task, 40_000, generator=generator_for(0, "eval", 0))
    squares = prompts.y_query_clean.square()
    sem = squares.std().item() / 200
    assert abs(squares.mean().item() - task.signal_var) < 4 * sem


def test_descent_step_by_step_as_it_is_written(sparse: Prompts):
    features, query = sparse.x[:, :, :, None].expand(-1, -1, -1, 2) * 0.5, sparse.x_query * 0.5
    found = descend(features, sparse.y, query[..., None].expand(-1, -1, 2), steps=4, eta=0.9)
    for prompt in range(4):
        for response in range(2):
            X, y = features[prompt, :, :, response], sparse.y[prompt, :, response]
            u = torch.zeros(6, dtype=torch.float64)
            for step in range(5):
                assert found[step, prompt, response].item() == pytest.approx(
                    (u @ query[prompt]).item(), abs=1e-12
                )
                u = u + 0.9 * X.T @ (y - X @ u) / len(y)


def test_own_step_sizes_are_the_inverse_of_the_largest_curvature(sparse: Prompts):
    own = gradient_descent(sparse, steps=5)
    for prompt in range(3):
        x = sparse.x[prompt]
        eta = 1 / torch.linalg.eigvalsh(x.T @ x / 20)[-1].item()
        alone = gradient_descent(sparse[prompt : prompt + 1], steps=5, eta=eta)
        torch.testing.assert_close(own[:, prompt], alone[:, 0], rtol=1e-10, atol=1e-12)


def test_preprocessing_reweights_by_the_correlations(sparse: Prompts):
    for response in range(2):
        r = (sparse.x * sparse.y[..., response, None]).mean(1)
        reweighted = replace(
            sparse, x=sparse.x * r[:, None], x_query=sparse.x_query * r, y=sparse.y
        )
        for eta in (None, 2.5):
            expected = gradient_descent(reweighted, steps=6, eta=eta)[..., response]
            found = preprocess_then_optimise(sparse, steps=6, eta=eta)[..., response]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_lasso_meets_the_conditions_of_its_minimum(sparse: Prompts):
    alpha = 0.05
    # Queries at the unit vectors read out the solution.
    for prompt in range(3):
        one = sparse[prompt : prompt + 1]
        copies = Prompts(
            **{name: value.repeat_interleave(6, 0) for name, value in vars(one).items()}
        )
        repeated = replace(copies, x_query=torch.eye(6, dtype=torch.float64))
        u = lasso(repeated, alpha=alpha)
        gradient = one.x[0].T @ (one.y[0] - one.x[0] @ u) / 20
        assert (gradient.abs() <= alpha + 1e-4).all()
        live = u != 0
        assert live.any()
        torch.testing.assert_close(gradient[live], alpha * u[live].sign(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda prompts: gradient_descent(prompts, steps=-1), ("steps", ">= 0", -1)),
        (lambda prompts: preprocess_then_optimise(prompts, steps=1, eta=0.0), ("eta", "> 0", 0.0)),
        (lambda prompts: lasso(prompts, alpha=-1.0), ("alpha", "> 0", -1.0)),
    ],
)
def test_settings_out_of_range_are_refused(call, words: tuple):
    with refused(*words):
        call(sample_prompts(TASK, 2))
