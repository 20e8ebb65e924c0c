"""Learners beside a model: fits, baselines and the curve of the loss over the number of examples."""

import re
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from analyses.lib.theory.softmax import debiased_risk, vanilla_risk
from mechinterp.analysis.learners.compare import (
    FITTED,
    PENALTIES,
    baselines,
    fit_learners,
)
from mechinterp.analysis.learners.error_curve import error_curve
from mechinterp.analysis.training.monitor import Monitor
from mechinterp.checkpoints.checkpoint import load
from mechinterp.checkpoints.plain_modules import hook_module
from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, override
from mechinterp.icl.predictors import (
    debiased_gd,
    dmmse,
    nadaraya_watson,
    ridge,
    vanilla_gd,
    zero_prediction,
)
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.icl.sparse_predictors import preprocess_then_optimise
from mechinterp.models.constructions.one_layer import kernel_head, zero_head
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.layers import interleaved
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import learner_of, predictions_after, predictor_of
from mechinterp.presets import preset
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import CHECKPOINTS, refused
from tests.deep_models import GPT2, random_gpt2, random_model

TASK = TaskConfig()
BAYES = TASK.noise_var / TASK.beta_variance


def column(learner: str) -> int:
    return FITTED.index(learner)


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
    fits = fit_learners(model, TASK, context_lengths=[10, 40], n_prompts=512)
    assert fits.best == learner
    np.testing.assert_allclose(fits.factor[:, column(learner)], factor, rtol=1e-3)
    np.testing.assert_allclose(fits.rms[:, column(learner)], 0, atol=1e-4)
    if learner == "zero":
        assert "predicts 0 on every prompt" in fits.verdict
    else:
        np.testing.assert_allclose(fits.r2[:, column(learner)], 1, atol=1e-6)
        assert not fits.r2[:, column("zero")].any()
    if learner == "kernel_head":
        np.testing.assert_allclose(fits.kernel_omega, -0.3, atol=1e-3)


@pytest.mark.slow
def test_losses_meet_the_exact_risks_and_gaps_are_paired():
    setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
    fits = fit_learners(
        lambda prompts: debiased_gd(prompts, eta=0.8), TASK, context_lengths=[40], n_prompts=50_000
    )
    debiased, vanilla = column("debiased_gd"), column("vanilla_gd")
    assert abs(fits.model_loss[0] - debiased_risk(0.8, **setting)) < 4 * fits.model_loss_sem[0]
    eta = fits.factor[0, vanilla]
    assert abs(fits.loss[0, vanilla] - vanilla_risk(eta, **setting)) < 4 * fits.loss_sem[0, vanilla]
    expected_gap = debiased_risk(0.8, **setting) - vanilla_risk(eta, **setting)
    assert abs(fits.loss_gap[0, vanilla] - expected_gap) < 4 * fits.loss_gap_sem[0, vanilla]
    assert fits.loss_gap_sem[0, vanilla] < 0.5 * fits.model_loss_sem[0]
    assert fits.loss_gap[0, debiased] == pytest.approx(0, abs=1e-6)
    assert fits.loss[0, column("zero")] == pytest.approx(
        1.1, abs=4 * fits.loss_sem[0, column("zero")]
    )


def test_rounding_of_the_predictions_does_not_reach_the_standard_errors():
    model = learner_of(load(CHECKPOINTS / "softmax-h2-s0"))
    generator = torch.Generator().manual_seed(0)

    def rounded(prompts):
        found = model(prompts)
        return found * (1 + 1e-7 * torch.randn(found.shape, generator=generator))

    asked = {"context_lengths": [10, 40], "n_prompts": 1000}
    expected, *others = (fit_learners(m, TASK, **asked) for m in (model, *[rounded] * 4))
    for found in others:
        np.testing.assert_allclose(found.factor_sem, expected.factor_sem, rtol=1e-3)


def test_without_lengths_a_model_takes_those_that_it_has_positions_for():
    config = ExperimentConfig(
        task=TaskConfig(d_x=2, context_length=6),
        model=ModelConfig(n_layers=2, n_heads=1, d_model=4, n_positions=51, layout="in_turn"),
    )
    model = ICLTransformer.from_weights(initial_deep_weights(config), task=config.task)
    fits = fit_learners(model, config.task, n_prompts=64)
    assert fits.context_length.tolist() == [6, 10, 20]  # 50 tokens before the query are 25 pairs
    with refused("context_length", 25):
        fit_learners(model, config.task, context_lengths=[30], n_prompts=64)


def test_a_causal_model_is_fitted_at_all_lengths_from_one_run():
    """The numbers are those of a function that is run length by length on the same prompts."""
    task = TaskConfig(d_x=4, context_length=8)
    model = random_model(2, 2, **GPT2)
    drawn = draw_prompts(task, 64, seed=0, dtype=torch.float64)
    predictor = predictor_of(model)
    assert predictor.predict_at_every(drawn) is not None
    found = fit_learners(model, context_lengths=[3], prompts=drawn, task=task)
    for row, length in enumerate((3, 8)):
        alone = fit_learners(
            torch.no_grad()(lambda prompts: model.predict(prompts)),
            context_lengths=[],
            prompts=drawn.prefix(length),
            task=replace(task, context_length=length),
        )
        for name in ("factor", "r2", "rms", "loss", "loss_gap", "r2_sem", "factor_sem"):
            one, other = getattr(found, name)[row], getattr(alone, name)[0]
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9, err_msg=name)


def test_the_trained_length_is_added_and_a_tie_is_said_to_be_one():
    fits = fit_learners(kernel_head(0.5, 1.5, d_x=5), context_lengths=[20], n_prompts=512)
    assert fits.context_length.tolist() == [20, 40]
    mu = re.match(r"Closest to kernel_head, mu = ([\d.]+) ± ", fits.verdict)
    assert float(mu[1]) == pytest.approx(1.5, abs=1e-4)
    assert fits.lead[1] > 5 * fits.lead_sem[1]
    for lead, tie in ((0.019, True), (0.021, False)):
        found = replace(fits, lead=np.full(2, lead), lead_sem=np.full(2, 0.01)).verdict
        assert ("not significant" in found) == tie
    row = fits.to_frame().query("context_length == 40 and learner == 'ridge'").iloc[0]
    assert (row["rms"], row["model_loss"]) == (fits.rms[1, column("ridge")], fits.model_loss[1])


def test_a_function_with_a_path_is_fitted_by_its_last_prediction():
    def path(prompts):
        return torch.stack([zero_prediction(prompts), ridge(prompts, penalty=0.5)])

    found = fit_learners(path, TaskConfig(), context_lengths=[20], n_prompts=256)
    assert found.best == "ridge"
    np.testing.assert_allclose(found.rms[found.context_length == 40, 4], 0, atol=1e-6)
    with refused("task"):
        fit_learners(path)


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
    fit_learners(hooked, context_lengths=[10, 40], n_prompts=1000)
    assert sum(Counted.sizes) <= 2 * 1000 + 16  # a few more to follow the module
    assert max(Counted.sizes) <= 256


SPARSE = TaskConfig(d_x=8, context_length=12, sparsity=2, nonzeros="signs", noise_var=0.3)


def zero_model(task: TaskConfig) -> ICLTransformer:
    return ICLTransformer.from_weights(zero_head(d_x=task.d_x), task=task).double()


def sampled_on(task: TaskConfig, n_prompts: int = 200):
    return draw_prompts(task, n_prompts, dtype=torch.float64)


def test_a_model_that_predicts_0_is_once_as_bad_as_predicting_0():
    prompts = sampled_on(SPARSE)
    found = baselines(zero_model(SPARSE), prompts)
    assert found.learners == ("zero", "least squares", "ridge", "GD", "Algorithm 1")
    assert (found.ratio[0, 0], found.ratio_sem[0, 0]) == (1.0, 0.0)
    assert found.model_risk[0] == pytest.approx(
        prompts.y_query_clean.square().mean().item(), rel=1e-9
    )


def test_each_learner_has_the_setting_that_is_best_on_the_prompts():
    prompts = sampled_on(SPARSE)
    found = baselines(zero_model(SPARSE), prompts)

    def risks(predictions: torch.Tensor) -> np.ndarray:
        return (predictions - prompts.y_query_clean).square().mean((-2, -1)).numpy()

    by_penalty = risks(torch.stack([ridge(prompts, penalty=p) for p in PENALTIES]))
    by_step = risks(preprocess_then_optimise(prompts, steps=128))
    assert 0 < by_penalty.argmin() < len(PENALTIES) - 1
    assert found.tuned[0, 2] == PENALTIES[by_penalty.argmin()]
    assert found.tuned[0, 4] == by_step.argmin()
    assert found.risk[0, [1, 2, 4]] == pytest.approx(
        [by_penalty[0], by_penalty.min(), by_step.min()], rel=1e-9
    )
    assert found.ratio[0, 2] == pytest.approx(found.model_risk[0] / by_penalty.min(), rel=1e-9)
    assert np.isnan(found.tuned[0, :2]).all()


def test_no_ratio_is_formed_to_a_learner_that_makes_no_error():
    exact = TaskConfig(d_x=3, context_length=12, noise_var=0.0)
    found = baselines(zero_model(exact), sampled_on(exact))
    assert np.isnan(found.ratio[0]).tolist() == [False, True, True, False, False]
    assert found.tuned[0, 2] == 0


def test_a_function_of_prompts_is_a_source():
    """The last of its predictions counts, where it gives one after every layer."""
    task = TaskConfig(d_x=3)
    prompts = draw_prompts(task, 64, seed=0, dtype=torch.float64)

    def path(prompts):
        return torch.stack([prompts.y_query_clean + 5, ridge(prompts, penalty=1.0)])

    found = baselines(path, prompts)
    error = (ridge(prompts, penalty=1.0) - prompts.y_query_clean).square().mean()
    assert found.model_risk[0] == pytest.approx(error.item(), rel=1e-12)
    assert baselines(path, task=task, n_prompts=64).model_risk[0] > 0
    for model in (path, random_gpt2()):
        with refused("baselines", "task"):
            baselines(model)


def test_prompts_are_enough_for_a_model_without_a_task():
    model = random_gpt2()
    prompts = sampled_on(TaskConfig(d_x=4, context_length=8))
    error = (model.predict(prompts) - prompts.y_query_clean).square().mean()
    assert baselines(model, prompts).model_risk[0] == pytest.approx(error.item(), rel=1e-12)


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
    assert curve.loss[0][-6:] == pytest.approx(expected, rel=1e-5)
    one = hook_module(OfOneLength(causal), embed=interleaved, task=SIX_PAIRS)
    at_end = error_curve(one, prompts, task=SIX_PAIRS, lengths=[6]).loss[0, 0]
    assert at_end == pytest.approx(expected[-1], rel=1e-5)


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
    assert curve.loss[0] == pytest.approx(expected.tolist(), rel=1e-5)
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
        curve = error_curve(weights, prompts, task=POOL_GPT2.task, lengths=[2, 6])
        errors = predictor_of(weights).predict(prompts.prefix(2)) - prompts.prefix(2).y_query
        assert curve.loss[0, 0] == pytest.approx(errors.square().mean().item(), rel=1e-9)


def test_the_bayes_predictor_has_ratio_1_and_zero_the_variance_of_y():
    task = replace(SIX_PAIRS, n_tasks=None, beta_var=2.0)
    curve = error_curve(partial(ridge, penalty=task.posterior_penalty), task=task, n_prompts=5000)
    assert curve.over_best == pytest.approx(1, abs=1e-9)
    zero = curve.learners.index("zero")
    expected = task.d_x * 2.0 + 0.25
    assert np.abs(curve.loss[zero] - expected).max() < 5 * curve.loss_sem[zero].max()
    # Gaussian x and beta: the posterior variance after k pairs, averaged over x, by simulation of x alone.
    x = torch.randn(50_000, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    precision = x[:, :4].mT @ x[:, :4] / 0.25 + torch.eye(3, dtype=torch.float64) / 2.0
    variance = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2).sum(1).mean().item()
    at = curve.n_pairs.tolist().index(4)
    own = curve.learners.index("ridge")
    assert abs(curve.risk[own, at] - variance) < 5 * curve.risk_sem[own, at]


def test_dmmse_is_best_on_the_pool_and_the_frame_has_every_learner_and_length():
    def posterior(prompts: Prompts) -> Tensor:
        return dmmse(prompts, pool=SIX_PAIRS.pool(), noise_var=0.25)

    curve = error_curve(posterior, task=SIX_PAIRS, lengths=[0, 3, 6], n_prompts=256)
    assert (curve.best, curve.over_best) == ("dMMSE", pytest.approx(1, abs=1e-12))
    assert len(curve.to_frame()) == 5 * 3
    assert curve.carried_by_few is False
    for lengths in ([7], [-1, 2], []):
        with refused("lengths", "0 to 6"):
            error_curve(zero_prediction, task=SIX_PAIRS, lengths=lengths)
