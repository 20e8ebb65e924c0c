"""Probes: exact where the target is a linear function of the stream, nothing where there is nothing."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from mechinterp.analysis.probing.descent_curves import descent_curves, p_probe
from mechinterp.analysis.probing.linear import (
    PENALTIES,
    cross_validated,
    fit_ridge,
    preconditioned,
    probe_layers,
    responses,
    reweighted,
    streams,
)
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import excess_risk, gradient_descent
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.hooked.runner import masked
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run import hooks
from mechinterp.models.run import linear as token_map
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import assert_close_to_rounding
from tests.deep_models import WIDE, random_gpt2, random_model


def test_ridge_is_scikit_learns():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((50, 4)) + 1, generator.standard_normal((50, 2)) - 2
    centred = x - x.mean(0)
    size = np.linalg.eigvalsh(centred.T @ centred).mean()
    for penalty, weights in zip(PENALTIES, fit_ridge(x, y), strict=True):
        other = Ridge(alpha=penalty * size).fit(x, y)
        np.testing.assert_allclose(weights[:-1], other.coef_.T, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(weights[-1], other.intercept_, rtol=1e-8)


def test_cross_validation_finds_a_linear_map_and_nothing_in_noise():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 6))
    W = generator.standard_normal((6, 1))
    noise = generator.standard_normal((500, 1))
    found, nothing = cross_validated(x, x @ W + 2, noise)
    np.testing.assert_allclose(found.prediction, x @ W + 2, atol=1e-6)
    assert found.penalty == PENALTIES[0]
    assert nothing.penalty == PENALTIES[-1]
    assert np.square(nothing.prediction - noise).mean() > 0.99 * noise.var()
    # Targets are fitted together as they are alone.
    (alone,) = cross_validated(x, noise)
    np.testing.assert_allclose(nothing.prediction, alone.prediction, rtol=1e-9)


def test_predictions_never_see_their_own_target():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((40, 3)), generator.standard_normal((40, 1))
    changed = y.copy()
    changed[7] += 100
    one, other = (fit.prediction for fit in cross_validated(x, y, changed))
    fold = np.arange(40) % 5 == 7 % 5
    # Only the choice of the penalty may tell them apart; with one fold's weights fixed it does not.
    assert np.abs(other[fold] - one[fold]).max() < 1
    assert np.abs(other[~fold] - one[~fold]).max() > 1


def test_the_last_layer_is_read_as_the_model_reads_it(prompts):
    # One debiased step: the query's y entry, a linear function of the stream, is the prediction.
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = probe_layers(model, prompts)
    own = (model.predict(prompts) - prompts.y_query_clean).square().mean().item()
    assert found.risk[1, 0] == pytest.approx(own, rel=0.2)
    assert found.r2[0, 0] < 0.05
    assert (np.abs(found.control_r2) < 0.1).all()
    assert found.positions == (40,)


def test_every_position_and_layer(prompts):
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    found = probe_layers(weights, prompts, positions=(0, 39, -1))
    assert found.positions == (0, 39, 40)
    assert found.risk.shape == (2, 3)
    # A context token holds its own noisy response: noise variance 0.1 of 1.1 is left, shrunk as ridge does.
    np.testing.assert_allclose(found.risk[0, :2], 0.1, atol=0.04)
    frame = found.to_frame()
    assert list(frame["pos"]) == [0, 39, 40] * 2
    assert repr(found).startswith("LayerProbes(excess risk ")
    assert len(found.plot().data) == 3


LINEAR = [{"score": "linear/L"}, {"score": "linear"}]


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_model(**WIDE),
        *(partial(random_model, **WIDE, **law) for law in LINEAR),
        partial(random_model, context_only=True, score="linear/L"),
        random_gpt2,
    ],
)
def test_streams_are_those_of_the_cache(make, few, monkeypatch):
    for backend in (hooks, token_map):
        monkeypatch.setattr(backend, "CHUNK", 8)
    model = make()
    predict = model.predict
    found = streams(model, few, heads=[(0, 1)], positions=(-1, -3))
    assert found.shape[:3] == (4, 30, 2)
    hooked = getattr(model, "model", model)
    embed = getattr(model, "embed", lambda prompts: prompts.tokens)
    with torch.no_grad(), masked(model, [(0, 1)]):
        _, cache = hooked.run_with_cache(embed(few))
        expected = predict(few)
    assert_close_to_rounding(found[1, :, 1], cache["blocks.1.hook_resid_pre"][:, -3])
    assert_close_to_rounding(found[3, :, 0], cache["blocks.2.hook_resid_post"][:, -1])
    with torch.no_grad():
        assert not torch.allclose(expected, predict(few))


def test_targets(few):
    noisy, clean = responses(few)
    assert torch.equal(noisy[:, :-1], few.y)
    assert torch.equal(clean[:, -1], few.y_query_clean)
    target, _ = reweighted(few)
    r = torch.stack([(few.y[i, :, 0, None] * few.x[i]).mean(0) for i in range(30)])
    torch.testing.assert_close(target[:, -1], r * few.x_query)
    torch.testing.assert_close(target[:, 2], r * few.x[:, 2])
    target, _ = preconditioned(few)
    S = torch.stack([sum(torch.outer(x, x) for x in few.x[i]) / few.x.shape[1] for i in range(30)])
    torch.testing.assert_close(target[:, -1], (S @ few.x_query[..., None])[..., 0] - few.x_query)
    torch.testing.assert_close(target[:, 2], (S @ few.x[:, 2, :, None])[..., 0] - few.x[:, 2])


def test_fewer_prompts_than_features_are_refused(few):
    model = random_model(1)
    rule = r"prompts must be >= 10, since 5 numbers are fitted to them, got 6\."
    with pytest.raises(ValueError, match=rule):
        probe_layers(model, few[:6])


def test_positions_outside_are_refused(few):
    with pytest.raises(ValueError, match="positions must lie in 0 to 9, got 10"):
        probe_layers(random_model(1), few, positions=[10])


def test_positions_of_a_model_that_reads_x_and_y_in_turn_are_the_querys():
    task = TaskConfig(d_x=4, context_length=9)
    prompts = sample_prompts(task, 60, generator=generator_for(0, "eval", 0), dtype=torch.float64)
    bridge = random_gpt2()
    rule = "Only position -1, .* the model must have 10 positions .*, got 19"
    for positions in ([0, 3], [3, -1]):
        with pytest.raises(ValueError, match=rule):
            probe_layers(bridge, prompts, positions=positions)
    found = probe_layers(bridge, prompts, positions=[9])
    assert found.positions == (9,)
    np.testing.assert_array_equal(found.risk, probe_layers(bridge, prompts).risk)


@pytest.mark.slow
@pytest.mark.parametrize("law", [{}, *LINEAR], ids=str)
def test_query_features_are_prompts_with_another_query(law, few, monkeypatch):
    for backend in (hooks, token_map):
        monkeypatch.setattr(backend, "CHUNK", 8)
    model = random_model(**WIDE, **law)
    predictor = predictor_of(model)
    found = predictor.query_streams(few, 2, heads=[(1, 3)])
    assert found.shape == (30, 10, 12)
    tokens = few.tokens.clone()
    tokens[:, -1] = torch.cat([few.x[:, 4], torch.zeros(30, 1)], dim=1)
    with masked(model, [(1, 3)]):
        expected = model(tokens, stop_at_layer=2)[:, -1]
    torch.testing.assert_close(found[:, 4], expected)
    assert not torch.allclose(predictor.query_streams(few, 2)[:, 4], expected)


def test_query_features_of_a_bridge(few):
    bridge = random_gpt2()
    torch.testing.assert_close(
        predictor_of(bridge).query_streams(few, 1)[:, -1],
        bridge.model(bridge.embed(few), stop_at_layer=1)[:, -1],
    )


@pytest.mark.parametrize("make", [random_gpt2, lambda: predictor_of(random_model(**WIDE))])
def test_query_features_after_the_last_layer_are_its_stream(make, few):
    predictor = make()
    found = predictor_of(predictor).query_streams(few, 3)
    expected = streams(predictor, few)[3, :, 0]
    assert found.shape == (30, 10, expected.shape[1])
    assert_close_to_rounding(found[:, -1], expected)


def test_the_input_is_as_good_as_raw_x(few):
    # Layer 0 of a model without a read-in holds x and a zero: the same descent.
    found = p_probe({"input": random_model()}, few, layer=0, steps=5)
    np.testing.assert_allclose(found.risk[2], found.risk[0], rtol=1e-9)
    expected = excess_risk(gradient_descent(few, steps=5), few).mean(1)
    np.testing.assert_allclose(found.risk[0], expected, rtol=1e-9)
    assert found.log_area[0] == found.log_area_sem[0] == 0
    assert found.log_area[2] == pytest.approx(0, abs=1e-9)
    assert list(found.to_frame().columns) == ["features", "step", "risk", "risk_sem"]
    assert list(found.area_frame()["features"]) == ["raw x", "reweighted x", "input"]
    assert repr(found).startswith("DescentCurves(least excess risk: raw x ")
    assert len(found.plot().data) == 3


@pytest.mark.slow
def test_the_error_of_the_area_is_that_of_repeated_samples():
    task = TaskConfig(d_x=4, context_length=8)
    areas, sems = [], []
    for draw in range(200):
        prompts = sample_prompts(task, 200, seed=draw, dtype=torch.float64)
        raw = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
        found = descent_curves({"raw": raw, "ideal": reweighted(prompts)[0]}, prompts, steps=4)
        areas.append(found.log_area[1])
        sems.append(found.log_area_sem[1])
    assert np.mean(sems) == pytest.approx(np.std(areas), rel=0.2)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"layer": 4}, "layer must lie in 0 to 3, got 4"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"steps": -2}, "steps must be >= 1, got -2"),
    ],
)
def test_bad_p_probes_are_refused(asked, rule, few):
    with pytest.raises(ValueError, match=rule):
        p_probe(random_model(), few, **asked)


def test_p_probes_of_no_model_are_refused(few):
    with pytest.raises(ValueError, match="at least one model, got none"):
        p_probe({}, few)
