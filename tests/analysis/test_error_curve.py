"""The curve of the loss over the number of examples: one pass, cut prompts and closed forms agree."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from mechinterp.analysis.learners.error_curve import error_curve
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.training.monitor import Monitor
from mechinterp.checkpoints.load import load
from mechinterp.checkpoints.plain_modules import hook_module
from mechinterp.config import TaskConfig, override
from mechinterp.icl.pools import dmmse, dmmse_at_every
from mechinterp.icl.predictors import ridge, ridge_at_every, zero_prediction
from mechinterp.icl.prompts import Prompts, sample_prompts, task_pool
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import predictions_after, predictor_of
from mechinterp.models.tokens import interleaved
from mechinterp.presets import preset
from mechinterp.training.general.trainer import initial_deep_weights

TASK = TaskConfig(d_x=3, context_length=6, noise_var=0.25, n_tasks=5)
GPT2 = override(preset("pool-gpt2"), "model.n_layers=2", "task.context_length=6")


@pytest.mark.parametrize("noise_var", [0.25, 0.0])
@pytest.mark.parametrize("d_y", [1, 2])
def test_learners_at_every_x_are_those_of_the_cut_prompts(noise_var: float, d_y: int):
    task = replace(TASK, noise_var=noise_var, d_y=d_y, supports=None)
    prompts, pool = sample_prompts(task, 16, dtype=torch.float64), task_pool(task)
    given = {"pool": pool, "noise_var": noise_var}
    every = ridge_at_every(prompts, penalty=0.5), ridge_at_every(prompts, penalty=0.0)
    posterior = dmmse_at_every(prompts, **given)
    assert not every[0][:, 0].any()
    assert not every[1][:, 0].any()
    for length in range(7):
        cut = prompts.prefix(length)
        torch.testing.assert_close(posterior[:, length], dmmse(cut, **given))
        if length:
            for each, penalty in zip(every, (0.5, 0.0), strict=True):
                torch.testing.assert_close(each[:, length], ridge(cut, penalty=penalty))


def weights_of_two_layers(**settings: object):
    named = (f"model.{name}={value}" for name, value in settings.items())
    config = override(GPT2, "train.loss=query", *named)
    return initial_deep_weights(config).to(torch.float64)


def test_one_pass_of_a_causal_model_gives_the_predictions_of_the_cut_prompts():
    weights = weights_of_two_layers()
    prompts = sample_prompts(GPT2.task, 32, dtype=torch.float64)
    expected = torch.stack([predictor_of(weights).predict(prompts.prefix(k)) for k in range(7)], 1)
    for source in (weights, ICLTransformer.from_weights(weights, task=GPT2.task)):
        assert predictor_of(source).predict_at_every(prompts) is not None
        one_pass = predictions_after(source, prompts, range(7))
        torch.testing.assert_close(one_pass, expected, rtol=1e-9, atol=1e-12)


class Encoder(nn.Module):
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


@pytest.mark.parametrize("causal", [True, False])
def test_a_module_that_predicts_at_every_x_is_read_there_if_it_is_causal(causal: bool):
    hooked = hook_module(Encoder(causal), embed=interleaved, task=TASK)
    prompts = sample_prompts(TASK, 16)
    curve = error_curve(hooked, prompts, task=TASK)
    assert curve.one_pass == causal
    lengths = list(range(1, 7))
    with torch.no_grad():
        cut = [hooked.predict(prompts.prefix(length)) for length in lengths]
    errors = [(each - prompts.prefix(k).y_query) for k, each in zip(lengths, cut, strict=True)]
    expected = [error.square().mean().item() for error in errors]
    assert curve.loss[0][-6:] == pytest.approx(expected, rel=1e-5)


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


def test_a_module_of_xs_and_ys_is_read_at_every_x():
    module = OfXsAndYs().eval()
    prompts = sample_prompts(TASK, 64)
    curve = error_curve(hook_module(module, task=TASK), prompts, task=TASK)
    with torch.no_grad():
        own = module(prompts.every_x, prompts.y_of_every_x[..., 0])
    expected = (own - prompts.y_of_every_x[..., 0]).square().mean(0)
    assert curve.one_pass
    assert curve.loss[0] == pytest.approx(expected.tolist(), rel=1e-5)
    assert hook_module(module, task=TASK).outputs[0] == "_backbone.h.0.attn.c_proj"


def test_a_monitor_logs_the_loss_after_each_number_of_pairs():
    module, rows = OfXsAndYs().eval(), []
    monitor = Monitor(task=TASK, every=1, n_prompts=32, ablation=False, log=rows.append)
    monitor(0, module)
    prompts = evaluation_prompts(hook_module(module, task=TASK), n_prompts=32)
    with torch.no_grad():
        own = module(prompts.every_x, prompts.y_of_every_x[..., 0])
    expected = (own - prompts.y_of_every_x[..., 0]).square().mean(0).tolist()
    assert [rows[0][f"icl/loss_at_{k}"] for k in range(7)] == pytest.approx(expected, rel=1e-5)
    assert monitor.run().history["eval_loss_at_3"].iloc[0] == pytest.approx(expected[3], rel=1e-5)
    assert rows[0]["icl/loss"] == pytest.approx(expected[-1], rel=1e-5)


class OfOneLength(Encoder):
    """A module that takes prompts of six pairs and no others."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] == 13
        return super().forward(tokens)


def test_a_module_of_one_length_has_its_loss_there():
    hooked = hook_module(OfOneLength(causal=True), embed=interleaved, task=TASK)
    prompts = sample_prompts(TASK, 16)
    curve = error_curve(hooked, prompts, task=TASK, lengths=[6])
    error = hooked.predict(prompts) - prompts.y_query
    assert curve.loss[0, 0] == pytest.approx(error.square().mean().item(), rel=1e-5)


def test_models_that_look_back_and_models_of_pairs_run_once_per_length():
    # Each position of a context-only model sees all pairs, so that its output there is not that of the cut prompt.
    for settings in ({"context_only": "true"}, {"layout": "pairs"}):
        weights = weights_of_two_layers(**settings)
        prompts = sample_prompts(GPT2.task, 8, dtype=torch.float64)
        assert predictor_of(weights).predict_at_every(prompts) is None
        curve = error_curve(weights, prompts, task=GPT2.task, lengths=[2, 6])
        errors = predictor_of(weights).predict(prompts.prefix(2)) - prompts.prefix(2).y_query
        assert curve.loss[0, 0] == pytest.approx(errors.square().mean().item(), rel=1e-9)


def test_the_bayes_predictor_has_ratio_1_and_zero_the_variance_of_y():
    task = replace(TASK, n_tasks=None, beta_var=2.0)
    curve = error_curve(partial(ridge, penalty=task.posterior_penalty), task=task, n_prompts=20_000)
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
        return dmmse(prompts, pool=task_pool(TASK), noise_var=0.25)

    curve = error_curve(posterior, task=TASK, lengths=[0, 3, 6], n_prompts=256)
    assert (curve.best, curve.over_best) == ("dMMSE", pytest.approx(1, abs=1e-12))
    assert len(curve.to_frame()) == 5 * 3
    assert curve.carried_by_few is False
    assert {"loss", "loss_sem", "risk", "risk_sem"} <= set(curve.to_frame())


@pytest.mark.parametrize("lengths", [[7], [-1, 2], []])
def test_lengths_beyond_the_prompts_are_refused(lengths: list[int]):
    with pytest.raises(ValueError, match=r"lengths.* 0 to 6"):
        error_curve(zero_prediction, task=TASK, lengths=lengths)


@pytest.mark.slow
def test_priors_of_one_pass_are_those_of_a_run_per_length():
    checkpoint = load("checkpoints/pool-gpt2-m16")
    one_pass = compare_priors(checkpoint, n_prompts=2048)
    runs = compare_priors(predictor_of(checkpoint).predict, checkpoint.task, n_prompts=2048)
    for name in ("relative", "risk", "weight_dmmse"):
        one, other = (getattr(each.trimmed, name) for each in (one_pass, runs))
        sems = [getattr(each.trimmed, f"{name}_sem") for each in (one_pass, runs)]
        assert (np.abs(one - other) < 4 * np.hypot(*sems)).all()
