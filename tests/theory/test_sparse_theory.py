"""Reference risks of sparse regression: drawn, or in limits in which they are known otherwise."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.lib.theory.sparse import (
    best_ridge_risk,
    correlation_moments,
    minimum_norm_risk,
    ols_risk,
    oracle_risk,
)
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.icl.sparse_predictors import excess_risk, ols
from tests.conftest import refused


def prompts_of(n: int, **fields: object):
    task = TaskConfig(nonzeros="signs", **fields)
    return draw_prompts(task, n, seed=1, dtype=torch.float64)


def assert_meets(risks: torch.Tensor, expected: float):
    """Within 4 standard errors."""
    mean, sem = mean_and_sem(risks.numpy())
    assert sem < 0.05 * expected
    assert abs(mean - expected) < 4 * sem


def oracle_ols(prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Least squares on the true support, the nonzero entries of each task vector."""
    outputs = []
    for response in range(prompts.y.shape[2]):
        live = prompts.task_vectors("oracle_ols")[:, :, response] != 0
        masked = replace(prompts, x=prompts.x * live[:, None], x_query=prompts.x_query * live)
        # Zero columns get zero weights: the least squares solution of minimal norm.
        outputs.append(ols(masked)[:, response, None])
    return torch.cat(outputs, dim=1)


@pytest.mark.slow
@pytest.mark.parametrize(("d_x", "length"), [(4, 20), (16, 40)])
def test_least_squares(d_x: int, length: int):
    prompts = prompts_of(4000, d_x=d_x, context_length=length, sparsity=2, noise_var=0.4)
    expected = ols_risk(d_x=d_x, context_length=length, noise_var=0.4)
    assert_meets(excess_risk(ols(prompts), prompts), expected)
    told = oracle_risk(sparsity=2, context_length=length, noise_var=0.4)
    assert_meets(excess_risk(oracle_ols(prompts), prompts), told)


def test_least_squares_of_minimal_norm():
    prompts = prompts_of(4000, d_x=24, context_length=10, sparsity=3, noise_var=0.4)
    expected = minimum_norm_risk(d_x=24, context_length=10, noise_var=0.4, signal_var=1.0)
    assert_meets(excess_risk(ols(prompts), prompts), expected)


def test_best_ridge():
    fields = {"d_x": 64, "context_length": 128, "noise_var": 0.25}
    prompts = prompts_of(400, sparsity=4, **fields)
    expected = best_ridge_risk(signal_var=1.0, **fields)
    risks = [
        excess_risk(ridge(prompts, penalty=64 * 0.25 * factor), prompts).mean().item()
        for factor in (0.5, 1.0, 2.0)
    ]
    # The formula is a limit; at d = 64 it is off by less than 5%.
    assert risks[1] == pytest.approx(expected, rel=0.05)
    assert risks[1] == min(risks)


def test_best_ridge_in_limits():
    long = {"d_x": 8, "context_length": 100_000, "noise_var": 0.3}
    assert best_ridge_risk(signal_var=1.0, **long) == pytest.approx(ols_risk(**long), rel=1e-3)
    noisy = best_ridge_risk(d_x=8, context_length=16, noise_var=1e6, signal_var=1.0)
    assert noisy == pytest.approx(1.0, rel=1e-4)  # nothing can be learned: predict 0


def test_moments_of_the_correlations():
    eigenvalues = (2.0, 1.0, 0.5)
    covariance = CovarianceConfig(kind="eigenvalues", eigenvalues=eigenvalues)
    beta = np.array([0.7, -1.1, 0.0])
    task = TaskConfig(d_x=3, context_length=6, noise_var=0.4, covariance=covariance)
    prompts = draw_prompts(task, 40_000, seed=2, dtype=torch.float64)
    noise = prompts.y - prompts.x @ prompts.beta
    y = prompts.x @ torch.from_numpy(beta)[:, None] + noise
    r = (prompts.x * y).mean(1).numpy()
    law = {"context_length": 6, "noise_var": 0.4}
    mean, variance = correlation_moments(beta, np.array(eigenvalues), **law)
    squares = (r - mean) ** 2
    assert (np.abs(r.mean(0) - mean) < 4 * r.std(0) / 200).all()
    assert (np.abs(squares.mean(0) - variance) < 4 * squares.std(0) / 200).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ols_risk(d_x=4, context_length=5, noise_var=1.0), ("d_x + 1 = 5", 5)),
        (
            lambda: minimum_norm_risk(d_x=4, context_length=3, noise_var=1.0, signal_var=1.0),
            ("d_x - 1 = 3", 3),
        ),
        (
            lambda: best_ridge_risk(d_x=4, context_length=3, noise_var=0.0, signal_var=1.0),
            ("noise_var", "> 0", 0),
        ),
    ],
)
def test_outside_of_a_formula(call, words: tuple):
    with refused(*words):
        call()
