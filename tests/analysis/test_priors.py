"""Memorise or generalise: distances from the pool's posterior mean and from ridge."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses.pools.map import transient
from analyses.pools.prior_heads import _rises, prior_heads
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.learners.pool_tasks import ERROR_COLUMN, TASK_KINDS, trimmed_closeness
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.over_steps import OverSteps
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.predictors import dmmse, ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import merged_heads
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import refused

TASK = TaskConfig(d_x=3, d_y=2, context_length=4, n_tasks=6, beta_var=1.0, noise_var=0.25)
POOL = TASK.pool()


def mixture(a: float, pool: Tensor = POOL) -> Callable[[Prompts], Tensor]:
    def predictions(prompts: Prompts) -> Tensor:
        memory = dmmse(prompts, pool=pool, noise_var=TASK.noise_var)
        return a * memory + (1 - a) * ridge(prompts, penalty=TASK.posterior_penalty)

    return predictions


@pytest.mark.parametrize("a", [-0.5, 0.0, 0.5, 1.0])
def test_a_mixture_gives_back_its_weight_and_relative_distance(a: float):
    found = compare_priors(mixture(a), task=TASK, n_prompts=500)
    assert found.strategy == {0.0: "generalises", 1.0: "memorises"}.get(a, "neither")
    relative = (1 - a) ** 2 / ((1 - a) ** 2 + a**2)
    for part in (found.at_length, found.overall):
        np.testing.assert_allclose(part.weight_dmmse, a, atol=1e-12)
        np.testing.assert_allclose(part.relative, relative, atol=1e-12)
        np.testing.assert_allclose(part.unexplained, 0, atol=1e-12)
        for sem in (part.weight_dmmse_sem, part.relative_sem):
            np.testing.assert_allclose(sem, 0, atol=1e-12)


def test_the_numbers_are_those_of_the_definition():
    def model(prompts: Prompts) -> Tensor:
        return 0.8 * prompts.y.mean(1)

    found = compare_priors(
        model, task=TASK, context_lengths=[2, 4], n_prompts=300, seed=3
    ).to_frame()
    prompts = draw_prompts(TASK, 300, seed=3, new_tasks=True, dtype=torch.float64)
    short = replace(prompts, x=prompts.x[:, :2], y=prompts.y[:, :2])
    f, D, R = (mixture(a)(short) if a is not None else model(short) for a in (None, 1.0, 0.0))
    row = found.query("tasks == 'new' and context_length == 2").iloc[0]
    far = ((f - D).square().mean(1) / 3).numpy()
    assert row.distance_dmmse == pytest.approx(far.mean())
    assert row.distance_dmmse_sem == pytest.approx(far.std(ddof=1) / 300**0.5)
    assert row.distance_ridge == pytest.approx((f - R).square().mean().item() / 3)
    line = (D - R).flatten()
    a = ((f - R).flatten() @ line / (line @ line)).item()
    assert row.weight_dmmse == pytest.approx(a)
    left = (f - a * D - (1 - a) * R).square().sum() / line.square().sum()
    assert row.unexplained == pytest.approx(left.item())
    risks = [(p - prompts.y_query_clean).square().mean().item() for p in (f, D, R)]
    assert list(row[["risk", "risk_dmmse", "risk_ridge"]]) == pytest.approx(risks)


def test_a_given_pool_takes_the_place_of_the_tasks_own():
    other = replace(TASK, task_seed=7).pool()
    plain = replace(TASK, n_tasks=None)
    found = compare_priors(mixture(1.0, other), task=plain, pool=other, n_prompts=100)
    np.testing.assert_allclose(found.at_length.relative, 0, atol=1e-12)
    own = compare_priors(mixture(1.0, other), task=TASK, n_prompts=100)
    assert own.overall.relative.min() > 0.5
    # New prompts are the same ones; those of the pool have its tasks, and the best predictor on them is its posterior mean.
    np.testing.assert_allclose(found.overall.risk_ridge[1], own.overall.risk_ridge[1])
    assert found.overall.risk_dmmse[0] < found.overall.risk_ridge[0] / 2


@pytest.mark.slow
def test_a_model_two_percent_from_ridge_generalises_whatever_the_size_of_the_pool():
    """With 4,096 tasks dMMSE is nearer to ridge than the model, so that nearly all of its error is off their line."""
    task = replace(TASK, d_y=1, n_tasks=4096)

    def model(prompts: Prompts) -> Tensor:
        best = ridge(prompts, penalty=task.posterior_penalty)
        return best + 0.1 * prompts.x[:, 0, :1].sign()

    found = compare_priors(model, task=task, context_lengths=[4], n_prompts=2000)
    assert found.trimmed.risk[1] / found.trimmed.risk_ridge[1] == pytest.approx(1.02, abs=0.01)
    assert found.trimmed.unexplained[0] > 0.5
    assert found.strategy == "generalises"


def with_error_on(share: float, size: float) -> Callable[[Prompts], Tensor]:
    """dMMSE, off by `size` on the share of prompts whose first query entry is largest."""
    limit = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share / 2)).item()

    def predictions(prompts: Prompts) -> Tensor:
        return mixture(1.0)(prompts) + size * (prompts.x_query[:, :1].abs() > limit)

    return predictions


@pytest.mark.parametrize("seed", range(2))
def test_errors_on_one_prompt_in_five_thousand_do_not_change_the_strategy(seed: int):
    model = with_error_on(1 / 5000, 1e6)
    found = compare_priors(model, task=TASK, context_lengths=[4], n_prompts=4000, seed=seed)
    plain = compare_priors(mixture(1.0), task=TASK, context_lengths=[4], n_prompts=4000, seed=seed)
    assert found.strategy == "memorises"
    # 4 of 4,000 prompts are left out; the errors lie on 0 to 4 of them.
    np.testing.assert_allclose(found.trimmed.relative, 0, atol=1e-9)
    np.testing.assert_allclose(found.trimmed.risk, found.trimmed.risk_dmmse)
    np.testing.assert_allclose(found.median_risk[1], plain.median_risk[1], rtol=0.01)
    hit = found.overall.risk[1] > 1e6
    assert hit == (found.overall.risk[1] != pytest.approx(plain.overall.risk[1]))
    assert found.carried_by_few[1] == hit


def test_a_strategy_that_the_worst_hundredth_decides_is_undetermined():
    model = with_error_on(1 / 200, 60.0)
    found = compare_priors(model, task=TASK, context_lengths=[4], n_prompts=4000)
    assert found.trimmed.unexplained[0] > 1
    assert found.strategy == "undetermined"
    # So many prompts are no few: a hundredth less of them leaves the answer as it is.
    many = compare_priors(
        with_error_on(1 / 20, 60.0), task=TASK, context_lengths=[4], n_prompts=4000
    )
    assert many.strategy == "neither"


@pytest.mark.slow
def test_standard_errors_of_trimmed_means_are_those_of_repeated_samples():
    generator = np.random.default_rng(0)

    def sample() -> pd.DataFrame:
        squares = generator.chisquare(1, (20_000, 1, 8))
        # The error of the model has no mean; distances grow with it.
        squares[..., ERROR_COLUMN] = generator.uniform(size=(20_000, 1)) ** -1.25
        squares[..., :2] += squares[..., [ERROR_COLUMN]] * [1.0, 0.5]
        return trimmed_closeness(squares, 1000)

    runs = [sample() for _ in range(100)]
    for name in ("risk", "distance_dmmse", "relative", "risk_ridge"):
        values, sems = (
            np.array([getattr(run, f"{name}{end}") for run in runs]) for end in ("", "_sem")
        )
        # The spread of 100 runs is known to 7%; the worst prompt that stays varies by 20^-1/2 / 0.8 of its size.
        assert 0.75 < values.std(ddof=1) / np.square(sems).mean() ** 0.5 < 1.35, name


def test_a_model_of_the_package_has_a_row_per_length_and_kind_of_tasks():
    task = replace(TASK, d_y=1)
    heads = linear_attention(merged_heads(2, 3, std=0.1, seed=0))
    found = compare_priors(heads, task=task, n_prompts=64, context_lengths=[4, 1])
    frame = found.to_frame()
    rows = [[kind, length] for kind in TASK_KINDS for length in (1, 4)]
    assert frame[["tasks", "context_length"]].to_numpy().tolist() == rows
    assert np.isfinite(frame.select_dtypes("number").to_numpy()).all()
    assert (len(found.plot().data), len(found.plot_risks().data)) == (2, 6)
    zero = compare_priors(lambda prompts: 0 * prompts.y_query, task=task, n_prompts=500)
    assert (zero.strategy, zero.overall.unexplained[0] > 0.5) == ("neither", True)
    # The lengths, as long as they are few, are all from 1 on.
    default = compare_priors(mixture(0.0), task=replace(TASK, context_length=40), n_prompts=8)
    assert len(default.context_length) == 16
    assert default.context_length[[0, -1]].tolist() == [1, 40]


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ((mixture(0.0),), {}, ["compare_priors", "task"]),
        ((mixture(0.0),), {"task": replace(TASK, n_tasks=None)}, ["pool", "n_tasks"]),
        ((mixture(0.0),), {"task": TASK, "pool": POOL[:, :2]}, ["[M, 3, 2]", "[6, 2, 2]"]),
        ((mixture(0.0),), {"task": TASK, "context_lengths": [0]}, ["context_lengths", 1, "[0]"]),
        ((partial(ridge, penalty=float("nan")),), {"task": TASK}, ["predictions overflow"]),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple, settings: dict, words: list):
    with refused(*words):
        compare_priors(*arguments, n_prompts=8, **settings)


def test_dmmse_is_a_learner_and_a_baseline_of_a_task_with_a_pool():
    task = replace(TASK, d_y=1)
    memory = partial(dmmse, pool=task.pool(), noise_var=task.noise_var)
    fits = compare_learners(memory, task=task, n_prompts=500)
    assert fits.best == fits.learners[-1] == "dmmse"
    assert fits.at_trained.r2["dmmse"] == pytest.approx(1)
    plain = compare_learners(memory, task=replace(task, n_tasks=None), n_prompts=500)
    assert "dmmse" not in plain.learners
    prompts = draw_prompts(task, 300, dtype=torch.float64)
    heads = linear_attention(merged_heads(2, 3, std=0.1, seed=0))
    given = replace(predictor_of(heads), task=task)
    found = compare_learners(given, prompts, task=task).at_trained
    assert found.index[-1] == "dmmse"
    risk = (memory(prompts) - prompts.y_query_clean).square().mean().item()
    assert found.risk["dmmse"] == pytest.approx(risk)
    assert found.risk["dmmse"] < found.risk.drop("dmmse").min()


TWO_TASKS = TaskConfig(d_x=3, context_length=5, n_tasks=2, beta_var=1.0, noise_var=0.25)
CONFIG = ExperimentConfig(
    task=TWO_TASKS, model=ModelConfig(n_heads=3, score="linear/L"), train=TrainConfig(steps=20)
)

EFFECTS = ("weight_change", "dmmse_rise", "ridge_rise", "memory_excess")


def layer(seed: int = 0) -> Weights:
    return initial_weights(replace(CONFIG, seed=seed)).to(torch.float64)


def without(weights: Weights, head: int) -> Weights:
    return weights.without([(0, head)])


def test_a_mask_does_what_comparing_the_masked_model_says():
    weights = layer()
    found = prior_heads(weights, TWO_TASKS, n_prompts=200, method="zero")
    full = compare_priors(weights, task=TWO_TASKS, n_prompts=200).overall
    for head in range(3):
        masked = compare_priors(without(weights, head), task=TWO_TASKS, n_prompts=200).overall
        change = masked.weight_dmmse - full.weight_dmmse
        assert found.weight_change[0, head] == pytest.approx(change[0])
        rise = masked.distance_dmmse - full.distance_dmmse
        assert found.dmmse_rise[0, head] == pytest.approx(rise[0])
        to_ridge = masked.distance_ridge - full.distance_ridge
        assert found.ridge_rise[0, head] == pytest.approx(to_ridge[1])
        assert found.memory_excess[0, head] == pytest.approx(rise[0] - to_ridge[0])


@pytest.mark.slow
def test_standard_errors_of_heads_are_those_of_repeated_samples():
    runs = [prior_heads(layer(), TWO_TASKS, n_prompts=200, seed=seed) for seed in range(40)]
    for name in EFFECTS:
        values = np.array([getattr(run, name) for run in runs])
        sems = np.array([getattr(run, f"{name}_sem") for run in runs])
        ratio = values.std(0, ddof=1) / np.sqrt((sems**2).mean(0))
        # Known to 1 / sqrt(2 * 39) for normal values; twice that is allowed for heavy tails.
        assert (np.abs(np.log(ratio)) < 4 * 2 / (2 * 39) ** 0.5).all(), name


def test_prompts_on_which_the_full_or_the_masked_model_errs_most_are_left_out():
    squares = np.random.default_rng(0).chisquare(1, (2000, 3, 8))
    squares[7, 1] = squares[8, 0] = (
        1e9  # one mask explodes on one prompt, the full model on another
    )
    worst = max(
        (i for i in range(2000) if i != 8), key=lambda i: squares[i, [0, 2], ERROR_COLUMN].max()
    )
    rises = _rises(squares)
    for head, gone in enumerate(([7, 8], [8, worst])):
        expected = np.delete(squares[:, head + 1] - squares[:, 0], gone, 0)
        np.testing.assert_array_equal(rises[:1998, head, 0], expected)
    # The rows behind stand for the prompts that go, and are those of the worst that stays.
    assert np.abs(rises).max() < 100


def test_which_heads_memorise_follows_from_both_effects():
    found = prior_heads(layer(), TWO_TASKS, n_prompts=50)
    ones = {f"{name}_sem": np.ones((2, 2)) for name in EFFECTS}
    far, near = 3.0, 1.0  # 5% over four heads are 2.5 standard errors
    known = replace(
        found,
        **ones,
        weight_change=np.array([[-far, -far], [-near, far]]),
        memory_excess=np.array([[far, near], [far, far]]),
        dmmse_rise=np.zeros((2, 2)),
        ridge_rise=np.array([[near, far], [-far, 0.0]]),
        carried_by_few=np.zeros((2, 2), bool),
    )
    assert known.memorises == [(0, 0)]
    assert known.generalises == [(0, 1)]


def test_the_usual_lengths_are_those_of_training(tmp_path: Path):
    save(tmp_path / "model", CONFIG, layer(), step=20)
    # This model was trained with five pairs in every prompt.
    default = compare_priors(load(tmp_path / "model"), n_prompts=16)
    assert default.context_length.tolist() == [5]
    shorter = replace(TWO_TASKS, context_length=3)
    asked = compare_priors(load(tmp_path / "model"), task=shorter, n_prompts=16)
    assert asked.context_length.tolist() == [3]


def path_of(relative: list[float], sem: float) -> OverSteps:
    """Comparisons at steps 0, 1000, ... with these relative distances on new tasks."""
    some = compare_priors(layer(), task=TWO_TASKS, n_prompts=16, context_lengths=[5])
    results = []
    for value in relative:
        both = np.array([some.trimmed.relative[0], value])
        trimmed = some.trimmed.assign(relative=both, relative_sem=np.full(2, sem))
        results.append(replace(some, trimmed=trimmed))
    step = np.arange(len(relative)) * 1000
    return OverSteps("compare-priors", tuple(results), step, np.zeros((0, 2)))


def test_transient_ridge_is_above_a_half_first_and_below_in_the_end():
    assert transient(path_of([0.5, 0.8, 0.9, 0.2], 0.01)) == 1000
    assert transient(path_of([0.5, 0.52, 0.4, 0.2], 0.02)) is None  # not clearly above
    assert transient(path_of([0.8, 0.4, 0.4, 0.2], 0.02)) is None  # untrained
    assert transient(path_of([0.5, 0.8, 0.9, 0.48], 0.02)) is None  # not clearly below
    assert transient(path_of([0.5, 0.8, 0.9, 0.95], 0.01)) is None


@pytest.mark.slow
def test_priors_of_one_pass_are_those_of_a_run_per_length():
    checkpoint = load("checkpoints/pool-gpt2-m16")
    one_pass = compare_priors(checkpoint, n_prompts=512)
    runs = compare_priors(predictor_of(checkpoint).predict, task=checkpoint.task, n_prompts=512)
    for name in ("relative", "risk", "weight_dmmse"):
        one, other = (getattr(each.trimmed, name) for each in (one_pass, runs))
        sems = [getattr(each.trimmed, f"{name}_sem") for each in (one_pass, runs)]
        assert (np.abs(one - other) < 4 * np.hypot(*sems)).all()
