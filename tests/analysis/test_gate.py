"""The reading of a response as the gate of names: what is asked, and where fits start."""

from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from analyses.recurrent.learners import recursive as weighted
from analyses.recurrent.learners import times
from mechinterp import TaskConfig, load, response, sample_prompts
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.response.gate import Gate, gate_of
from mechinterp.analysis.response.projection import FewPromptsError
from mechinterp.analysis.response.reading import not_linear
from mechinterp.analysis.response.response import kind_frames
from mechinterp.icl.algorithm import Algorithm, PromptMoments, Scalar, without_path
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.along_pairs import ALONG_PAIRS
from mechinterp.icl.predictors import ridge, vanilla_gd
from mechinterp.icl.prompts import Prompts

TASK = TaskConfig(d_x=3, context_length=20, noise_var=0.1)


def forgetting(prompts: Prompts, eta: float, alpha: float) -> torch.Tensor:
    """One step of descent in which a pair counts alpha per later pair."""
    n = prompts.x.shape[1]
    kept = alpha ** torch.arange(n - 1, -1, -1, dtype=prompts.y.dtype)
    w = eta * prompts.x.mT @ (kept[:, None] * prompts.y) / n
    return (prompts.x_query[:, None] @ w)[:, 0]


def delta_rule(prompts: Prompts, eta: float, gate: float) -> torch.Tensor:
    w = torch.zeros_like(prompts.x[:, 0, :, None] * prompts.y[:, 0, None])
    for x, y in zip(prompts.x.unbind(1), prompts.y.unbind(1), strict=True):
        missed = y - (x[:, None] @ w)[:, 0] * gate
        w = gate * w + eta * x[..., None] * missed[:, None]
    return (prompts.x_query[:, None] @ w)[:, 0]


def recursive(prompts: Prompts, alpha: float, penalty: float) -> torch.Tensor:
    n = prompts.x.shape[1]
    kept = alpha ** torch.arange(n - 1, -1, -1, dtype=prompts.y.dtype)[:, None]
    S = prompts.x.mT @ (kept * prompts.x) + penalty * torch.eye(3, dtype=prompts.y.dtype)
    w = torch.linalg.solve(S, prompts.x.mT @ (kept * prompts.y))
    return (prompts.x_query[:, None] @ w)[:, 0]


@pytest.mark.parametrize(
    ("learner", "along", "starts"),
    [
        (partial(ridge, penalty=0.8), False, {"penalty": 0.8, "c": 0.04}),
        (partial(vanilla_gd, eta=0.7), False, {}),
        (partial(forgetting, eta=0.9, alpha=0.9), True, {"eta": 0.9, "alpha": 0.9}),
        (partial(delta_rule, eta=0.08, gate=0.95), True, {"eta": 0.08, "gate": 0.95}),
        (partial(recursive, alpha=0.9, penalty=0.5), True, {"alpha": 0.9}),
    ],
    ids=["ridge", "step", "forgetting", "delta", "rls"],
)
def test_starts_are_near_the_scalars_of_the_learner(learner, along: bool, starts: dict) -> None:
    gate = gate_of(response(learner, task=TASK, n_prompts=256))
    assert gate.along == along
    for name, value in starts.items():
        assert gate.starts[name] == pytest.approx(value, rel=0.2), name
    assert all(np.isfinite(value) for value in gate.starts.values())


@pytest.mark.parametrize(
    ("learner", "task"),
    [
        (partial(ridge, penalty=0.8), TASK),
        (partial(ridge, penalty=0.8), TaskConfig(d_x=3, d_y=2, context_length=20)),
        (partial(ridge, penalty=0.8), TaskConfig(d_x=3, context_length=20, n_tasks=8)),
        (partial(delta_rule, eta=0.08, gate=0.95), TaskConfig(d_x=3, context_length=20, drift=0.9)),
        ("checkpoints/garg-tiny-s0", None),
    ],
    ids=["ridge", "two responses", "pool", "drift", "model"],
)
def test_the_part_of_a_response_for_the_gate_has_the_same_numbers(learner, task) -> None:
    source = load(learner) if isinstance(learner, str) else learner
    whole = response(source, task=task, n_prompts=256)
    part = kind_frames(source, task=task, n_prompts=256)
    assert gate_of(part) == gate_of(whole)
    assert not_linear(part) == not_linear(whole)
    pd.testing.assert_frame_equal(part.position, whole.position, check_exact=True)
    pd.testing.assert_frame_equal(part.left, whole.left, check_exact=True)
    rows = whole.symmetries.symmetry.isin(part.symmetries.symmetry)
    kept = ["symmetry", "mismatch", "mismatch_sem"]
    expected = whole.symmetries[rows][kept].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        part.symmetries[kept].reset_index(drop=True), expected, check_exact=True
    )


def test_learners_along_the_pairs_are_asked_of_such_learners_alone() -> None:
    online = Algorithm(
        "an online learner",
        "online",
        (
            Scalar("eta", lambda moments: 0.5, where="once"),
            Scalar("gate", lambda moments: 1.0, where="once"),
        ),
        without_path(lambda moments, eta, gate: moments.b),
        has_path=False,
        along_pairs=True,
    )
    members = (*ALGORITHMS, online)
    batch = tuple(each for each in ALGORITHMS if not each.along_pairs)
    assert Gate("batch", False, 20).asked(members) == batch
    gate = Gate("online", True, 20, {"eta": 0.1, "c": 2.0})
    contained = {"gradient_descent", "ridge_like"}
    asked = gate.asked(members)
    assert {each.label for each in asked if not each.along_pairs} == contained
    assert asked[-4:] == (*ALONG_PAIRS, online)
    none_along = tuple(each for each in batch if each.label not in contained)
    assert gate.asked(none_along) == none_along
    moments = PromptMoments(sample_prompts(TASK, 8, seed=0), TASK)
    first = gate.first_scalars(members, moments)
    assert set(first) == {"online", "online_gd", "forgetting_gd"}
    assert first["online"].tolist() == [0.1, 1.0]


def test_largest_fall_is_that_of_the_lower_end_of_alpha() -> None:
    gate = Gate("recursive least squares", True, 21)
    assert gate.largest_fall(0.99, 0.0) == pytest.approx(1 - 0.99**20)
    assert gate.largest_fall(0.99, 0.01) == pytest.approx(1 - 0.96**20)
    assert gate.largest_fall(1.0, 0.0) == 0
    assert gate.largest_fall(0.9, np.inf) == 1  # an alpha that is not measured excludes nothing


@pytest.mark.slow
def test_names_are_gated_unless_the_pairs_are_a_set_to_rounding() -> None:
    batch = name_algorithm(partial(ridge, penalty=0.8), task=TASK)
    assert (batch.label, batch.measured.gate) == ("ridge_like", None)
    along = name_algorithm(partial(delta_rule, eta=0.08, gate=0.95), task=TASK)
    assert along.measured.gate is not None
    assert along.measured.gate.reading == "online"
    assert along.label == "online_gd"


@pytest.mark.slow
def test_names_have_a_gate_although_few_of_their_prompts_are_effective() -> None:
    """Strong forgetting of seven entries: a few prompts make up most of the squared predictions."""
    task = TaskConfig(d_x=7, context_length=28, noise_var=0.05, drift=0.92)
    learner = times(weighted(0.65, 0.5), task.drift)
    with pytest.raises(FewPromptsError):
        response(learner, task=task, n_prompts=256)
    found = name_algorithm(learner, task=task)
    assert found.label == "recursive_least_squares"
    assert found.measured.gate is not None
    assert found.measured.gate.reading == "recursive least squares"
    np.testing.assert_allclose(found.scalars(found.label), [0.65, 0.5], atol=1e-3)
