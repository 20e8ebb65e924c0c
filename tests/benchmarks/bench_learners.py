"""Learners beside a model: ridge at its best penalty, curves, fits and probes of wide streams, and the load of an external file."""

from pathlib import Path

import numpy as np
import plain
import pytest
import torch

from mechinterp.analysis.learners.error_curve import error_curve
from mechinterp.analysis.learners.pool_tasks import spread_lengths
from mechinterp.analysis.probing.p_probe import p_probe
from mechinterp.checkpoints.load import load
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithm_fits import fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.given import PENALTIES
from mechinterp.icl.predictors import ridge, ridge_path
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of

N_PROMPTS, ROUNDS = 1024, 2
PARTS = 16
"""The plain code takes one prompt in so many where it takes long."""
WIDE = TaskConfig(d_x=80, context_length=160)


def prompts_of(task: TaskConfig, n_prompts: int = N_PROMPTS) -> Prompts:
    return draw_prompts(task, n_prompts, dtype=torch.float64)


@pytest.mark.parametrize(("d_x", "length"), [(16, 40), (80, 40), (80, 160)])
def test_ridge_at_every_penalty(versus, d_x: int, length: int):
    prompts = prompts_of(TaskConfig(d_x=d_x, context_length=length))
    part, penalties = prompts[::PARTS], PENALTIES[1:]
    found = ridge_path(part, penalties)
    assert (found - plain.ridges(part, penalties)).abs().max() < 1e-9
    versus(
        f"ridge at {len(penalties)} penalties, {N_PROMPTS:,} prompts, d {d_x}, {length} pairs "
        f"(plain: a solution for each penalty, {len(part)} prompts)",
        lambda: ridge_path(prompts, penalties),
        lambda: plain.ridges(part, penalties),
        work=PARTS,
        rounds=ROUNDS,
    )


def test_an_error_curve_of_long_prompts(versus):
    """Plain: both learners of every prompt by numpy, after every number of pairs; the model is a formula on both sides."""
    prompts, model = prompts_of(WIDE), debiased_gradient_step(0.9, 0.05, d_x=WIDE.d_x)
    lengths, part = spread_lengths(1, WIDE.context_length), prompts[::PARTS]
    curve = error_curve(model, part, task=WIDE).rows
    losses = plain.losses_of_learners(part, lengths, WIDE.posterior_penalty)
    for learner in losses:
        own = curve[curve["learner"] == learner]["loss"]
        np.testing.assert_allclose(own, losses[learner], rtol=1e-6)
    versus(
        f"error curve of {N_PROMPTS:,} prompts, d 80, up to 160 pairs (plain: {len(part)} prompts, without a model)",
        lambda: error_curve(model, prompts, task=WIDE),
        lambda: plain.losses_of_learners(part, lengths, WIDE.posterior_penalty),
        work=PARTS,
        rounds=ROUNDS,
    )


def test_a_fit_on_long_prompts(versus):
    """Plain: Adam through the steps on x and y of every pair."""
    (algorithm,) = (each for each in ALGORITHMS if each.label == "gd_plus_plus")
    prompts = prompts_of(WIDE)
    moments, target, part = (
        PromptMoments(prompts, WIDE),
        ridge(prompts, penalty=8.0),
        prompts[::PARTS],
    )
    versus(
        f"fit of {algorithm.name}, 2 layers, {N_PROMPTS:,} prompts, d 80, 160 pairs "
        f"(plain: 100 steps of Adam, {len(part)} prompts)",
        lambda: fit_algorithm(algorithm, moments, target, n_layers=2),
        lambda: plain.fitted_descent(part, target[::PARTS]),
        work=PARTS,
        rounds=ROUNDS,
    )


def test_a_p_probe_of_a_wide_stream(versus):
    """Plain: descent on the matrix of all features; the stream itself is computed on both sides."""
    model = ModelConfig(n_layers=2, n_heads=8, d_model=256, d_head=32, context_only=True)
    weights, generator = ICLTransformer(model, d_x=16, d_y=1), torch.Generator().manual_seed(0)
    for tensor in weights.parameters():
        torch.nn.init.normal_(tensor, std=0.2, generator=generator)
    prompts = draw_prompts(TaskConfig(d_x=16, context_length=40), N_PROMPTS)
    part = prompts[::PARTS]

    def plainly() -> torch.Tensor:
        return plain.descent_on_features(predictor_of(weights).query_streams(part, 1), part.y, 32)

    risks = (plainly() - part.y_query_clean).square().mean((1, 2))
    own = p_probe(weights, part).risk[-1]
    assert np.ptp(own) > 0.1
    np.testing.assert_allclose(own, risks.numpy(), rtol=1e-4)
    versus(
        f"p_probe of a stream of width 256, {N_PROMPTS:,} prompts of 40 pairs (plain: a matrix of all features, {len(part)} prompts)",
        lambda: p_probe(weights, prompts),
        plainly,
        work=PARTS,
        rounds=ROUNDS,
    )


def test_the_load_of_an_external_file(versus, tmp_path: Path):
    """Plain: torch.load and the module of the repository that wrote it."""
    file = tmp_path / "state.pt"
    torch.save(plain.GargModel().state_dict(), file)
    versus(
        "load of a GPT-2 of 12 layers, file of Garg et al. (plain: torch.load into GPT2Model)",
        lambda: load(file, n_heads=8),
        lambda: plain.GargModel().load_state_dict(torch.load(file)),
    )
