"""Tasks with several noise levels, and ridge regression mixed by the evidence of the levels."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid

from mechinterp import compare_learners, compare_priors, error_curve, response
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict, override
from mechinterp.icl.predictors import adaptive_ridge, ridge
from mechinterp.icl.prompts import draw_prompts
from mechinterp.presets import preset
from tests.conftest import refused

LEVELS = ((0.01, 0.5), (1.0, 0.5))
TASK = TaskConfig(d_x=5, context_length=20, noise_var=LEVELS)
BAYES = partial(adaptive_ridge, levels=LEVELS, beta_var=TASK.beta_variance)


def drawn(task: TaskConfig, n_prompts: int = 64):
    return draw_prompts(task, n_prompts, seed=3, dtype=torch.float64)


def integrated(prompts, task: TaskConfig, levels) -> np.ndarray:
    """Posterior mean of x_query . beta by integration over a grid of task vectors."""
    line = np.linspace(-8, 8, 1601) * task.beta_variance**0.5
    axes = np.meshgrid(*[line] * task.d_x, indexing="ij")
    beta = np.stack(axes, -1)  # [..., d_x]
    log_prior = -np.square(beta).sum(-1) / (2 * task.beta_variance)
    predictions = []
    for x, y, query in zip(
        prompts.x.numpy(), prompts.y.numpy()[..., 0], prompts.x_query, strict=True
    ):
        square = np.square(y - beta @ x.T).sum(-1)
        logs = [np.log(w) - square / (2 * v) - len(y) / 2 * np.log(v) for v, w in levels]
        log_p = np.logaddexp.reduce(logs) + log_prior
        p = np.exp(log_p - log_p.max())
        product = p * (beta @ query.numpy())
        for _ in range(task.d_x):
            p = trapezoid(p, line, axis=-1)
            product = trapezoid(product, line, axis=-1)
        predictions.append(product / p)
    return np.array(predictions)


@pytest.mark.parametrize("d_x", [1, 2])
@pytest.mark.parametrize("levels", [LEVELS, ((0.2, 0.1), (0.5, 0.6), (4.0, 0.3))])
def test_adaptive_ridge_is_the_integral_over_task_vectors(d_x: int, levels: tuple):
    task = TaskConfig(d_x=d_x, context_length=4, noise_var=levels, beta_var=0.7)
    prompts = drawn(task, 8)
    found = adaptive_ridge(prompts, levels=levels, beta_var=0.7)[:, 0].numpy()
    np.testing.assert_allclose(found, integrated(prompts, task, levels), rtol=0, atol=1e-8)


def test_one_level_is_ridge_regression():
    fixed = TaskConfig(d_x=5, d_y=2, context_length=20, noise_var=0.3)
    prompts = drawn(fixed)
    expected = ridge(prompts, penalty=fixed.posterior_penalty)
    found = adaptive_ridge(prompts, levels=fixed.noise_levels, beta_var=fixed.beta_variance)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert TaskConfig(noise_var=[[0.3, 1]]).noise_var == 0.3


def test_all_responses_of_a_prompt_decide_its_level():
    task = replace(TASK, d_y=2, context_length=3)
    prompts = drawn(task)
    both = adaptive_ridge(prompts, levels=LEVELS, beta_var=task.beta_variance)
    twice = replace(prompts, y=prompts.y[..., :1].expand(-1, -1, 2))
    alone = replace(prompts, y=prompts.y[..., :1])
    # The same y twice is twice the evidence, so that it is no prediction from one y.
    first = adaptive_ridge(twice, levels=LEVELS, beta_var=task.beta_variance)
    assert torch.equal(first[:, 0], first[:, 1])
    assert (first[:, :1] - BAYES(alone)).abs().max() > 1e-3
    assert (both[:, :1] - BAYES(alone)).abs().max() > 1e-3


def test_every_prompt_has_one_level_with_its_weight():
    task = replace(TASK, noise_var=[[0.01, 0.25], [1, 0.75]], context_length=400)
    prompts = drawn(task, 2000)
    noise = prompts.y - prompts.x @ prompts.beta
    large = noise.square().mean(1)[:, 0] > 0.1
    assert large.double().mean().item() == pytest.approx(0.75, abs=4 * (0.1875 / 2000) ** 0.5)
    assert noise[large].square().mean().item() == pytest.approx(1, abs=0.01)
    assert noise[~large].square().mean().item() == pytest.approx(0.01, abs=1e-4)
    plain = drawn(replace(task, noise_var=1.0), 2000)
    assert torch.equal(prompts.x, plain.x)
    assert torch.equal(prompts.beta, plain.beta)
    torch.testing.assert_close(prompts.y[large], plain.y[large])


def test_on_prompts_of_the_low_level_it_is_nearly_ridge():
    # R^2 .9973 between the two, docs of the label adaptive_ridge.
    prompts = drawn(TaskConfig(d_x=5, context_length=80, noise_var=0.01), 4096)
    found = adaptive_ridge(prompts, levels=LEVELS, beta_var=0.2)
    other = ridge(prompts, penalty=0.01 / 0.2)
    assert 1 - (found - other).square().mean() / found.square().mean() > 0.99


def test_curves_baselines_and_response_have_it_as_the_bayes_learner():
    curve = error_curve(BAYES, task=TASK, context_lengths=[5, 20], n_prompts=512)
    assert curve.best == "adaptive_ridge"
    assert curve.over_best == pytest.approx(1, abs=1e-12)
    rows = compare_learners(BAYES, task=TASK, n_prompts=4096).at_trained
    assert rows.risk["adaptive_ridge"] == rows.risk["model"] < rows.risk["ridge"]
    assert rows.risk["ridge"] < rows.risk["least_squares"]
    found = response(BAYES, task=TASK, n_prompts=256).scalars.set_index("name").value
    assert found["squared distance to Bayes"] == 0


def test_the_penalty_of_the_mean_variance_is_the_best_one():
    prompts = drawn(TASK, 20_000)

    def risk(penalty: float) -> float:
        return (ridge(prompts, penalty=penalty) - prompts.y_query_clean).square().mean().item()

    best = TASK.posterior_penalty
    assert best == pytest.approx(0.505 / 0.2)
    assert risk(best) < min(risk(0.8 * best), risk(1.25 * best))


def test_levels_come_back_from_json_as_a_tuple():
    config = override(ExperimentConfig(), "task.noise_var=[[0.01, 0.5], [1, 0.5]]")
    assert config.task.noise_var == LEVELS
    assert '"noise_var": [' in config.to_json()
    assert ExperimentConfig.from_json(config.to_json()) == config
    assert hash(config.task) == hash(
        from_dict({"task": {"noise_var": [[0.01, 0.5], [1, 0.5]]}}).task
    )
    assert config.id != ExperimentConfig().id
    assert "noise_var 0.01 (weight 0.5) or 1 (weight 0.5)" in config.task.in_words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"noise_var": [[0.1, 0.5], [1, 0.4]]}, ["noise_var", "sum to 1", "0.9"]),
        ({"noise_var": [[0.1, 0.5], [-1, 0.5]]}, ["noise_var", "above 0", "-1"]),
        ({"noise_var": [[0.1, 1.5], [1, -0.5]]}, ["noise_var", "above 0", "-0.5"]),
        ({"noise_var": [[0.1, 0.5, 2], [1, 0.5]]}, ["noise_var", "[variance, weight]"]),
        ({"noise_var": [[1e300, 0.5], [1, 0.5]]}, ["noise_var", "at most", "1e+300"]),
        ({"noise_var": []}, ["noise_var", "[variance, weight]"]),
        ({"noise_var": [0.1, 1]}, ["noise_var"]),
        ({"noise_var": [[0.1, 0.5], [1, 0.5]], "n_tasks": 4}, ["noise_var", "n_tasks"]),
        ({"noise_var": [[0.1, 0.5], [1, 0.5]], "drift": 0.9}, ["noise_var", "drift"]),
    ],
)
def test_wrong_levels_are_refused(wrong: dict, words: list[str]):
    with refused(*words):
        from_dict({"task": wrong})


def test_formulas_of_one_level_refuse_several():
    with refused("task.noise_var", "gradient_flow"):
        override(preset("linear-separate"), "task.noise_var=[[0.01, 0.5], [1, 0.5]]")
    with refused("one noise level"):
        compare_priors(BAYES, task=TASK, pool=torch.zeros(2, 5, 1))
    for levels, beta_var in (((), 1.0), (((0.0, 1.0),), 1.0), (LEVELS, 0.0)):
        with refused("levels", "beta_var"):
            adaptive_ridge(drawn(TASK), levels=levels, beta_var=beta_var)
