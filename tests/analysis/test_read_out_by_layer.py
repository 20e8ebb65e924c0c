"""Read-outs of the stream: gradient descent's steps exactly, a fitted read-out that finds what is there, and no more."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.probing.read_out_by_layer import TARGETS, read_out_by_layer
from mechinterp.checkpoints.load import load
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.icl.sparse_predictors import gradient_descent
from mechinterp.models.constructions.descent import gradient_descent_model, rotated
from mechinterp.models.run.predictor import predictor_of
from tests.conftest import CHECKPOINTS
from tests.deep_models import random_gpt2, random_model

STEPS, ETA = 3, 0.5
TASK = TaskConfig(d_x=4, context_length=9)


@pytest.fixture
def few() -> Prompts:
    return sample_prompts(TASK, 256, seed=0, dtype=torch.float64)


@pytest.mark.parametrize("basis", ["tokens", "rotated"])
def test_after_layer_k_the_own_read_out_is_step_k_of_gradient_descent(basis: str, few: Prompts):
    weights = gradient_descent_model([ETA] * STEPS, d_x=4)
    weights = rotated(weights, seed=0) if basis == "rotated" else weights
    found = read_out_by_layer(weights, few, task=predictor_of(weights).task)
    steps = gradient_descent(few, steps=STEPS, eta=ETA)
    assert len(steps) == STEPS + 1
    whole = found.head < 0
    errors = (steps - few.y_query).square().mean(2)
    np.testing.assert_allclose(found.own_loss[0, whole], errors.mean(1), rtol=1e-11)
    sem = errors.std(1) / len(few) ** 0.5
    np.testing.assert_allclose(found.own_loss_sem[0, whole], sem, rtol=1e-9)
    penalty = predictor_of(weights).task.posterior_penalty
    apart = (steps - ridge(few, penalty=penalty)).square().mean((1, 2))
    np.testing.assert_allclose(found.own_loss[2, whole], apart, rtol=1e-10)
    # The only head of a layer is the layer.
    heads, layers = found.own_loss[:, 1::2], found.own_loss[:, 2::2]
    np.testing.assert_allclose(heads, layers, rtol=1e-10, atol=1e-20)
    assert found.own_r2[1, -1] == pytest.approx(1, abs=1e-12)


def test_a_fitted_read_out_finds_the_prediction_where_it_is_and_nothing_in_the_query(few: Prompts):
    found = read_out_by_layer(gradient_descent_model([ETA] * STEPS, d_x=4), few)
    model = TARGETS.index("model")
    assert found.fitted_r2[model, -1] == pytest.approx(1, abs=1e-6)
    # Task vectors are drawn anew for each prompt and have mean 0: the query alone says nothing of y.
    before, sem = found.fitted_r2[:, 0], found.fitted_r2_sem[:, 0]
    assert np.all(before < 4 * sem)
    assert np.all(np.diff(found.fitted_loss[2, found.head < 0]) < 0)


def test_choosing_and_measuring_use_different_prompts(few: Prompts):
    # Targets at random: on the prompts that it was fitted to, 31 of 128 degrees of freedom would explain a share of them.
    noise = sample_prompts(TASK, 256, seed=7, dtype=torch.float64)
    mixed = replace(few, y_query=noise.y_query)
    found = read_out_by_layer(random_model(context_only=True, d_model=30, d_head=3), mixed)
    assert np.all(found.fitted_r2[0] < 4 * found.fitted_r2_sem[0])


@pytest.mark.parametrize("norm", ["before", "after"])
def test_each_head_is_added_to_the_stream_before_its_layer(norm: str, few: Prompts):
    model = random_model(norm=norm, final_norm=True, d_model=8, d_head=4, d_mlp=6, biases=True)
    found = read_out_by_layer(model, few)
    _, cache = model.run_with_cache(model.tokens(few))
    z, W_O = cache["z", 1][:, -1, 2], model.W_O[1, 2]
    stream = cache["resid_pre", 1][:, -1] + z @ W_O
    read = model.unembed(model.ln_final(stream[:, None]))[:, 0]
    place = found.places.index("L1H2")
    expected = (read - few.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, place], expected, rtol=1e-10)
    loss = (model.predict(few) - few.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, -1], loss, rtol=1e-10)


def test_a_bridge_has_its_own_read_out(few: Prompts):
    gpt2 = replace(predictor_of(random_gpt2()), task=TASK)
    found = read_out_by_layer(gpt2, few)
    loss = (gpt2.predict(few) - few.y_query).square().mean().item()
    np.testing.assert_allclose(found.own_loss[0, -1], loss, rtol=1e-10)
    assert found.places.count("L2H1") == 1


def test_one_layer_ends_with_the_loss_that_classify_has():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    found = read_out_by_layer(checkpoint, n_prompts=512)
    assert found.places == ["input", "L0H0", "L0H1", "after L0"]
    assert found.own_r2[0, 0] == 0  # nothing is in the query's y slot
    frame = found.to_frame()
    assert len(frame) == 3 * 4
    last = frame.query("target == 'model' and place == 'after L0'")
    assert last["own_r2"].item() == pytest.approx(1, abs=1e-9)


def test_too_few_prompts_are_refused(few: Prompts):
    with pytest.raises(ValueError, match=r"prompts must be >= 10, .*, got 8\.$"):
        read_out_by_layer(gradient_descent_model([ETA], d_x=4), few[:8])
    with pytest.raises(ValueError, match=r"needs a task for a model that comes without one"):
        read_out_by_layer(random_gpt2())
