"""Pools of tasks: the law they are drawn by, and the posterior mean under one."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl import predictors
from mechinterp.icl.predictors import dmmse, log_posterior, ridge
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for, prompt_chunks
from tests.conftest import refused

KMS = CovarianceConfig(kind="kms", rho=0.5)
TASKS = {
    "plain": TaskConfig(d_x=3, context_length=5, n_tasks=7),
    "sparse": TaskConfig(d_x=6, context_length=5, n_tasks=7, sparsity=2, nonzeros="signs"),
    "two responses": TaskConfig(d_x=3, d_y=2, context_length=5, n_tasks=7, beta_var=1.0),
    "supports": TaskConfig(d_x=3, d_y=2, context_length=5, n_tasks=7, supports=((0,), (1, 2))),
    "shared": TaskConfig(d_x=3, d_y=2, context_length=5, n_tasks=7, shared_beta=True),
    "correlated": TaskConfig(d_x=3, context_length=5, n_tasks=7, covariance=KMS),
}


def brute_force(prompts: Prompts, pool: np.ndarray, noise_var: float) -> np.ndarray:
    """The posterior mean by Bayes' rule, one prompt and task at a time, with the likelihood of every pair."""
    found = []
    for row in range(len(prompts)):
        x, y, query = (t[row].numpy() for t in (prompts.x, prompts.y, prompts.x_query))
        logs = []
        for beta in pool:
            log = Fraction(0)
            for pair_x, pair_y in zip(x, y, strict=True):
                for response in range(len(pair_y)):
                    residual = pair_y[response] - sum(pair_x * beta[:, response])
                    log -= Fraction(float(residual)) ** 2 / (2 * Fraction(noise_var))
            logs.append(log)
        weights = np.array([np.exp(float(log - max(logs))) for log in logs])
        mean = sum(w * beta for w, beta in zip(weights / weights.sum(), pool, strict=True))
        found.append(query @ mean)
    return np.array(found)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("noise_var", [2.0, 0.1, 1e-6])
def test_dmmse_is_brute_force_bayes(name: str, noise_var: float):
    task = replace(TASKS[name], noise_var=noise_var)
    pool = task.pool()
    for new_tasks in (False, True):
        prompts = draw_prompts(task, 6, new_tasks=new_tasks, dtype=torch.float64)
        found = dmmse(prompts, pool=pool, noise_var=noise_var)
        expected = brute_force(prompts, pool.numpy(), noise_var)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-10)


def test_one_task_is_known_without_any_pair():
    task = replace(TASKS["correlated"], n_tasks=1)
    prompts = draw_prompts(task, 9, dtype=torch.float64)
    for noise_var in (0.0, 0.1):
        found = dmmse(prompts, pool=task.pool(), noise_var=noise_var)
        torch.testing.assert_close(found, prompts.y_query_clean)


def test_without_pairs_dmmse_predicts_by_the_mean_of_the_pool():
    task = TASKS["two responses"]
    prompts, pool = draw_prompts(task, 9, dtype=torch.float64), task.pool()
    none = replace(prompts, x=prompts.x[:, :0], y=prompts.y[:, :0])
    for noise_var in (0.0, 0.1):
        found = dmmse(none, pool=pool, noise_var=noise_var)
        torch.testing.assert_close(found, prompts.x_query @ pool.mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_noise_the_tasks_that_fit_are_alike(dtype: torch.dtype):
    task = replace(TASKS["plain"], noise_var=0.0, context_length=1)
    # Two tasks that differ in a direction that the only pair does not see.
    prompts = draw_prompts(task, 1, dtype=torch.float64)
    pool = task.pool()
    x = prompts.x[0, 0]
    unseen = torch.linalg.cross(x, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    beta = prompts.beta[0]
    pool = torch.cat([beta[None], (beta + unseen[:, None])[None], pool + 1])
    found = dmmse(prompts.to(dtype), pool=pool, noise_var=0.0)
    expected = prompts.x_query @ (beta + unseen[:, None] / 2)
    torch.testing.assert_close(found, expected.to(dtype))
    near = dmmse(prompts, pool=pool, noise_var=1e-8)
    torch.testing.assert_close(near, expected, rtol=1e-6, atol=1e-6)


def test_a_large_pool_in_parts_is_the_pool_in_one(monkeypatch: pytest.MonkeyPatch):
    task = TaskConfig(d_x=2, context_length=8, n_tasks=2**12, noise_var=0.1)
    pool, prompts = task.pool(), draw_prompts(task, 70, dtype=torch.float64)
    monkeypatch.setattr(predictors, "POOL_BYTES", 2**20)
    assert 8 * 70 * 8 * len(pool) > 4 * 2**20
    found = dmmse(prompts, pool=pool, noise_var=0.1)
    weights = log_posterior(prompts[:4], pool=pool, noise_var=0.1).exp()
    expected = torch.einsum("bm,mdn,bd->bn", weights, pool, prompts.x_query[:4])
    torch.testing.assert_close(found[:4], expected)
    # Of so many tasks dMMSE is near to the posterior mean under their law, as a Monte Carlo estimate of it.
    law = ridge(prompts, penalty=task.posterior_penalty)
    apart, gap = (found - law).square().mean(), (prompts.y_query_clean - law).square().mean()
    assert apart < 0.05 * gap


def test_dmmse_is_the_best_prediction_on_its_pool():
    task = TaskConfig(d_x=3, context_length=4, n_tasks=5, noise_var=0.5, beta_var=1.0)
    prompts = draw_prompts(task, 20_000, dtype=torch.float64)
    found = dmmse(prompts, pool=task.pool(), noise_var=0.5)
    error = prompts.y_query_clean - found
    # The error of a posterior mean is uncorrelated with whatever is a function of the prompt.
    for other in (found, ridge(prompts, penalty=0.5), prompts.y[:, 0]):
        products = (error * other)[:, 0]
        assert products.mean().abs() < 4 * products.std() / len(prompts) ** 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"noise_var": -1.0}, ("noise_var", ">= 0", -1.0)),
        ({"pool": torch.zeros(0, 3, 1)}, ("pool", "[M, 3, 1]")),
        ({"pool": torch.zeros(4, 3, 2)}, ("pool", "[4, 3, 2]")),
        ({"pool": torch.full((4, 3, 1), torch.nan)}, ("pool", "finite")),
    ],
)
def test_what_is_no_pool_is_refused(change: dict, words: tuple):
    prompts = draw_prompts(TASKS["plain"], 2)
    with refused(*words):
        dmmse(prompts, **({"pool": TASKS["plain"].pool(), "noise_var": 0.1} | change))
    with refused("noise_var", "> 0 for log_posterior", 0):
        log_posterior(prompts, pool=TASKS["plain"].pool(), noise_var=0)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_new_tasks_are_the_prompts_of_the_task_without_a_pool(name: str, dtype: torch.dtype):
    task = TASKS[name]

    def draw(task: TaskConfig, **options: bool) -> Prompts:
        generator = generator_for(3, "train", 5)
        return draw_prompts(task, 50, generator=generator, dtype=dtype, **options)

    fresh, plain = draw(task, new_tasks=True), draw(replace(task, n_tasks=None))
    for name, values in vars(fresh).items():
        assert values is None or torch.equal(values, getattr(plain, name))
    # On tasks of the pool covariates and noise are the same.
    pooled = draw(task)
    assert torch.equal(pooled.x, plain.x)
    assert torch.equal(pooled.x_query, plain.x_query)
    noise = [prompts.y - prompts.x @ prompts.beta for prompts in (pooled, plain)]
    torch.testing.assert_close(*noise, rtol=0, atol=1e-5)
    (chunk,) = prompt_chunks(task, 50, seed=3, new_tasks=True)
    (same,) = prompt_chunks(replace(task, n_tasks=None), 50, seed=3)
    assert torch.equal(chunk.y, same.y)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_a_pool_is_as_likely(name: str):
    task = TASKS[name]
    pool, prompts = task.pool(), draw_prompts(task, 7000, dtype=torch.float64)
    same = (prompts.beta[:, None] == pool).all((2, 3)).double()
    assert (same.sum(1) == 1).all()
    error = (1 / 7 * 6 / 7 / 7000) ** 0.5
    assert (same.mean(0) - 1 / 7).abs().max() < 4 * error


def test_a_pool_has_the_law_of_its_task_and_depends_on_nothing_else():
    task = replace(TASKS["sparse"], n_tasks=3000)
    pool = task.pool()
    assert ((pool != 0).sum(1) == 2).all()
    assert torch.equal(pool[pool != 0].abs(), torch.full((6000,), 0.5**0.5, dtype=torch.float64))
    dense = TaskConfig(d_x=3, n_tasks=3000, beta_var=2.0).pool()
    squares = dense.square().flatten()
    assert (squares.mean() - 2).abs() < 4 * squares.std() / len(squares) ** 0.5
    assert torch.equal(replace(task, context_length=3, noise_var=4.0).pool(), pool)
    assert torch.equal(replace(task, n_tasks=5).pool(), pool[:5])
    assert not torch.isin(replace(task, task_seed=1).pool()[:5], dense).any()
    pool.zero_()  # a copy: prompts keep their tasks
    assert task.pool().any()
