"""Memorise or generalise: distances from the pool's posterior mean and from ridge."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.learners.compare import baselines, fit_learners
from mechinterp.analysis.learners.priors import (
    ERROR,
    KINDS,
    PriorComparison,
    compare_priors,
    trimmed_closeness,
)
from mechinterp.config import TaskConfig
from mechinterp.display import with_sem
from mechinterp.icl.pools import dmmse
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, sample_prompts, task_pool
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import weights_of_layer
from mechinterp.theory.linear_heads import merged_heads

TASK = TaskConfig(d_x=3, d_y=2, context_length=4, n_tasks=6, beta_var=1.0, noise_var=0.25)
POOL = task_pool(TASK)


def mixture(a: float, pool: Tensor = POOL) -> Callable[[Prompts], Tensor]:
    def predictions(prompts: Prompts) -> Tensor:
        memory = dmmse(prompts, pool=pool, noise_var=TASK.noise_var)
        return a * memory + (1 - a) * ridge(prompts, penalty=TASK.posterior_penalty)

    return predictions


@pytest.mark.parametrize("a", [-0.5, 0.0, 0.3, 0.5, 1.0, 1.7])
def test_a_mixture_gives_back_its_weight_and_relative_distance(a: float):
    found = compare_priors(mixture(a), TASK, n_prompts=200)
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

    found = compare_priors(model, TASK, context_lengths=[2, 4], n_prompts=300, seed=3).to_frame()
    prompts = sample_prompts(TASK, 300, seed=3, new_tasks=True, dtype=torch.float64)
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


@pytest.mark.slow
def test_standard_errors_are_those_of_repeated_samples():
    def model(prompts: Prompts) -> Tensor:
        return 0.8 * prompts.y.mean(1)

    runs = [compare_priors(model, TASK, n_prompts=256, seed=seed).overall for seed in range(60)]
    for name in ("distance_dmmse", "relative", "weight_dmmse", "unexplained", "risk_ridge"):
        values = np.array([getattr(run, name) for run in runs])
        sems = np.array([getattr(run, f"{name}_sem") for run in runs])
        # The spread of 60 runs is known to 1 / sqrt(2 * 59); heavier tails than the normal's are allowed for by twice that.
        ratio = values.std(0, ddof=1) / np.sqrt((sems**2).mean(0))
        assert (np.abs(np.log(ratio)) < 4 * 2 / (2 * 59) ** 0.5).all(), name


def test_a_given_pool_takes_the_place_of_the_tasks_own():
    other = task_pool(replace(TASK, task_seed=7))
    plain = replace(TASK, n_tasks=None)
    found = compare_priors(mixture(1.0, other), plain, other, n_prompts=100)
    np.testing.assert_allclose(found.at_length.relative, 0, atol=1e-12)
    own = compare_priors(mixture(1.0, other), TASK, n_prompts=100)
    assert own.overall.relative.min() > 0.5
    # New prompts are the same ones; those of the pool have its tasks, and the best predictor on them is its posterior mean.
    np.testing.assert_allclose(found.overall.risk_ridge[1], own.overall.risk_ridge[1])
    assert found.overall.risk_dmmse[0] < found.overall.risk_ridge[0] / 2


def test_strategies():
    assert compare_priors(mixture(1.0), TASK, n_prompts=500).strategy == "memorises"
    assert compare_priors(mixture(0.0), TASK, n_prompts=500).strategy == "generalises"
    assert compare_priors(mixture(0.5), TASK, n_prompts=500).strategy == "neither"
    zero = compare_priors(lambda prompts: 0 * prompts.y_query, TASK, n_prompts=500)
    assert zero.overall.unexplained[0] > 0.5
    assert zero.strategy == "neither"


@pytest.mark.slow
def test_a_model_two_percent_from_ridge_generalises_whatever_the_size_of_the_pool():
    """With 4,096 tasks dMMSE is nearer to ridge than the model, so that nearly all of its error is off their line."""
    task = replace(TASK, d_y=1, n_tasks=4096)

    def model(prompts: Prompts) -> Tensor:
        best = ridge(prompts, penalty=task.posterior_penalty)
        return best + 0.1 * prompts.x[:, 0, :1].sign()

    found = compare_priors(model, task, context_lengths=[4], n_prompts=4000)
    assert found.trimmed.risk[1] / found.trimmed.risk_ridge[1] == pytest.approx(1.02, abs=0.01)
    assert found.trimmed.unexplained[0] > 0.5
    assert found.strategy == "generalises"


def with_error_on(share: float, size: float) -> Callable[[Prompts], Tensor]:
    """dMMSE, off by `size` on the share of prompts whose first query entry is largest."""
    limit = torch.distributions.Normal(0, 1).icdf(torch.tensor(1 - share / 2)).item()

    def predictions(prompts: Prompts) -> Tensor:
        return mixture(1.0)(prompts) + size * (prompts.x_query[:, :1].abs() > limit)

    return predictions


@pytest.mark.parametrize("seed", range(4))
def test_errors_on_one_prompt_in_five_thousand_do_not_change_the_strategy(seed: int):
    model = with_error_on(1 / 5000, 1e6)
    found = compare_priors(model, TASK, context_lengths=[4], n_prompts=4000, seed=seed)
    plain = compare_priors(mixture(1.0), TASK, context_lengths=[4], n_prompts=4000, seed=seed)
    assert found.strategy == "memorises"
    # 4 of 4,000 prompts are left out; the errors lie on 0 to 4 of them.
    np.testing.assert_allclose(found.trimmed.relative, 0, atol=1e-9)
    np.testing.assert_allclose(found.trimmed.risk, found.trimmed.risk_dmmse)
    np.testing.assert_allclose(found.median_risk[1], plain.median_risk[1], rtol=0.01)
    hit = found.overall.risk[1] > 1e6
    assert hit == (found.overall.risk[1] != pytest.approx(plain.overall.risk[1]))
    assert found.carried_by_few[1] == hit
    assert len(found.sentences()) == 3 + found.carried_by_few.sum()


def test_a_strategy_that_the_worst_hundredth_decides_is_undetermined():
    model = with_error_on(1 / 200, 60.0)
    found = compare_priors(model, TASK, context_lengths=[4], n_prompts=4000)
    assert found.trimmed.unexplained[0] > 1
    assert found.strategy == "undetermined"
    assert "the worst 1%" in found.sentences()[0]
    # So many prompts are no few: a hundredth less of them leaves the answer as it is.
    many = compare_priors(with_error_on(1 / 20, 60.0), TASK, context_lengths=[4], n_prompts=4000)
    assert many.strategy == "neither"


@pytest.mark.slow
def test_standard_errors_of_trimmed_means_are_those_of_repeated_samples():
    generator = np.random.default_rng(0)

    def sample() -> pd.DataFrame:
        squares = generator.chisquare(1, (20_000, 1, 8))
        # The error of the model has no mean; distances grow with it.
        squares[..., ERROR] = generator.uniform(size=(20_000, 1)) ** -1.25
        squares[..., :2] += squares[..., [ERROR]] * [1.0, 0.5]
        return trimmed_closeness(squares, 1000)

    runs = [sample() for _ in range(300)]
    for name in ("risk", "distance_dmmse", "relative", "risk_ridge"):
        values, sems = (
            np.array([getattr(run, f"{name}{end}") for run in runs]) for end in ("", "_sem")
        )
        # The spread of 300 runs is known to 4%; the worst prompt that stays varies by 20^-1/2 / 0.8 of its size.
        assert 0.75 < values.std(ddof=1) / np.square(sems).mean() ** 0.5 < 1.35, name


@pytest.mark.parametrize(
    ("lengths", "words"), [([3], "L = 3"), ([2, 4], "mean over L = 2 to 4"), (None, "L = 1 to 4")]
)
def test_the_sentence_says_which_lengths_it_is_a_mean_over(lengths: list[int] | None, words: str):
    found = compare_priors(mixture(0.0), TASK, context_lengths=lengths, n_prompts=8)
    assert words in repr(found)
    assert words in found.sentences()[1]


def test_a_model_of_the_package_frame_and_figures():
    heads = merged_heads(2, 3, std=0.1, seed=0)
    task = replace(TASK, d_y=1)
    found = compare_priors(linear_attention(heads), task, n_prompts=64, context_lengths=[4, 1])
    frame = found.to_frame()
    assert frame[["tasks", "context_length"]].to_numpy().tolist() == [
        [kind, length] for kind in KINDS for length in (1, 4)
    ]
    names = [*with_sem(*list(PriorComparison.COLUMNS)[:8])]
    assert list(frame.columns) == ["tasks", "context_length", *names]
    assert isinstance(found.summary_frame(), pd.DataFrame)
    assert found.summary_frame()["prompts"].tolist() == ["trimmed", "trimmed", "all", "all"]
    assert np.isfinite(frame[names].to_numpy()).all()
    assert isinstance(found.plot(), go.Figure)
    assert len(found.plot().data) == 2
    assert len(found.plot_risks().data) == 6
    assert repr(found).startswith("PriorComparison(With a pool of 6 tasks the model neither ")
    # The lengths, as long as they are few, are all from 1 on.
    default = compare_priors(mixture(0.0), replace(TASK, context_length=40), n_prompts=8)
    assert len(default.context_length) == 16
    assert default.context_length[[0, -1]].tolist() == [1, 40]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mixture(0.0),), "compare_priors needs a task for a function of prompts"),
        (
            (mixture(0.0), replace(TASK, n_tasks=None)),
            "needs a pool: pass a pool, or a task with n_tasks",
        ),
        ((mixture(0.0), TASK, POOL[:, :2]), r"\[M, 3, 2\], got \[6, 2, 2\]"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        compare_priors(*arguments, n_prompts=8)


def test_lengths_and_predictions_are_checked():
    with pytest.raises(ValueError, match=r"context_lengths must be >= 1, got \[0\]"):
        compare_priors(mixture(0.0), TASK, context_lengths=[0])
    with pytest.raises(ValueError, match="The model's predictions overflow"):
        compare_priors(partial(ridge, penalty=float("nan")), TASK, n_prompts=8)


def test_dmmse_is_a_learner_of_a_task_with_a_pool():
    task = replace(TASK, d_y=1)
    memory = partial(dmmse, pool=task_pool(task), noise_var=task.noise_var)
    fits = fit_learners(memory, task, context_lengths=[4], n_prompts=500)
    assert fits.best == "dmmse"
    assert fits.r2[0, -1] == pytest.approx(1)
    assert fits.to_frame()["learner"].iloc[-1] == "dmmse"
    assert len(fits.plot().data) == len(fits.plot_distance().data) + 1 == 7
    plain = fit_learners(memory, replace(task, n_tasks=None), context_lengths=[4], n_prompts=500)
    assert len(plain.learners) == 5
    assert plain.best != "dmmse"


def test_dmmse_is_a_baseline_of_a_model_whose_task_has_a_pool():
    task = replace(TASK, d_y=1)
    weights = weights_of_layer(linear_attention(merged_heads(2, 3, std=0.1, seed=0)))
    model = ICLTransformer.from_weights(weights, task=task)
    prompts = sample_prompts(task, 300, dtype=torch.float64)
    given = replace(predictor_of(model), task=task)
    found = baselines(given, prompts)
    risk = (dmmse(prompts, pool=task_pool(task), noise_var=0.25) - prompts.y_query_clean).square()
    assert found.learners[-1] == "dMMSE"
    assert found.risk[0, -1] == pytest.approx(risk.mean().item())
    assert found.risk[0, -1] < found.risk[0, :-1].min()
    without = replace(given, task=replace(task, n_tasks=None))
    assert "dMMSE" not in baselines(without, prompts).learners
