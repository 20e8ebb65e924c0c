"""Probes and read-outs of the stream: exact where the target is linear in it, nothing where there is nothing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import Ridge

from mechinterp.analysis.probing.linear import (
    PROBE_PENALTIES,
    HeldOut,
    cross_validated_probe,
    fit_ridge,
)
from mechinterp.analysis.probing.p_probe import p_probe
from mechinterp.analysis.probing.probe import LayerProbes, probe
from mechinterp.analysis.probing.read_out import READ, ReadOut
from mechinterp.analysis.probing.target_functions import (
    preconditioned,
    responses,
    reweighted,
    vectors_of_prompts,
)
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.icl.sparse_predictors import excess_risk, gradient_descent
from mechinterp.models.constructions.descent import gradient_descent_model, rotated
from mechinterp.models.constructions.one_layer import debiased_gradient_step
from mechinterp.models.hooked.runner import masked
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run import hooks
from mechinterp.models.run import linear as token_map
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import CHECKPOINTS, assert_close_to_rounding, refused
from tests.deep_models import WIDE, random_gpt2, random_model


def probe_of_y(source: object, prompts: Prompts, **settings: object) -> LayerProbes:
    return probe(source, prompts, targets="y", **settings).probes["y"]


def read_outs(source: object, prompts: Prompts | None = None, **settings: object) -> ReadOut:
    return probe(source, prompts, targets="read_out", **settings).read_out


def test_ridge_is_scikit_learns():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((50, 4)) + 1, generator.standard_normal((50, 2)) - 2
    centred = x - x.mean(0)
    size = np.linalg.eigvalsh(centred.T @ centred).mean()
    for penalty, weights in zip(PROBE_PENALTIES, fit_ridge(x, y), strict=True):
        other = Ridge(alpha=penalty * size).fit(x, y)
        np.testing.assert_allclose(weights[:-1], other.coef_.T, rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(weights[-1], other.intercept_, rtol=1e-8)


def test_cross_validation_finds_a_linear_map_and_nothing_in_noise():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((500, 6))
    W = generator.standard_normal((6, 1))
    noise = generator.standard_normal((500, 1))
    found, nothing = cross_validated_probe(x, x @ W + 2, noise)
    np.testing.assert_allclose(found.prediction, x @ W + 2, atol=1e-6)
    assert found.penalty == PROBE_PENALTIES[0]
    assert nothing.penalty == PROBE_PENALTIES[-1]
    assert np.square(nothing.prediction - noise).mean() > 0.99 * noise.var()
    # Targets are fitted together as they are alone.
    (alone,) = cross_validated_probe(x, noise)
    np.testing.assert_allclose(nothing.prediction, alone.prediction, rtol=1e-9)


def test_predictions_never_see_their_own_target():
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((40, 3)), generator.standard_normal((40, 1))
    changed = y.copy()
    changed[7] += 100
    one, other = (fit.prediction for fit in cross_validated_probe(x, y, changed))
    fold = np.arange(40) % 5 == 7 % 5
    # Only the choice of the penalty may tell them apart; with one fold's weights fixed it does not.
    assert np.abs(other[fold] - one[fold]).max() < 1
    assert np.abs(other[~fold] - one[~fold]).max() > 1


def test_the_error_of_the_fit_is_that_by_hand():
    """One feature of +-1 on 8 prompts has h_ij = x_i x_j / 8 and one degree of freedom. Noise of size a gives
    sum_ij h_ij^2 a^2 a^2 = a^4 and the error sqrt(2 a^4 / (8 * 7)) = a^2 / sqrt(28)."""
    x = np.tile([1.0, -1.0], 4)[:, None]
    a, clean = 2.0, np.full((8, 1), 3.0)
    noise = a * np.repeat([1.0, -1.0], 4)[:, None]
    root = x / 8**0.5
    exact = HeldOut(clean, clean + noise, PROBE_PENALTIES[0], root, freedom=1.0)
    assert exact.fit_sem(clean) == pytest.approx(a**2 / 28**0.5)
    # A prediction without error has no other error than that of the fit; R2 divides it by the mean square, 9.
    loss, loss_sem, r2, r2_sem = exact.scores(clean)
    assert (loss, r2) == (0, 1)
    assert loss_sem == pytest.approx(a**2 / 28**0.5)
    assert r2_sem == pytest.approx(a**2 / 28**0.5 / 9)
    # What no linear map explains counts as the noise does: sizes a and b add up as a^4 + b^4.
    b = 3.0
    curved = HeldOut(clean + b, clean + noise, PROBE_PENALTIES[0], root, freedom=1.0)
    assert curved.fit_sem(clean) == pytest.approx(((a**4 + b**4) / 28) ** 0.5)
    # Two targets along one line: inner products are 2 v_i v_j, and the mean is over both.
    double = HeldOut(
        np.tile(clean, 2), np.tile(clean + noise, 2), PROBE_PENALTIES[0], root, freedom=1.0
    )
    assert double.fit_sem(np.tile(clean, 2)) == pytest.approx(a**2 / 28**0.5)


def test_the_last_layer_is_read_as_the_model_reads_it(prompts):
    # One debiased step: the query's y entry, a linear function of the stream, is the prediction.
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    model = ICLTransformer.from_weights(weights, task=TaskConfig())
    found = probe_of_y(model, prompts)
    own = (model.predict(prompts) - prompts.y_query_clean).square().mean().item()
    assert found.risk[1, 0] == pytest.approx(own, rel=0.2)
    assert found.r2[0, 0] < 0.05
    assert (np.abs(found.control_r2) < 0.1).all()
    assert found.positions == (40,)


def test_every_position_and_layer(prompts):
    weights = debiased_gradient_step(0.88, 0.02, d_x=5)
    found = probe_of_y(weights, prompts, positions=(0, 39, -1))
    assert found.positions == (0, 39, 40)
    assert found.risk.shape == (2, 3)
    # A context token holds its own noisy response: noise variance 0.1 of 1.1 is left, shrunk as ridge does.
    np.testing.assert_allclose(found.risk[0, :2], 0.1, atol=0.04)
    assert list(found.to_frame()["pos"]) == [0, 39, 40] * 2
    assert len(found.plot().data) == 3


@pytest.mark.parametrize("make", [partial(random_model, **WIDE, score="linear/L"), random_gpt2])
def test_streams_are_those_of_the_cache(make, few, monkeypatch):
    for backend in (hooks, token_map):
        monkeypatch.setattr(backend, "CHUNK", 8)
    model = make()
    predict = model.predict
    found = predictor_of(model).streams(few, heads=[(0, 1)], positions=(-1, -3))
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


def test_positions_of_a_model_that_reads_x_and_y_in_turn_are_the_querys():
    task = TaskConfig(d_x=4, context_length=9)
    prompts = draw_prompts(task, 60, dtype=torch.float64)
    bridge = random_gpt2()
    for positions in ([0, 3], [3, -1]):
        with refused("position -1", 10, 19):
            probe_of_y(bridge, prompts, positions=positions)
    found = probe_of_y(bridge, prompts, positions=[9])
    assert found.positions == (9,)
    np.testing.assert_array_equal(found.risk, probe_of_y(bridge, prompts).risk)


def test_query_features_after_the_last_layer_are_its_stream(few):
    predictor = predictor_of(random_gpt2())
    found = predictor.query_streams(few, 3)
    expected = predictor.streams(few)[3, :, 0]
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
    areas = found.area_frame()
    assert list(areas["features"]) == ["raw x", "reweighted x", "input"]
    at = range(3), found.at_step
    np.testing.assert_array_equal(areas["least_risk"], found.risk[at])
    np.testing.assert_array_equal(areas["least_risk_sem"], found.risk_sem[at])
    assert len(found.plot().data) == 3


def test_without_responses_descent_is_exact_and_areas_are_not_defined(few):
    nothing = replace(few, y=0 * few.y, y_query_clean=0 * few.y_query_clean)
    found = p_probe(random_model(), nothing, steps=3)
    assert (found.risk[:2] == 0).all()
    assert np.isnan([found.log_area, found.log_area_sem]).all()
    found.plot()


def test_descent_in_chunks_is_descent(few, monkeypatch):
    whole = p_probe(random_model(), few, steps=5)
    monkeypatch.setattr("mechinterp.memory.CHUNK_BYTES", 1)
    parts = p_probe(random_model(), few, steps=5)
    np.testing.assert_allclose(parts.risk, whole.risk, rtol=1e-9)
    np.testing.assert_allclose(parts.risk_sem, whole.risk_sem, rtol=1e-9)


def test_what_cannot_be_probed_is_refused(few):
    model = random_model(1)
    with refused("prompts", 10, 5, 6):
        probe_of_y(model, few[:6])
    with refused("positions", "0 to 9", 10):
        probe_of_y(model, few, positions=[10])
    with refused("layer", "0 to 1", 4):
        p_probe(model, few, layer=4)
    with refused("steps", 1, -2):
        p_probe(model, few, steps=-2)
    with refused("at least one model"):
        p_probe({}, few)


STEPS, ETA = 3, 0.5
OF_STREAMS = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def drawn() -> Prompts:
    return draw_prompts(OF_STREAMS, 256, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("basis", ["tokens", "rotated"])
def test_after_layer_k_the_own_read_out_is_step_k_of_gradient_descent(basis: str, drawn: Prompts):
    weights = gradient_descent_model([ETA] * STEPS, d_x=4)
    weights = rotated(weights, seed=0) if basis == "rotated" else weights
    found = read_outs(weights, drawn, task=predictor_of(weights).task)
    steps = gradient_descent(drawn, steps=STEPS, eta=ETA)
    assert len(steps) == STEPS + 1
    whole = found.head < 0
    errors = (steps - drawn.y_query).square().mean(2)
    np.testing.assert_allclose(found.own_loss[0, whole], errors.mean(1), rtol=1e-11)
    sem = errors.std(1) / len(drawn) ** 0.5
    np.testing.assert_allclose(found.own_loss_sem[0, whole], sem, rtol=1e-9)
    penalty = predictor_of(weights).task.posterior_penalty
    apart = (steps - ridge(drawn, penalty=penalty)).square().mean((1, 2))
    np.testing.assert_allclose(found.own_loss[2, whole], apart, rtol=1e-10)
    # The only head of a layer is the layer.
    heads, layers = found.own_loss[:, 1::2], found.own_loss[:, 2::2]
    np.testing.assert_allclose(heads, layers, rtol=1e-10, atol=1e-20)
    assert found.own_r2[1, -1] == pytest.approx(1, abs=1e-12)


def test_a_fitted_read_out_finds_the_prediction_where_it_is_and_nothing_in_the_query(
    drawn: Prompts,
):
    found = read_outs(gradient_descent_model([ETA] * STEPS, d_x=4), drawn)
    model = READ.index("model")
    assert found.fitted_r2[model, -1] == pytest.approx(1, abs=1e-6)
    # Task vectors are drawn anew for each prompt and have mean 0: the query alone says nothing of y.
    before, sem = found.fitted_r2[:, 0], found.fitted_r2_sem[:, 0]
    assert np.all(before < 4 * sem)
    assert np.all(np.diff(found.fitted_loss[2, found.head < 0]) < 0)


def test_choosing_and_measuring_use_different_prompts(drawn: Prompts):
    # Targets at random: on the prompts that it was fitted to, 31 of 128 degrees of freedom would explain a share of them.
    noise = draw_prompts(OF_STREAMS, 256, seed=7, dtype=torch.float64)
    mixed = replace(drawn, y_query=noise.y_query)
    found = read_outs(random_model(context_only=True, d_model=30, d_head=3), mixed)
    assert np.all(found.fitted_r2[0] < 4 * found.fitted_r2_sem[0])


@pytest.mark.parametrize("norm", ["before", "after"])
def test_each_head_is_added_to_the_stream_before_its_layer(norm: str, drawn: Prompts):
    model = random_model(norm=norm, final_norm=True, d_model=8, d_head=4, d_mlp=6, biases=True)
    found = read_outs(model, drawn)
    _, cache = model.run_with_cache(model.tokens(drawn))
    z, W_O = cache["z", 1][:, -1, 2], model.W_O[1, 2]
    stream = cache["resid_pre", 1][:, -1] + z @ W_O
    read = model.unembed(model.ln_final(stream[:, None]))[:, 0]
    place = found.places.index("L1H2")
    expected = (read - drawn.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, place], expected, rtol=1e-10)
    loss = (model.predict(drawn) - drawn.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, -1], loss, rtol=1e-10)


def test_a_bridge_has_its_own_read_out(drawn: Prompts):
    gpt2 = replace(predictor_of(random_gpt2()), task=OF_STREAMS)
    found = read_outs(gpt2, drawn)
    loss = (gpt2.predict(drawn) - drawn.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, -1], loss, rtol=1e-10)
    assert found.places.count("L2H1") == 1


def test_too_few_prompts_are_refused(drawn: Prompts):
    with refused("prompts", 10, 8):
        read_outs(gradient_descent_model([ETA], d_x=4), drawn[:8])
    with refused("task"):
        read_outs(random_gpt2())


PINNED = {
    ("y", 1): [
        0.5498718983,
        0.07200693926,
        0.4850212223,
        0.06712557989,
        -0.1476820836,
        0.09027502638,
        0.1,
    ],
    ("reweighted x", 0): [
        0.0977883432,
        0.007027140291,
        -0.1497523358,
        0.0232895598,
        -0.1061651042,
        0.02203758082,
        1.0,
    ],
    ("preconditioned x", 4): [
        0.168642507,
        0.01135311524,
        0.5869131008,
        0.02674619913,
        -0.1465608215,
        0.0207019203,
        0.0001,
    ],
}
"""Rows of the tables before `probe_layers`, `probe` and `read_out_by_layer` became one function."""
PINNED_READ_OUTS = {
    ("y", "L1H2"): [
        0.5144894084,
        0.03136120667,
        0.5238770471,
        0.06294495716,
        0.5540667225,
        0.06947663686,
        0.4811722189,
        0.07671525426,
        0.1,
    ],
    ("model", "after L0"): [
        0.3691993855,
        0.0195784733,
        0.6307976687,
        0.06884720562,
        0.6133556676,
        0.05713515801,
        0.3866425268,
        0.04962910711,
        0.01,
    ],
    ("ridge", "L2H3"): [
        0.8682229166,
        0.01862324424,
        0.129987094,
        0.01931008887,
        0.9062048088,
        0.0190652618,
        0.09252112751,
        0.0169333916,
        0.01,
    ],
}


@pytest.mark.slow
def test_the_numbers_are_those_of_the_three_functions_before():
    model = load(CHECKPOINTS / "sparse-h4-noise0.1-s0")
    found = probe(model, n_prompts=128, seed=3)
    assert found.target == ("y", "reweighted x", "preconditioned x")
    # The model runs in float32, whose rounding is 1e-7 of the stream; a probe multiplies it by about 10.
    rows = found.to_frame().set_index(["target", "layer"]).drop(columns="pos")
    for place, expected in PINNED.items():
        np.testing.assert_allclose(rows.loc[place], expected, rtol=1e-4)
    rows = found.read_out.to_frame().set_index(["target", "place"]).drop(columns="layers_run")
    for place, expected in PINNED_READ_OUTS.items():
        np.testing.assert_allclose(rows.loc[place], expected, rtol=1e-4)


def test_targets_are_names_functions_or_both(few: Prompts):
    model = random_model()

    def half_of_y(prompts: Prompts) -> torch.Tensor:
        return responses(prompts)[0] / 2

    found = probe(model, few, targets=["beta", half_of_y])
    assert found.target == ("beta", "half_of_y")
    assert found.read_out is None
    assert list(found.to_document()) == ["structure"]
    named = probe(model, few, targets={"half": half_of_y, "y": responses})
    # A target times 1/2 has 1/4 of the risk; without clean values it is scored against itself.
    noisy = probe(model, few, targets={"noisy": lambda p: responses(p)[0]}).probes["noisy"]
    np.testing.assert_allclose(named.probes["half"].risk, noisy.risk / 4)
    np.testing.assert_allclose(named.probes["y"].risk, probe_of_y(model, few).risk)
    beta = vectors_of_prompts(few)
    assert beta.shape == (30, few.x.shape[1] + 1, 4)
    assert torch.equal(beta[:, 3], few.beta[:, :, 0])
    alone = probe(model, few, targets="read_out")
    assert alone.target == ()
    pd.testing.assert_frame_equal(alone.to_frame(), alone.read_out.to_frame())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": "gamma"}, ["targets", "read_out", "'gamma'"]),
        ({"targets": 3}, ["targets"]),
        ({"targets": ["y", "y"]}, ["different names", "'y'"]),
        ({"targets": []}, ["at least one"]),
        ({"targets": {"flat": lambda p: p.y_query}}, ["'flat'", "[batch, pos, target]", "[30, 1]"]),
        ({"heads": [(0, 1)]}, ["read_out", "targets='y'"]),
        ({"positions": [0]}, ["read_out", "targets='y'"]),
    ],
)
def test_targets_that_make_no_sense_are_refused(few: Prompts, settings: dict, words: list[str]):
    with refused(*words):
        probe(random_model(), few, **settings)


def test_a_second_argument_that_is_no_prompts_is_refused_in_one_line():
    for given, word in ((64, "n_prompts="), (OF_STREAMS, "task="), ("y", "sample_prompts")):
        for analysis in (probe, p_probe):
            with refused("prompts must be Prompts", word):
                analysis(random_model(), given)


def test_layers_count_from_0_on_every_axis(few: Prompts):
    found = probe(random_model(), few)
    for figure in (found.plot(), found.plot_r2(), found.read_out.plot()):
        assert figure.layout.xaxis.ticktext == ("L0", "L1", "L2", "end")
        assert list(figure.data[0].x) == [0, 1, 2, 3]
