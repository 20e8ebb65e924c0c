"""Readings of a response: each rule on learners that have the property and on learners that have not."""

import numpy as np
import pytest
import torch

from analyses.recurrent.learners import recursive
from analyses.response.calibration import right_of
from analyses.response.families import (
    BATCH,
    FAMILIES,
    KERNEL,
    NOT_LINEAR,
    ONLINE,
    RLS,
    STILL,
    Drawn,
    along,
    by_entries,
    delta,
    smoother,
    stepped,
)
from mechinterp import response
from mechinterp.analysis.response.reading import NO_FILTER
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import draw_prompts

TASK = TaskConfig(d_x=4, context_length=24, noise_var=0.1)
SHARP = smoother(lambda x, q: 1.2 * (x @ q.mT)[..., 0], 1.0)


@pytest.mark.parametrize(
    ("learner", "reading"),
    [
        (along(delta(0.1, 1.0, None), averaged=True), ONLINE),
        (along(delta(0.003, 1.0, None)), ONLINE),
        (SHARP, KERNEL),
        (by_entries(torch.abs), NOT_LINEAR),
        (by_entries(lambda y: y.clamp(max=0) - y.abs()), NOT_LINEAR),
        (by_entries(lambda y: y + 0.1 * y.abs()), STILL),
    ],
    ids=["averaged", "small steps", "kernel", "even", "mostly even", "hardly even"],
)
def test_readings_that_once_were_others(learner, reading: str) -> None:
    """An average over the path weighs old pairs most, small steps all alike; a sharp kernel leaves much, and is linear."""
    assert response(learner, task=TASK, n_prompts=512).reading == reading


def test_headline_names_least_squares_only_if_a_filter_describes_the_learner() -> None:
    """Strong forgetting leaves few pairs that count, which no filter over all of them describes."""
    for alpha, named in ((0.95, True), (0.7, False)):
        found = response(recursive(alpha, 0.4), task=TASK, n_prompts=512)
        left = found.left.set_index("columns").left["filter"]
        assert (found.reading, left < NO_FILTER) == (RLS, named)
        assert found.headline.startswith(RLS) == named
        assert "alpha" in found.headline
        assert ("no known filter" in found.headline) == (not named)


def test_a_learner_that_no_filter_describes_gets_no_form_of_a_filter() -> None:
    """Half of the first y does not depend on x: every form leaves all of it."""
    found = response(lambda prompts: prompts.y[:, 0] / 2, task=TASK, n_prompts=1024)
    assert found.left["left"].min() > 0.9
    assert found.headline == "no interaction, no known filter"
    assert "descent" not in str(found)
    assert "shrinks" not in str(found)


def test_right_readings_of_trained_models_come_from_their_predictions() -> None:
    assert right_of(stepped([0.7]), TASK, 1) == {BATCH, STILL}
    assert right_of(stepped([0.7, 0.4]), TASK, 2) == {BATCH}
    assert right_of(SHARP, TASK, 1) == {KERNEL}
    assert right_of(by_entries(torch.abs), TASK, 1) == {NOT_LINEAR}


def test_families_draw_other_learners_for_other_seeds() -> None:
    def build(name: str, seed: int) -> Drawn:
        return FAMILIES[name](np.random.default_rng(seed))

    assert len(FAMILIES) == 20
    for name in FAMILIES:
        one, other = build(name, 0), build(name, 1)
        prompts = draw_prompts(one.task, 4, dtype=torch.float64)
        assert one.learner(prompts).shape == (4, 1)
        assert one.right
        if other.task.d_x == one.task.d_x:
            assert not torch.equal(one.learner(prompts), other.learner(prompts))
