"""Recurrent layers built by hand predict what their formula says, and get its name and scalars."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp import TaskConfig, name_algorithm
from mechinterp.analysis.multi_layer.naming_rules import Limits, decide
from mechinterp.analysis.response.reading import FORGETS
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, draw_prompts
from mechinterp.models.constructions.recurrent import recurrent_layer
from mechinterp.models.run.general import predictions
from tests.conftest import assert_close_to_rounding, refused

TASK = TaskConfig(d_x=4, context_length=20)
LAYERS = {
    "gated": ({"alpha": 0.9, "eta": 0.05}, "forgetting_gd", (1.0, 0.9)),
    "delta": ({"eta": 0.1}, "online_gd", (0.1, 1.0, 0.0)),
    "gated_delta": ({"alpha": 0.9, "eta": 0.1}, "online_gd", (0.1, 0.9, 0.0)),
    "mesa": ({"alpha": 0.9, "penalty": 0.4}, "recursive_least_squares", (0.9, 0.4)),
}
"""By score: arguments, label and scalars; the eta of forgetting_gd is over L, for the sum over pairs."""


def pair_by_pair(score: str, prompts: Prompts, *, alpha=1.0, eta=0.1, penalty=0.5):
    """The formulas of the docstring."""
    x, y = prompts.x, prompts.y
    w = x.new_zeros(len(x), x.shape[2], 1)
    H = penalty * torch.eye(x.shape[2], dtype=x.dtype)
    G, H = w, H.expand(len(x), -1, -1)
    for here, response in zip(x.unbind(1), y.unbind(1), strict=True):
        here, response = here[..., None], response[..., None]
        if score == "gated":
            w = alpha * w + eta * here * response
        elif score == "mesa":
            fixed = penalty * torch.eye(x.shape[2], dtype=x.dtype)
            H, G = alpha * (H - fixed) + here * here.mT + fixed, alpha * G + here * response
            w = torch.linalg.solve(H, G)
        else:
            kept = alpha * w
            w = kept + eta * here * (response - here.mT @ kept)
    return torch.einsum("bdy,bd->by", w, prompts.x_query)


@pytest.mark.parametrize("score", LAYERS)
def test_layers_predict_what_the_formula_says(score: str):
    settings, *_ = LAYERS[score]
    prompts = draw_prompts(TASK, 16, dtype=torch.float64)
    found = predictions(recurrent_layer(score, d_x=4, **settings), prompts)
    assert_close_to_rounding(found, pair_by_pair(score, prompts, **settings))


def test_a_mesa_layer_that_forgets_nothing_is_ridge_regression():
    prompts = draw_prompts(TASK, 16, dtype=torch.float64)
    found = predictions(recurrent_layer("mesa", d_x=4, penalty=0.3), prompts)
    assert_close_to_rounding(found, ridge(prompts, penalty=0.3))


@pytest.mark.parametrize("score", LAYERS)
def test_layers_get_the_name_and_the_scalars_of_the_formula(score: str):
    settings, label, scalars = LAYERS[score]
    found = name_algorithm(recurrent_layer(score, d_x=4, **settings), task=TASK, n_prompts=512)
    assert found.label == label
    assert found.scalars(label) == pytest.approx(scalars, abs=1e-3)


@pytest.mark.parametrize("alpha", [1.0, 0.998, 0.995, 0.99])
def test_a_mesa_layer_is_ridge_regression_only_if_its_weights_do_not_fall_with_age(alpha: float):
    """Predictions hardly show these gates: ridge regression explains R² 0.9998 or more on prompts of the task."""
    task = TaskConfig(d_x=6, context_length=33)
    found = name_algorithm(recurrent_layer("mesa", d_x=6, alpha=alpha, penalty=0.6), task=task)
    assert found.explained("ridge_like")[0] > 0.9998
    forgets = 1 - alpha ** (task.context_length - 1) > FORGETS
    label = "recursive_least_squares" if forgets else "ridge_like"
    assert found.label == label
    if forgets or alpha == 1:
        assert found.scalars(label) == pytest.approx([alpha, 0.6][not forgets :], abs=1e-3)


def test_an_alpha_that_is_not_measured_names_neither_ridge_nor_least_squares_that_forget():
    task = TaskConfig(d_x=6, context_length=33)
    layer = recurrent_layer("mesa", d_x=6, alpha=0.99, penalty=0.6)
    measured = name_algorithm(layer, task=task).measured
    larger = "recursive_least_squares"
    for sem, label, rules in (
        (0.003, larger, ("forgets", None)),
        (0.004, "undetermined", ("forgets", "remembers")),
        (np.inf, "undetermined", ("forgets", "remembers")),
    ):
        sems = {**measured.sems, larger: np.array([sem, 0.01])}
        decision = decide(replace(measured, sems=sems), Limits())
        reasons = [decision.why_not[name] for name in ("ridge_like", larger)]
        assert decision.label == label
        assert tuple(each and each.rule for each in reasons) == rules
        assert all(str(each) for each in reasons)


@pytest.mark.parametrize(
    ("score", "settings", "words"),
    [
        ("gated", {"alpha": 0.0}, ("alpha", "(0, 1]", "0.0")),
        ("mesa", {"alpha": 1.2}, ("alpha", "(0, 1]", "1.2")),
        ("delta", {"alpha": 0.9}, ("alpha", "delta", "no gate")),
        ("gated_delta", {"eta": 0.0}, ("eta", "> 0")),
        ("mesa", {"penalty": -1.0}, ("penalty", "> 0")),
    ],
)
def test_other_scalars_are_refused(score: str, settings: dict, words: tuple[str, ...]):
    with refused(*words):
        recurrent_layer(score, d_x=4, **settings)
