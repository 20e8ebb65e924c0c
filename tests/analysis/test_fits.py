"""Learners beside a model: fits, baselines and the curve of the loss over the number of examples.

learners_pinned.json has the numbers of the functions that `compare_learners` replaced, on 256 prompts of seed 3."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from analyses.lib.theory.softmax import debiased_risk, vanilla_risk
from mechinterp.analysis.learners.compare import compare_learners
from mechinterp.analysis.learners.error_curve import error_curve
from mechinterp.analysis.learners.penalised import penalised
from mechinterp.analysis.learners.simple import KERNEL_PROMPTS, fitted
from mechinterp.analysis.training.monitor import Monitor
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.load import load as load_any
from mechinterp.checkpoints.modules.hooked import hook_module
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, override
from mechinterp.icl.given import PENALTIES
from mechinterp.icl.predictors import (
    debiased_gd,
    dmmse,
    nadaraya_watson,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.one_layer import kernel_head, zero_head
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import interleaved
from mechinterp.models.run.evaluation import evaluation_prompts, sample_prompts
from mechinterp.models.run.predictor import learner_of, predictions_after, predictor_of
from mechinterp.presets import preset
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import CHECKPOINTS, refused
from tests.deep_models import GPT2, random_gpt2, random_model

TASK = TaskConfig()
BAYES = TASK.noise_var / TASK.beta_variance


NAMES = ("zero", "vanilla_gd", "debiased_gd", "kernel_head", "ridge")


def at(found, n_pairs: int, learner: str = "model"):
    """Row of a learner after some pairs."""
    rows = found.rows
    return rows[(rows.n_pairs == n_pairs) & (rows.learner == learner)].iloc[0]


PINNED = json.loads(Path(__file__).with_name("learners_pinned.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PINNED)
def test_numbers_are_those_of_the_three_functions_before(name: str):
    case, checkpoint = PINNED[name], load_any(name)
    task = checkpoint.task
    prompts = draw_prompts(task, 256, seed=3, dtype=torch.float64)
    curve = error_curve(checkpoint, prompts, context_lengths=case["lengths"], task=task)
    one = compare_learners(checkpoint, prompts, task=task)
    # Models of several layers predict in float32, whose rounding differs by the order of sums on other threads.
    one_layer = checkpoint.config.model.one_attention
    near = partial(pytest.approx, rel=1e-8 if one_layer else 1e-6, abs=1e-14)
    for place, numbers in case["rows"].items():
        n_pairs, learner = place.split()
        found = one if int(n_pairs) == one.trained[1] else curve
        row = at(found, int(n_pairs), learner)
        for column, value in numbers.items():
            # Rounding is all that is left of the risk of an exact learner.
            tiny = column.startswith("risk") and value < 1e-20
            assert row[column] == near(value) or tiny, (place, column)
    means = curve.means.set_index("learner")
    for learner, (loss, sem) in case["mean_loss"].items():
        assert means.loss[learner] == near(loss)
        assert means.loss_sem[learner] == near(sem)
    assert list(curve.trained) == case["trained"]
    if case["over_best"]:
        assert [curve.over_best, curve.over_best_sem] == near(case["over_best"])
    else:
        assert np.isnan(curve.over_best)


@pytest.mark.parametrize(
    ("learner", "model", "factor"),
    [
        ("vanilla_gd", lambda prompts: vanilla_gd(prompts, eta=0.8), 0.8),
        ("debiased_gd", lambda prompts: debiased_gd(prompts, eta=0.8), 0.8),
        ("kernel_head", lambda prompts: nadaraya_watson(prompts, omega=-0.3, mu=-1.4), 1.4),
        ("ridge", lambda prompts: ridge(prompts, penalty=BAYES), np.nan),
        ("zero", lambda prompts: 0 * prompts.y_query, np.nan),
    ],
)
def test_a_learner_is_recognised_as_itself(learner, model, factor):
    asked = {"task": TASK, "learners": NAMES, "context_lengths": [10, 40], "n_prompts": 512}
    found = compare_learners(model, **asked)
    assert found.best == learner
    for n_pairs in (10, 40):
        row = at(found, n_pairs, learner)
        np.testing.assert_allclose(row.factor, factor, rtol=1e-3)
        if learner == "zero":
            assert row.loss_gap == 0
            continue
        assert row.r2 == pytest.approx(1, abs=1e-6)
        assert at(found, n_pairs, "zero").r2 == 0
    if learner == "zero":
        assert "predicts 0 on every prompt" in found.verdict
    if learner == "kernel_head":
        assert row.setting == pytest.approx(-0.3, abs=1e-3)


@pytest.mark.slow
def test_losses_meet_the_exact_risks_and_gaps_are_paired():
    setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
    found = compare_learners(
        lambda prompts: debiased_gd(prompts, eta=0.8), task=TASK, learners=NAMES, n_prompts=50_000
    )
    model, rows = at(found, 40), found.at_trained
    vanilla = rows.loc["vanilla_gd"]
    assert abs(model.loss - debiased_risk(0.8, **setting)) < 4 * model.loss_sem
    assert abs(vanilla.loss - vanilla_risk(vanilla.factor, **setting)) < 4 * vanilla.loss_sem
    expected_gap = debiased_risk(0.8, **setting) - vanilla_risk(vanilla.factor, **setting)
    assert abs(vanilla.loss_gap - expected_gap) < 4 * vanilla.loss_gap_sem
    assert vanilla.loss_gap_sem < 0.5 * model.loss_sem
    assert rows.loss_gap["debiased_gd"] == pytest.approx(0, abs=1e-6)
    assert rows.loss["zero"] == pytest.approx(1.1, abs=4 * rows.loss_sem["zero"])


def test_rounding_of_the_predictions_does_not_reach_the_standard_errors():
    model = learner_of(load(CHECKPOINTS / "softmax-h2-s0"))
    generator = torch.Generator().manual_seed(0)

    def rounded(prompts):
        found = model(prompts)
        return found * (1 + 1e-7 * torch.randn(found.shape, generator=generator))

    asked = {"task": TASK, "learners": NAMES, "context_lengths": [10, 40], "n_prompts": 1000}
    expected, *others = (compare_learners(m, **asked) for m in (model, *[rounded] * 4))
    for found in others:
        np.testing.assert_allclose(found.rows.factor_sem, expected.rows.factor_sem, rtol=1e-3)


def test_a_number_of_pairs_beyond_the_positions_of_a_model_is_refused():
    config = ExperimentConfig(
        task=TaskConfig(d_x=2, context_length=6),
        model=ModelConfig(n_layers=2, n_heads=1, d_model=4, n_positions=51, layout="in_turn"),
    )
    model = ICLTransformer.from_weights(initial_deep_weights(config), task=config.task)
    with refused("context_length", 25):  # 50 tokens before the query are 25 pairs
        compare_learners(model, context_lengths=[30], n_prompts=64)


def test_a_causal_model_is_fitted_at_all_lengths_from_one_run():
    """The numbers are those of a function that is run length by length on the same prompts."""
    task = TaskConfig(d_x=4, context_length=8)
    model = random_model(2, 2, **GPT2)
    drawn = draw_prompts(task, 64, seed=0, dtype=torch.float64)
    assert predictor_of(model).predict_at_every(drawn) is not None
    found = compare_learners(model, drawn, context_lengths=[3, 8], task=task)
    assert found.one_pass
    alone = compare_learners(
        torch.no_grad()(lambda prompts: model.predict(prompts)),
        drawn,
        context_lengths=[3, 8],
        task=task,
    )
    assert not alone.one_pass
    for name in ("factor", "r2", "loss", "loss_gap", "r2_sem", "factor_sem"):
        one, other = found.rows[name], alone.rows[name]
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9, err_msg=name)


def test_prompts_are_those_of_every_analysis_and_shorter_ones_their_first_pairs():
    """The same loss as by hand on `sample_prompts` of the model, whatever the other lengths are."""
    checkpoint = load_any("softmax-h2-s0")
    prompts = sample_prompts(checkpoint, 256)
    for n_pairs in (20, 40):
        cut = prompts.prefix(n_pairs)
        expected = (predictor_of(checkpoint).predict(cut) - cut.y_query).square().mean().item()
        for lengths in ([n_pairs], [10, n_pairs]):
            found = compare_learners(
                checkpoint, learners=["zero"], context_lengths=lengths, n_prompts=256
            )
            assert at(found, n_pairs).loss == pytest.approx(expected, rel=1e-6)
            given = compare_learners(
                checkpoint, prompts, learners=["zero"], context_lengths=lengths
            )
            assert at(given, n_pairs).loss == pytest.approx(expected, rel=1e-6)


def test_a_tie_is_said_to_be_one():
    found = compare_learners(kernel_head(0.5, 1.5, d_x=5), learners=NAMES, n_prompts=512)
    mu = re.match(r"Closest to kernel_head, mu = ([\d.]+) ± ", found.verdict)
    assert float(mu[1]) == pytest.approx(1.5, abs=1e-4)
    second = found.nearest.iloc[1]
    assert second.lead > 5 * second.lead_sem
    for lead, tie in ((0.019, True), (0.021, False)):
        rows = found.rows.assign(lead=lead, lead_sem=0.01)
        assert ("not significant" in replace(found, rows=rows).verdict) == tie


def test_a_function_with_a_path_is_fitted_by_its_last_prediction():
    def path(prompts):
        return torch.stack([zero_prediction(prompts), ridge(prompts, penalty=0.5)])

    found = compare_learners(path, task=TaskConfig(), n_prompts=256)
    assert found.best == "ridge"
    assert found.at_trained.r2["ridge"] == pytest.approx(1, abs=1e-9)
    with refused("task"):
        compare_learners(path)


class Counted(nn.Module):
    """A plain encoder layer that notes how many prompts come at once, in all its copies."""

    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(6, 16), layer, nn.Linear(16, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(tokens))
        return self.layers(tokens)[:, -1]


def test_a_module_predicts_each_prompt_once_and_few_at_a_time():
    hooked = hook_module(Counted(), task=TASK)
    Counted.sizes.clear()
    compare_learners(hooked, learners=NAMES, context_lengths=[10, 40], n_prompts=1000)
    assert sum(Counted.sizes) <= 2 * 1000 + 16  # a few more to follow the module
    assert max(Counted.sizes) <= 256


SPARSE = TaskConfig(d_x=8, context_length=12, sparsity=2, nonzeros="signs", noise_var=0.3)


def zero_model(task: TaskConfig) -> ICLTransformer:
    return ICLTransformer.from_weights(zero_head(d_x=task.d_x), task=task).double()


def sampled_on(task: TaskConfig, n_prompts: int = 200):
    return draw_prompts(task, n_prompts, dtype=torch.float64)


def test_a_model_that_predicts_0_is_once_as_bad_as_predicting_0():
    prompts = sampled_on(SPARSE)
    found = compare_learners(zero_model(SPARSE), prompts)
    row = found.at_trained.loc["zero"]
    assert (row.ratio, row.ratio_sem) == (1.0, 0.0)
    assert found.at_trained.risk["model"] == pytest.approx(
        prompts.y_query_clean.square().mean().item(), rel=1e-9
    )


def test_each_learner_has_the_setting_that_is_best_on_the_prompts():
    prompts = sampled_on(SPARSE)
    rows = compare_learners(zero_model(SPARSE), prompts).at_trained

    def risks(predictions: torch.Tensor) -> np.ndarray:
        return (predictions - prompts.y_query_clean).square().mean((-2, -1)).numpy()

    by_penalty = risks(torch.stack([ridge(prompts, penalty=p) for p in PENALTIES]))
    by_step = risks(preprocess_then_optimise(prompts, steps=128))
    assert 0 < by_penalty.argmin() < len(PENALTIES) - 1
    assert rows.setting["best_ridge"] == PENALTIES[by_penalty.argmin()]
    assert rows.setting["algorithm_1"] == by_step.argmin()
    assert rows.risk[["least_squares", "best_ridge", "algorithm_1"]].tolist() == pytest.approx(
        [by_penalty[0], by_penalty.min(), by_step.min()], rel=1e-9
    )
    assert rows.ratio["best_ridge"] == pytest.approx(
        rows.risk["model"] / by_penalty.min(), rel=1e-9
    )
    assert rows.setting[["zero", "least_squares"]].isna().all()


def test_no_ratio_is_formed_to_a_learner_that_makes_no_error():
    exact = TaskConfig(d_x=3, context_length=12, noise_var=0.0)
    model = zero_model(exact)
    prompts = sampled_on(exact)
    rows = compare_learners(model, prompts, task=exact).at_trained
    gone = rows.index[rows.ratio.isna()]
    assert set(gone) == {"model", "ridge", "least_squares", "best_ridge"}
    assert rows.setting["best_ridge"] == 0
    curve = error_curve(model, prompts, task=exact, context_lengths=[12])
    assert np.isnan(curve.over_best)
    assert "times" not in curve.headline


def test_a_function_of_prompts_is_a_source():
    """The last of its predictions counts, where it gives one after every layer."""
    task = TaskConfig(d_x=3)
    prompts = draw_prompts(task, 64, seed=0, dtype=torch.float64)

    def path(prompts):
        return torch.stack([prompts.y_query_clean + 5, ridge(prompts, penalty=1.0)])

    found = compare_learners(path, prompts)
    error = (ridge(prompts, penalty=1.0) - prompts.y_query_clean).square().mean()
    assert found.at_trained.risk["model"] == pytest.approx(error.item(), rel=1e-12)
    assert compare_learners(path, task=task, n_prompts=64).at_trained.risk["model"] > 0
    for model in (path, random_gpt2()):
        with refused("compare_learners", "task"):
            compare_learners(model)
    for learners in ([], "ridge", ["ols"]):
        with refused("learners", "least_squares"):
            compare_learners(path, prompts, learners=learners)


def test_prompts_are_enough_for_a_model_without_a_task():
    model = random_gpt2()
    prompts = sampled_on(TaskConfig(d_x=4, context_length=8))
    error = (model.predict(prompts) - prompts.y_query_clean).square().mean()
    found = compare_learners(model, prompts).at_trained
    assert found.risk["model"] == pytest.approx(error.item(), rel=1e-12)


def test_without_a_law_the_penalty_of_ridge_is_cross_validated_at_each_length():
    task = TaskConfig(d_x=4, context_length=12, noise_var=1.0)
    prompts = draw_prompts(task, 400, seed=5, dtype=torch.float64)
    found = compare_learners(zero_prediction, prompts, context_lengths=[4, 12])
    for n_pairs in (4, 12):
        cut = prompts.prefix(n_pairs)
        every = torch.stack([ridge(cut, penalty=each) for each in PENALTIES])
        losses = (every - cut.y_query).square().mean(2).numpy()
        # Each fifth of the prompts (every fifth one) has the penalty that is best on the others.
        own = [
            losses[np.delete(losses, np.s_[fold::5], 1).mean(1).argmin(), fold::5]
            for fold in range(5)
        ]
        row = at(found, n_pairs, "ridge")
        assert row.loss == pytest.approx(np.concatenate(own).mean(), rel=1e-9)
        assert row.setting == PENALTIES[losses.mean(1).argmin()]
    assert any("cross-validation" in note for note in found.notes)
    lawful = compare_learners(zero_prediction, prompts, task=task)
    assert lawful.at_trained.setting["ridge"] == task.posterior_penalty
    assert lawful.notes == ()


def test_a_stated_law_stays_in_force_for_given_prompts():
    """Five draws give one ratio within its errors; with the law dropped the answer says so."""
    module = OfXsAndYs().eval()
    task = replace(SIX_PAIRS, n_tasks=None)
    hooked = hook_module(module, task=task)
    for seed in range(5):
        prompts = sample_prompts(task, 256, seed=seed)
        curve = error_curve(hooked, prompts)
        assert at(curve, 6, "ridge").setting == task.posterior_penalty
        stated = error_curve(hooked, prompts, task=task)
        assert (curve.over_best, curve.notes) == (stated.over_best, ())
    dropped = error_curve(hooked, prompts, task="unknown")
    assert any("cross-validation" in note for note in dropped.notes)
    assert at(dropped, 6, "ridge").setting in PENALTIES


@pytest.mark.slow
def test_means_that_do_not_exist_are_marked_and_have_medians():
    """Least squares at as many pairs as coordinates: its mean does not exist, its median does."""
    task = TaskConfig(d_x=8, context_length=12, noise_var=0.3)
    medians = []
    for seed in range(6):
        curve = error_curve(
            zero_prediction, task=task, context_lengths=[8, 12], n_prompts=2000, seed=seed
        )
        row = at(curve, 8, "least_squares")
        assert row.carried_by_few
        assert not at(curve, 8, "ridge").carried_by_few
        prompts = sample_prompts(task, 2000, seed=seed, dtype=torch.float64).prefix(8)
        errors = (ridge(prompts, penalty=0) - prompts.y_query).square().numpy()
        assert row.median_loss == pytest.approx(np.median(errors), rel=1e-9)
        medians.append(row.median_loss)
        assert any("least_squares" in sentence for sentence in curve.few)
    # The median of 2,000 is known to about 5%.
    assert max(medians) < 1.3 * min(medians)


def test_a_ratio_that_is_not_known_to_a_fifth_is_no_headline():
    task = TaskConfig(d_x=3, context_length=6)

    def wild(prompts: Prompts) -> Tensor:
        return 100 * (prompts.x_query[:, :1] > 2.5)

    curve = error_curve(wild, task=task, context_lengths=[6], n_prompts=256)
    assert curve.over_best_sem > 0.2 * curve.over_best
    assert "times" not in curve.headline
    found = compare_learners(wild, task=task, n_prompts=256)
    assert found.at_trained.risk["model"] > 0
    assert "times" not in found.risks


def test_lengths_that_overflow_are_rows_with_a_note():
    task = TaskConfig(d_x=3, context_length=6)

    def overflows(prompts: Prompts) -> Tensor:
        factor = 1e30 if prompts.x.shape[1] < 3 else 1.0
        return factor * ridge(prompts, penalty=task.posterior_penalty)

    asked = {"task": task, "n_prompts": 64}
    curve = error_curve(overflows, context_lengths=[1, 2, 3, 6], **asked)
    assert curve.trained == (3, 6)
    assert curve.over_best == pytest.approx(1, abs=1e-9)
    for n_pairs in (1, 2):
        assert np.isnan(at(curve, n_pairs).loss)
        assert at(curve, n_pairs).note
        assert at(curve, n_pairs, "ridge").loss > 0
    assert not at(curve, 3).note
    assert any("1, 2" in note for note in curve.notes)
    assert np.isnan(compare_learners(overflows, context_lengths=[2, 6], **asked).rows.r2[1])
    for lengths in ([1], [1, 2]):
        with refused("overflow"):
            error_curve(overflows, context_lengths=lengths, **asked)


def test_means_are_over_other_lengths_if_the_trained_ones_overflow():
    task = TaskConfig(d_x=3, context_length=6)

    def overflows(prompts: Prompts) -> Tensor:
        factor = 1e30 if prompts.x.shape[1] > 3 else 1.0
        return factor * ridge(prompts, penalty=task.posterior_penalty)

    overflows.shortest_trained = 6
    asked = {"task": task, "n_prompts": 64}
    curve = error_curve(overflows, context_lengths=[1, 3, 6], **asked)
    assert curve.trained == (3, 3)
    assert curve.over_best == pytest.approx(1, abs=1e-9)
    alone = error_curve(overflows, context_lengths=[3], **asked)
    np.testing.assert_allclose(curve.means.loss, alone.means.loss, rtol=1e-12)


@pytest.mark.slow
def test_a_curve_starts_at_the_shortest_trained_length_and_no_pairs_are_no_division_by_0():
    sparse = load_any("sparse-h4-noise0.1-s0")
    curve = error_curve(sparse, n_prompts=64)
    assert curve.rows.n_pairs.min() == sparse.shortest_trained == 8
    assert curve.rows.n_pairs.max() == 40
    assert len(set(curve.rows.n_pairs)) == 16
    for name in ("sparse-h4-noise0.1-s0", "linear-merged-s0"):
        checkpoint = load_any(name)
        none = sample_prompts(checkpoint, 8).prefix(0)
        found = predictor_of(checkpoint).predict(none)
        assert found.isfinite().all()
        hooked = predictor_of(checkpoint.model).predict(none)
        torch.testing.assert_close(found, hooked, rtol=1e-4, atol=1e-5)
    # linear attention without pairs adds nothing to the stream, which has no y
    assert not found.any()
    trained_on_one = error_curve(load_any("softmax-h2-s0"), n_prompts=16)
    assert trained_on_one.rows.n_pairs.min() == 1
    assert trained_on_one.trained == (40, 40)


def test_prompts_with_a_mean_are_compared_with_an_intercept():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 13, 3)) + 4
    y = x @ [1.0, -2.0, 0.5] + 7 + 0.3 * generator.normal(size=(200, 13))
    prompts = Prompts.from_arrays(x[:, :-1], y[:, :-1], x[:, -1], y[:, -1])
    found = compare_learners(zero_prediction, prompts)
    rows = found.at_trained
    assert any("intercept" in note for note in found.notes)
    by_hand = []
    for one in range(200):
        columns = np.column_stack([x[one, :-1], np.ones(12)])
        weights = np.linalg.lstsq(columns, y[one, :-1], rcond=None)[0]
        by_hand.append((y[one, -1] - x[one, -1] @ weights[:-1] - weights[-1]) ** 2)
    own = rows.loc["least_squares_with_intercept"]
    assert own.loss == pytest.approx(np.mean(by_hand), rel=1e-9)
    assert own.loss < 0.5 * rows.loss["ridge"]
    assert rows.loss["ridge_with_intercept"] < 0.5 * rows.loss["ridge"]
    assert error_curve(zero_prediction, prompts, context_lengths=[12]).best == (
        "ridge_with_intercept"
    )
    centred = Prompts.from_arrays(x[:, :-1] - 4, y[:, :-1] - 5, x[:, -1] - 4, y[:, -1] - 5)
    plain = compare_learners(zero_prediction, centred)
    assert "ridge_with_intercept" not in plain.learners
    penalty = rows.setting["ridge_with_intercept"]
    inner = draw_prompts(TaskConfig(d_x=3), 8, dtype=torch.float64)
    shift = replace(inner, x=inner.x + 3, x_query=inner.x_query + 3, y=inner.y - 2)
    moved, still = (penalised(each, [penalty], intercept=True) for each in (shift, inner))
    torch.testing.assert_close(moved, still - 2)


SIX_PAIRS = TaskConfig(d_x=3, context_length=6, noise_var=0.25, n_tasks=5)
POOL_GPT2 = override(preset("pool-gpt2"), "model.n_layers=2", "task.context_length=6")


@pytest.mark.parametrize(("noise_var", "d_y"), [(0.25, 1), (0.0, 2)])
def test_without_pairs_ridge_predicts_0_and_dmmse_the_mean_of_the_pool(noise_var: float, d_y: int):
    task = replace(SIX_PAIRS, noise_var=noise_var, d_y=d_y, supports=None)
    prompts, pool = draw_prompts(task, 16, dtype=torch.float64).prefix(0), task.pool()
    for penalty in (0.5, 0.0):
        assert not ridge(prompts, penalty=penalty).any()
    found = dmmse(prompts, pool=pool, noise_var=noise_var)
    torch.testing.assert_close(found, prompts.x_query @ pool.mean(0))


def weights_of_two_layers(**settings: object):
    named = (f"model.{name}={value}" for name, value in settings.items())
    config = override(POOL_GPT2, "train.loss=query", *named)
    return initial_deep_weights(config).to(torch.float64)


def test_one_pass_of_a_causal_model_gives_the_predictions_of_the_cut_prompts():
    weights = weights_of_two_layers()
    prompts = draw_prompts(POOL_GPT2.task, 32, dtype=torch.float64)
    expected = torch.stack([predictor_of(weights).predict(prompts.prefix(k)) for k in range(7)], 1)
    for source in (weights, ICLTransformer.from_weights(weights, task=POOL_GPT2.task)):
        assert predictor_of(source).predict_at_every(prompts) is not None
        one_pass = predictions_after(source, prompts, range(7))
        torch.testing.assert_close(one_pass, expected, rtol=1e-9, atol=1e-12)


class InTurn(nn.Module):
    """An encoder of tokens in turn, whose positions see each other; causal if it is told to be."""

    def __init__(self, causal: bool):
        super().__init__()
        torch.manual_seed(0)
        self.read_in, self.causal = nn.Linear(3, 8), causal
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.read_out = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        stream = self.layer(self.read_in(tokens), src_mask=mask if self.causal else None)
        return self.read_out(stream)[:, ::2, 0]  # [batch, n], one number for every x


class OfOneLength(InTurn):
    """A module that takes prompts of six pairs and no others."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] == 13
        return super().forward(tokens)


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_that_predicts_at_every_x_is_read_there_if_it_is_causal(causal: bool):
    hooked = hook_module(InTurn(causal), embed=interleaved, task=SIX_PAIRS)
    prompts = draw_prompts(SIX_PAIRS, 16)
    curve = error_curve(hooked, prompts, task=SIX_PAIRS)
    assert curve.one_pass == causal
    lengths = list(range(1, 7))
    with torch.no_grad():
        cut = [hooked.predict(prompts.prefix(length)) for length in lengths]
    errors = [(each - prompts.prefix(k).y_query) for k, each in zip(lengths, cut, strict=True)]
    expected = [error.square().mean().item() for error in errors]
    assert [at(curve, k).loss for k in lengths] == pytest.approx(expected, rel=1e-5)
    one = hook_module(OfOneLength(causal), embed=interleaved, task=SIX_PAIRS)
    at_end = error_curve(one, prompts, task=SIX_PAIRS, context_lengths=[6])
    assert at(at_end, 6).loss == pytest.approx(expected[-1], rel=1e-5)


class OfXsAndYs(nn.Module):
    """The signature and the layout of public code: `model(xs, ys)` gives [batch, n]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 14, "use_cache": False}
        self._read_in, self._read_out = nn.Linear(3, 16), nn.Linear(16, 1)
        self._backbone = GPT2Model(GPT2Config(**sizes))

    def forward(self, xs: Tensor, ys: Tensor) -> Tensor:
        wide = torch.cat([ys[..., None], torch.zeros(*ys.shape, 2)], dim=2)
        tokens = torch.stack([xs, wide], dim=2).flatten(1, 2)
        stream = self._backbone(inputs_embeds=self._read_in(tokens)).last_hidden_state
        return self._read_out(stream)[:, ::2, 0]


def test_a_module_of_xs_and_ys_is_read_at_every_x_and_monitored():
    module = OfXsAndYs().eval()
    prompts = draw_prompts(SIX_PAIRS, 64)
    curve = error_curve(hook_module(module, task=SIX_PAIRS), prompts, task=SIX_PAIRS)
    with torch.no_grad():
        own = module(prompts.every_x, prompts.y_of_every_x[..., 0])
    expected = (own - prompts.y_of_every_x[..., 0]).square().mean(0)
    assert curve.one_pass
    assert [at(curve, k).loss for k in range(7)] == pytest.approx(expected.tolist(), rel=1e-5)
    rows = []
    monitor = Monitor(task=SIX_PAIRS, every=1, n_prompts=32, ablation=False, log=rows.append)
    monitor(0, module)
    prompts = evaluation_prompts(hook_module(module, task=SIX_PAIRS), n_prompts=32)
    with torch.no_grad():
        own = module(prompts.every_x, prompts.y_of_every_x[..., 0])
    expected = (own - prompts.y_of_every_x[..., 0]).square().mean(0).tolist()
    assert [rows[0][f"icl/loss_at_{k}"] for k in range(7)] == pytest.approx(expected, rel=1e-5)
    assert monitor.run().history["eval_loss_at_3"].iloc[0] == pytest.approx(expected[3], rel=1e-5)
    assert rows[0]["icl/loss"] == pytest.approx(expected[-1], rel=1e-5)


def test_models_that_look_back_and_models_of_pairs_run_once_per_length():
    # Each position of a context-only model sees all pairs, so that its output there is not that of the cut prompt.
    for settings in ({"context_only": "true"}, {"layout": "pairs"}):
        weights = weights_of_two_layers(**settings)
        prompts = draw_prompts(POOL_GPT2.task, 8, dtype=torch.float64)
        assert predictor_of(weights).predict_at_every(prompts) is None
        curve = error_curve(weights, prompts, task=POOL_GPT2.task, context_lengths=[2, 6])
        errors = predictor_of(weights).predict(prompts.prefix(2)) - prompts.prefix(2).y_query
        assert at(curve, 2).loss == pytest.approx(errors.square().mean().item(), rel=1e-9)


def test_the_bayes_predictor_has_ratio_1_and_zero_the_variance_of_y():
    task = replace(SIX_PAIRS, n_tasks=None, beta_var=2.0)
    curve = error_curve(partial(ridge, penalty=task.posterior_penalty), task=task, n_prompts=5000)
    assert curve.over_best == pytest.approx(1, abs=1e-9)
    zero = curve.rows[curve.rows.learner == "zero"]
    expected = task.d_x * 2.0 + 0.25
    assert (zero.loss - expected).abs().max() < 5 * zero.loss_sem.max()
    # Gaussian x and beta: the posterior variance after k pairs, averaged over x, by simulation of x alone.
    x = torch.randn(50_000, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    precision = x[:, :4].mT @ x[:, :4] / 0.25 + torch.eye(3, dtype=torch.float64) / 2.0
    variance = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2).sum(1).mean().item()
    own = at(curve, 4, "ridge")
    assert abs(own.risk - variance) < 5 * own.risk_sem


def test_dmmse_is_best_on_the_pool_and_the_frame_has_every_learner_and_length():
    def posterior(prompts: Prompts) -> Tensor:
        return dmmse(prompts, pool=SIX_PAIRS.pool(), noise_var=0.25)

    curve = error_curve(posterior, task=SIX_PAIRS, context_lengths=[0, 3, 6], n_prompts=256)
    assert (curve.best, curve.over_best) == ("dmmse", pytest.approx(1, abs=1e-12))
    frame = curve.to_frame()
    assert len(frame) == 5 * 3
    frame["loss"] = 0.0
    assert curve.rows.loss.all()  # a copy
    prompts = sample_prompts(SIX_PAIRS, 8)
    for lengths in ([7], [-1, 2], []):
        with refused("lengths", "0 to 6"):
            error_curve(zero_prediction, prompts, task=SIX_PAIRS, context_lengths=lengths)


def test_the_error_of_a_kernel_heads_mu_is_that_by_automatic_derivatives():
    """omega and mu minimise a mean over prompts: its covariance is H^-1 (sum_i psi_i psi_i^T) H^-1 / n^2."""
    task, n_prompts = TaskConfig(d_x=3, context_length=12), 400
    assert n_prompts <= KERNEL_PROMPTS
    prompts = draw_prompts(task, n_prompts, seed=0, dtype=torch.float64)
    noise = torch.randn(n_prompts, 1, generator=generator_for(0, "eval", 1), dtype=torch.float64)
    model = nadaraya_watson(prompts, omega=0.5, mu=1.5) + 0.3 * noise
    found = fitted("kernel_head", prompts, task, model.numpy())
    assert found.setting > 0

    def errors(at: torch.Tensor) -> torch.Tensor:
        shape = nadaraya_watson(prompts, omega=at[0].expand(3), mu=1.0)
        return (model - at[1] * shape).square().mean(1)

    at = torch.tensor([found.setting, found.factor], dtype=torch.float64)
    psi = torch.autograd.functional.jacobian(errors, at)
    H = torch.autograd.functional.hessian(lambda at: errors(at).mean(), at)
    influence = (psi @ torch.linalg.inv(H))[:, 1]
    # omega is searched to 1e-4 of about 0.5, and derivatives by differences have errors below 1e-3.
    expected = influence.std().item() / n_prompts**0.5
    assert found.factor_sem == pytest.approx(expected, rel=5e-3)
    fixed = (psi[:, 1] / H[1, 1]).std().item() / n_prompts**0.5
    assert abs(fixed / expected - 1) > 0.02  # omega counts
