"""Tasks that drift: their random numbers, the Kalman filter, and the analyses that need one task vector per prompt."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analyses.recurrent import drift
from mechinterp import (
    compare_learners,
    error_curve,
    name_algorithm,
    patch_activations,
    response,
    train,
)
from mechinterp.analysis.probing.targets import PROBE_TARGETS
from mechinterp.config import (
    CovarianceConfig,
    ExperimentConfig,
    TaskConfig,
    TrainConfig,
    from_dict,
    override,
)
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.along_pairs import ALONG_PAIRS
from mechinterp.icl.predictors import kalman, ridge
from mechinterp.icl.prompts import draw_prompts
from mechinterp.presets import preset
from mechinterp.training.linear_models import task_moments
from tests.conftest import refused

TASK = TaskConfig(d_x=4, context_length=20, drift=0.95)
LAWS = {
    "facts": TASK,
    "fast": replace(TASK, drift=0.3),
    "two responses": replace(TASK, d_y=2, beta_var=2.0),
    "correlated x": replace(TASK, covariance=CovarianceConfig("kms", rho=0.8)),
    "without noise": replace(TASK, noise_var=0.0, drift=0.7),
    "few pairs": replace(TASK, context_length=2),
    "fixed": replace(TASK, drift=1.0),
}


def drawn(task: TaskConfig, n_prompts: int = 64):
    return draw_prompts(task, n_prompts, seed=2, dtype=torch.float64)


def conditioned(prompts, task: TaskConfig) -> np.ndarray:
    """Gaussian conditioning: y and the target are jointly Gaussian given x, with covariance rho^|i-j| beta_var <x_i, x_j>,
    and noise_var more on the diagonal of y."""
    predictions = []
    for x, y, query in zip(prompts.x, prompts.y, prompts.x_query, strict=True):
        every = np.vstack([x, query])
        at = np.arange(len(every))
        signal = task.drift ** abs(at[:, None] - at) * task.beta_variance * (every @ every.T)
        of_y = signal[:-1, :-1] + task.noise_var * np.eye(len(x))
        predictions.append(signal[-1, :-1] @ np.linalg.solve(of_y, y.numpy()))
    return np.array(predictions)


@pytest.mark.parametrize("law", LAWS)
def test_the_kalman_filter_is_gaussian_conditioning(law: str):
    prompts = drawn(LAWS[law])
    found = kalman(prompts, task=LAWS[law]).numpy()
    np.testing.assert_allclose(found, conditioned(prompts, LAWS[law]), rtol=0, atol=1e-10)


def test_without_drift_the_kalman_filter_is_ridge_regression():
    fixed = replace(TASK, drift=1.0)
    expected = ridge(drawn(fixed), penalty=fixed.posterior_penalty)
    assert torch.equal(kalman(drawn(fixed), task=fixed), expected)


def test_a_drift_leaves_covariates_noise_and_the_first_task_vector():
    fixed = drawn(replace(TASK, drift=1.0))
    moving = drawn(TASK)
    assert torch.equal(moving.x, fixed.x)
    assert torch.equal(moving.drifting[:, 0], fixed.beta)
    noise = moving.y - moving.y_without_noise("a test")
    torch.testing.assert_close(noise, fixed.y - fixed.x @ fixed.beta, rtol=0, atol=1e-12)


def test_task_vectors_have_the_stationary_law():
    vectors = drawn(replace(TASK, drift=0.8, beta_var=0.5), 20_000).drifting[..., 0]
    for first, second in ((0, 0), (0, 1), (5, 8), (20, 20)):
        products = vectors[:, first] * vectors[:, second]
        error = products.std(0) / len(products) ** 0.5
        expected = 0.5 * 0.8 ** abs(first - second)
        assert ((products.mean(0) - expected).abs() < 4 * error).all()


def test_targets_belong_to_the_task_vector_of_their_own_pair():
    prompts = drawn(replace(TASK, noise_var=0.0))
    clean = torch.einsum("bpx,bpxy->bpy", prompts.every_x, prompts.drifting)
    torch.testing.assert_close(prompts.y_of_every_x, clean)
    torch.testing.assert_close(prompts.prefix(7).y_query_clean, clean[:, 7])
    torch.testing.assert_close(prompts.prefix(7).prefix(3).y_query_clean, clean[:, 3])
    # The query follows the last pair, so that a shorter prompt keeps its last pairs.
    torch.testing.assert_close(prompts.shortened(5).y, prompts.y[:, -5:])
    torch.testing.assert_close(prompts.shortened(5).prefix(2).y_query_clean, clean[:, 17])
    other = prompts.with_next_task("a test")
    expected = torch.einsum("bpx,bpxy->bpy", prompts.every_x, prompts.drifting.roll(1, 0))
    torch.testing.assert_close(other.y_of_every_x, expected)


def test_curves_and_baselines_have_the_kalman_filter_as_the_bayes_learner():
    curve = error_curve(
        lambda prompts: kalman(prompts, task=TASK),
        task=TASK,
        context_lengths=[5, 20],
        n_prompts=512,
    )
    assert curve.best == "kalman"
    assert curve.over_best == pytest.approx(1, abs=1e-12)
    found = compare_learners(
        lambda prompts: ridge(prompts, penalty=TASK.posterior_penalty), task=TASK, n_prompts=4096
    )
    rows = found.at_trained
    # Excess risk 1.10 of the Kalman filter and 2.31 of ridge at beta_var 1 (4,000 prompts) in closed form: beta_var .25
    # and noise .025 is that task with y half as large.
    half = replace(TASK, noise_var=0.025)
    risks = compare_learners(
        lambda prompts: kalman(prompts, task=half), task=half, n_prompts=4096
    ).at_trained.risk
    assert 4 * risks["kalman"] == pytest.approx(1.10, abs=0.1)
    assert 4 * risks["ridge"] == pytest.approx(2.31, abs=0.2)
    assert rows.risk["kalman"] < rows.risk["ridge"] == rows.risk["model"]


@pytest.mark.slow
def test_the_response_of_the_kalman_filter_is_that_of_bayes():
    found = response(lambda prompts: kalman(prompts, task=TASK), task=TASK, n_prompts=512)
    scalars = found.scalars.set_index("name").value
    assert scalars["squared distance to Bayes"] == 0
    assert scalars["alpha"] < 0.95
    assert scalars["later"] > 0.01
    assert scalars["earlier"] > 0.01


def test_a_fixed_learner_keeps_its_name_on_a_drifting_task():
    found = name_algorithm(lambda prompts: ridge(prompts, penalty=0.4), task=TASK)
    assert found.label == "ridge_like"


def test_a_probe_of_beta_gets_the_task_vector_of_each_pair():
    prompts = drawn(TASK)
    assert torch.equal(PROBE_TARGETS["beta"](prompts), prompts.drifting.flatten(2))
    noisy, clean = PROBE_TARGETS["y"](prompts)
    assert torch.equal(clean[:, :-1], prompts.y_without_noise("a test"))
    assert torch.equal(noisy[:, -1], prompts.y_query)


def test_a_drift_comes_back_from_json_and_changes_the_id_only_where_it_is_one():
    config = override(ExperimentConfig(), "task.drift=0.9")
    assert ExperimentConfig.from_json(config.to_json()) == config
    assert from_dict({"task": {"drift": 0.9}}) == config
    assert config.id != ExperimentConfig().id
    assert ExperimentConfig(task=TaskConfig(drift=1)).id == ExperimentConfig().id
    assert "drift 0.9" in config.task.in_words
    assert "drift" not in TaskConfig().in_words


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"drift": 0}, ["task.drift", "(0, 1]", "0"]),
        ({"drift": 1.01}, ["task.drift", "(0, 1]", "1.01"]),
        ({"drift": 0.9, "n_tasks": 4}, ["task.drift", "n_tasks", "0.9"]),
        ({"drift": 0.9, "supports": [[0], [1]], "d_y": 2}, ["task.drift", "supports"]),
        ({"drift": 0.9, "sparsity": 1}, ["task.drift", "sparsity"]),
        ({"drift": 0.9, "n_sequences": 64}, ["task.drift", "n_sequences"]),
        ({"drift": 0.9, "shared_beta": True}, ["task.drift", "shared_beta"]),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, list) else None,
)
def test_a_drift_without_a_meaning_is_refused(wrong: dict, words: list[str]):
    with refused(*words):
        from_dict({"task": wrong})


def test_trainings_and_formulas_of_one_task_vector_refuse_a_drift():
    with refused("task.drift", "gradient_flow"):
        override(preset("linear-separate"), "task.drift=0.9")
    with refused("task.drift", "curriculum"):
        ExperimentConfig(
            task=TASK, model=preset("garg-tiny").model, train=TrainConfig(curriculum_every=10)
        )
    with refused("drift", "0.95"):
        task_moments(TASK)
    with refused("kalman", "n_tasks"):
        kalman(drawn(TASK), task=TaskConfig(d_x=4, n_tasks=4))
    with refused("(d_x, d_y)", "(4, 1)"):
        kalman(drawn(TASK), task=TaskConfig(d_x=3, drift=0.9))
    with refused("one task vector", "drift"):
        drawn(TASK).task_vectors("A curriculum")
    with refused("kalman", "task="):
        compare_learners(lambda p: p.y_query, drawn(TASK), learners=["kalman"], task="unknown")


def test_patching_a_drifting_prompt_permutes_its_responses(tmp_path):
    config = override(preset("softmax-h2"), "task.drift=0.9", "train.steps=2")
    trained = train(config, out=tmp_path / "model")
    assert np.isfinite(patch_activations(trained, n_prompts=64).to_frame().effect).all()


def test_the_closed_form_of_excess_risks_is_their_mean_over_prompts():
    """Risks at given covariates of analyses/recurrent/drift.py, against squared errors."""
    prompts = draw_prompts(drift.TASK, 4096, seed=5, dtype=torch.float64)
    law = drift.covariances(prompts, 0.9, drift.TASK)
    task = replace(drift.TASK, drift=0.9)
    moving = draw_prompts(task, 4096, seed=5, dtype=torch.float64)
    weights = torch.linalg.solve(law[0], law[1][..., None])[..., 0]
    predictions = (weights * moving.y[..., 0]).sum(1)
    np.testing.assert_allclose(predictions, kalman(moving, task=task)[:, 0], atol=1e-10)
    errors = (predictions - moving.y_query_clean[:, 0]).square()
    spread = errors.std() / len(errors) ** 0.5
    assert abs(errors.mean() - drift.risk(weights, law)) < 4 * spread


@pytest.mark.parametrize("learner", ALONG_PAIRS, ids=lambda learner: learner.label)
def test_learners_along_the_pairs_treat_every_prompt_alone(learner: Algorithm):
    """300 pairs: a matrix of pairs and pairs takes 0.7 MB, so that the prompts are computed one by one."""
    task = TaskConfig(d_x=4, context_length=300)
    prompts = draw_prompts(task, 5, dtype=torch.float64)
    scalars = learner.start(PromptMoments(prompts, task), 1)
    whole, *alone = (
        learner.predictions(PromptMoments(prompts[rows], task), scalars, 1)[0]
        for rows in (slice(None), *(slice(row, row + 1) for row in range(5)))
    )
    assert whole.isfinite().all()
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-12, atol=0)
