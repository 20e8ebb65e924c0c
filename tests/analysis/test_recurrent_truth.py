"""The truth about a trained layer in the calibration along the pairs: fits by loops, apart from the rules of names."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

from analyses.recurrent import learners as make
from analyses.recurrent import trained
from analyses.recurrent.layers import SEEDS, configs
from mechinterp import TaskConfig
from mechinterp.checkpoints.checkpoint import load
from mechinterp.icl.prompts import draw_prompts
from tests.conftest import CHECKPOINTS

TASK = TaskConfig(d_x=3, context_length=12)


@pytest.mark.parametrize(
    ("label", "scalars"),
    [
        ("gradient_descent", (0.7,)),
        ("forgetting_gd", (1.2, 0.9)),
        ("online_gd", (0.15, 0.95, 0.05)),
        ("ridge_like", (0.8,)),
        ("recursive_least_squares", (0.9, 0.8)),
    ],
)
def test_fit_of_a_learner_finds_its_own_predictions(label: str, scalars: tuple[float, ...]):
    truth = trained.candidates(None)[label]
    prompts, other = (draw_prompts(TASK, 256, seed=n, dtype=torch.float64) for n in (1, 2))
    fit = trained.fitted(truth, prompts, truth.build(*scalars)(prompts))
    own = truth.build(*scalars)(other)
    assert float((fit(other) - own).square().mean() / own.square().mean()) < 1e-6


def test_fit_of_least_squares_does_not_stay_at_ridge_regression():
    """From forgetting of 0.1 per pair the bounded search ended at alpha 1."""
    prompts, other = (
        draw_prompts(TaskConfig(d_x=6, context_length=28), 256, seed=n, dtype=torch.float64)
        for n in (1, 2)
    )
    learner = make.times(make.recursive(0.977, 0.2), 1.03)
    fits = trained.candidates(28)
    left = {
        label: trained.fitted(fits[label], prompts, learner(prompts))(other) - learner(other)
        for label in ("ridge_like", "recursive_least_squares")
    }
    size = learner(other).square().mean()
    assert left["recursive_least_squares"].square().mean() / size < 1e-6
    assert left["ridge_like"].square().mean() / size > 1e-4


def frames(**left: tuple[float, float]) -> dict[str, pd.DataFrame]:
    """Squared errors of learners, the same under every law; they spread by 1e-4 around two values."""
    frame = pd.DataFrame({name: [low, high] * 50 for name, (low, high) in left.items()})
    return {"own": frame, "drift": frame, "double": frame}


def test_label_is_right_if_its_learner_explains_leads_and_is_the_smallest():
    left = frames(
        gradient_descent=(0.3, 0.31),
        forgetting_gd=(0.001, 0.002),
        online_gd=(0.1, 0.11),
        ridge_like=(0.004, 0.0045),
        recursive_least_squares=(0.004, 0.0045),
    )
    assert trained.is_right("forgetting_gd", left)
    assert trained.is_right("ridge_like", left)  # behind by less than 0.005
    assert not trained.is_right("recursive_least_squares", left)  # no better than ridge
    assert not trained.is_right("online_gd", left)
    assert not trained.is_right("gd_plus_plus", left)
    left["own"] = left["own"].assign(forgetting_gd=0.021)
    assert not trained.is_right("forgetting_gd", left)


def test_trained_layer_is_what_its_weights_say():
    checkpoint = load(CHECKPOINTS / "gla-h1-s0")
    left = trained.explained(checkpoint)
    assert [label for label in left["own"] if trained.is_right(label, left)] == ["forgetting_gd"]
    assert trained.right_readings(checkpoint) == {"no interaction with forgetting"}
    there = trained.said_by_weights(checkpoint.weights)
    scalars = {"alpha": there["alpha"], "eta": there["eta"] * checkpoint.task.context_length}
    assert trained.scalars_right(checkpoint, "forgetting_gd", scalars)
    assert trained.scalars_right(checkpoint, "forgetting_gd", scalars | {"alpha": 0.9}) is False
    assert trained.scalars_right(checkpoint, "online_gd", scalars) is None


def test_layers_are_sixty_and_every_second_task_drifts():
    drawn = configs()
    assert len(drawn) == 60
    by_draw = {draw: {repr(each) for each in configs(draw).values()} for draw in SEEDS}
    assert {draw: len(each) for draw, each in by_draw.items()} == {
        "first": 60,
        "second": 40,
        "third": 50,
        "fourth": 50,
    }
    assert len(set().union(*by_draw.values())) == 200
    for name, config in drawn.items():
        assert (config.task.drift < 1) == (int(name.rpartition("-")[2]) % 2 == 1)
        assert replace(config.task, drift=1.0).noise_variance <= 0.51


def test_learners_of_double_length_divide_by_the_length_that_the_layer_divides_by():
    prompts = draw_prompts(TASK, 8, seed=0, dtype=torch.float64)
    longer = draw_prompts(replace(TASK, context_length=24), 8, seed=0, dtype=torch.float64)
    sums, means = (
        trained.candidates(length)["forgetting_gd"].build(1, 0.9) for length in (12, None)
    )
    assert torch.equal(sums(prompts), means(prompts))
    assert torch.allclose(sums(longer), 2 * means(longer))
    assert torch.equal(means(longer), make.forgetting(1, 0.9)(longer))
