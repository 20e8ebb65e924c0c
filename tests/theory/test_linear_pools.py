"""One layer of linear attention on a pool of tasks: closed forms against Monte Carlo, training and a table of known risks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analyses.lib.theory.linear_pools import pool_optimum, second_moment
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.config import CovarianceConfig, TaskConfig, override
from mechinterp.icl.predictors import dmmse
from mechinterp.icl.prompts import covariance_matrix, draw_prompts
from mechinterp.presets import preset
from mechinterp.theory.linear import merged_heads, modes, population_moments
from mechinterp.training.linear import flow
from mechinterp.training.linear_models import task_moments, train_linear
from tests.conftest import refused

TASK = TaskConfig(d_x=5, context_length=20, noise_var=0.25, beta_var=1.0, n_tasks=4)
KMS = CovarianceConfig(kind="kms", rho=0.5)
CORRELATED = replace(TASK, d_x=3, context_length=6, covariance=KMS)
TASKS = {"plain": TASK, "correlated": CORRELATED, "wide": replace(CORRELATED, n_tasks=64)}
EACH = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def optimum_of(task: TaskConfig):
    return pool_optimum(
        task.pool()[..., 0].numpy(),
        covariance_matrix(task.covariance, task.d_x),
        context_length=task.context_length,
        noise_var=task.noise_var,
        new_tasks=np.full(task.d_x, task.beta_variance),
    )


def test_the_row_of_the_facts_for_one_task():
    # facts/task_priors.md 3, M = 1: its pool is the first draw of numpy's generator of seed 0.
    pool = np.random.default_rng(0).standard_normal((1, 5))
    best = pool_optimum(pool, np.ones(5), context_length=20, noise_var=0.25)
    assert best.pool_risk == pytest.approx(0.0776, abs=0.00005)
    assert best.new_risk == pytest.approx(4.262, abs=0.001)


@pytest.mark.parametrize("n_tasks", [1, 2, 4, 8, 64])
def test_the_formulas_of_the_facts(n_tasks: int):
    task = replace(TASK, n_tasks=n_tasks)
    T, d, L, s2 = second_moment(task.pool()[..., 0].numpy()), 5, 20, 0.25
    G = (1 + 1 / L) * T + (np.trace(T) + s2) / L * np.eye(d)
    A = T @ np.linalg.inv(G)
    best = optimum_of(task)
    np.testing.assert_allclose(best.M.T, A, atol=1e-12)
    assert best.pool_risk == pytest.approx(np.trace(T) - np.trace(A @ T), abs=1e-12)
    on_new = d - 2 * np.trace(A) + np.trace(A @ ((1 + 1 / L + (d + s2) / L) * A.T))
    assert best.new_risk == pytest.approx(on_new, abs=1e-12)
    if n_tasks < 5:  # second moments tell a pool of fewer tasks than dimensions from new ones
        assert best.pool_risk < best.new_risk


@EACH
@pytest.mark.parametrize("new_tasks", [False, True])
def test_risks_are_those_of_monte_carlo(task: TaskConfig, new_tasks: bool):
    best = optimum_of(task)
    prompts = draw_prompts(task, 40_000, new_tasks=new_tasks, dtype=torch.float64)
    b = (prompts.x * prompts.y).mean(1)
    prediction = torch.einsum("bi,ij,bj->b", b, torch.from_numpy(best.M), prompts.x_query)
    mean, sem = mean_and_sem((prediction - prompts.y_query_clean[:, 0]).square().numpy())
    assert abs(mean - (best.new_risk if new_tasks else best.pool_risk)) < 4 * sem


@EACH
def test_no_other_matrix_is_better(task: TaskConfig):
    moments, M = task_moments(task), optimum_of(task).M
    np.testing.assert_allclose(moments.gradient(M), 0, atol=1e-12)
    np.testing.assert_allclose(M, moments.minimiser(), atol=1e-10)


def test_linear_attention_keeps_second_moments_only():
    # Two pools of the same second moment, one of them with tasks and their negatives: the same optimum, other posteriors.
    pool, law = TASK.pool(), {"context_length": 20, "noise_var": 0.25}
    both = (pool, torch.cat([pool, -pool]))
    first, second = (pool_optimum(each[..., 0].numpy(), np.ones(5), **law) for each in both)
    np.testing.assert_allclose(first.M, second.M, atol=1e-14)
    prompts = draw_prompts(TASK, 100, context_length=1, dtype=torch.float64)
    first, second = (dmmse(prompts, pool=each, noise_var=0.25) for each in both)
    assert (first - second).abs().mean() > 0.1


def noiseless(n_tasks: int) -> TaskConfig:
    return TaskConfig(d_x=4, context_length=31, noise_var=0.0, beta_var=1.0, n_tasks=n_tasks)


@pytest.mark.parametrize("n_tasks", [1, 3, 9])
def test_as_many_directions_are_learned_as_the_pool_spans(n_tasks: int):
    moments = task_moments(noiseless(n_tasks))
    directions, rank = modes(moments), min(n_tasks, 4)
    assert len(directions.rates) == rank
    assert len(directions.levels) == rank + 1
    assert directions.levels[-1] == pytest.approx(optimum_of(noiseless(n_tasks)).pool_risk)
    run = flow(merged_heads(4, 4, std=1e-8, seed=0), moments, duration=2000.0)
    assert run.loss[-1] == pytest.approx(directions.levels[-1], rel=1e-6)
    # From small weights it comes near every level on its way.
    for level in directions.levels[:-1]:
        assert np.abs(run.loss - level).min() < 0.01 * (directions.levels[0] - directions.levels[1])


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["gradient_flow", "gradient_descent"])
def test_a_trained_layer_ends_at_the_optimum_of_its_pool(optimizer: str):
    config = override(
        replace(preset("linear-merged"), task=noiseless(2)),
        f"train.optimizer={optimizer}",
        "train.steps=20000",
        "train.learning_rate=0.01",
        "train.init_std=0.01",
    )
    trained = train_linear(config)
    best = optimum_of(config.task)
    assert trained.history["eval_loss"].iloc[-1] == pytest.approx(best.pool_risk, rel=1e-4)
    if optimizer == "gradient_descent":  # on a training set, too
        losses = train_linear(override(config, "task.n_sequences=4000")).history["eval_loss"]
        assert best.pool_risk < losses.iloc[-1] < 1.2 * best.pool_risk


def test_a_singular_law_of_tasks_is_taken():
    moments = population_moments(np.ones(2), context_length=5, task_covariance=np.ones((2, 2)))
    assert len(modes(moments).rates) == 1
    with pytest.raises(ValueError, match="must be positive numbers or 0, not all 0"):
        population_moments(np.ones(2), context_length=5, task_covariance=np.zeros(2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: pool_optimum(np.full((3, 2), np.nan), np.ones(2), context_length=5),
            ("pool", "finite"),
        ),
        (
            lambda: override(preset("linear-merged"), "task.n_tasks=2"),
            ("task.covariance.kind", "identity"),
        ),
    ],
)
def test_pools_without_theory_are_refused(call, words: tuple):
    with refused(*words):
        call()
