"""Names of learners that take the pairs one after another, and of those that estimate the noise; the functions are loops of
their own in analyses/recurrent/learners.py."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from analyses.recurrent import learners as make
from mechinterp import TaskConfig, load, name_algorithm
from mechinterp.analysis.multi_layer.naming_rules import UNDETERMINED
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithm_fits import fit_algorithm, scalar_errors
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import kalman, ridge
from mechinterp.icl.prompts import draw_prompts
from tests.conftest import CHECKPOINTS

TASK = TaskConfig(d_x=5, context_length=20)
DRIFTS = replace(TASK, drift=0.95)
FORGETTING, ONLINE, RLS, ADAPTIVE = (
    "forgetting_gd",
    "online_gd",
    "recursive_least_squares",
    "adaptive_ridge",
)
LEVELS = ((0.02, 0.3), (0.7, 0.7))
MEMBERS = {
    "forgetting": (make.forgetting(1.1, 0.93), FORGETTING, [1.1, 0.93]),
    "forgetting, fixed divisor": (make.forgetting(0.9, 0.9, length=20), FORGETTING, [0.9, 0.9]),
    "lms": (make.lms(0.08), ONLINE, [0.08, 1, 0]),
    # eta / (c + |x|^2) is (eta / c) / (1 + |x|^2 / c).
    "normed": (make.normed(0.8, 2.0), ONLINE, [0.4, 1, 0.5]),
    "gated": (make.gated(0.1, 0.95), ONLINE, [0.1, 0.95, 0]),
    "gated and normed": (make.normed(0.8, 2.0, gate=0.97), ONLINE, [0.4, 0.97, 0.5]),
    "rls .95": (make.recursive(0.95, 0.4), RLS, [0.95, 0.4]),
    "rls .99": (make.recursive(0.99, 0.4), RLS, [0.99, 0.4]),
    "textbook": (make.textbook(0.95, 2.0), RLS, [0.95, 2 * 0.95**20]),
    "adaptive": (make.mixed(LEVELS, 0.2), ADAPTIVE, [0.1, 35, 3 / 7, 0.2]),
}
NEAR_MISSES = {
    "momentum": make.momentum(0.05, 0.5),
    "heavy ball": make.heavy_ball(0.5, 0.4, 4),
    "averaged": make.averaged(0.15),
    "falling steps": make.falling(0.3, 0.5),
    "conjugate gradients": make.conjugate_gradients(3),
    "sliding window": make.sliding(15, 0.5),
    "sliding window of a step": make.sliding_step(1.0, 14),
    "two decays": make.two_decays(make.forgetting(1, 0.98), make.forgetting(1, 0.85), 0.5),
    "two decays of rls": make.two_decays(make.recursive(0.98, 0.4), make.recursive(0.9, 0.4), 0.5),
    "gate of x": make.gate_of_x(1.0, 3.0, 1.0),
    "two chunks": make.two_chunks(0.7),
    "three noise levels": make.mixed(((0.01, 0.3), (0.2, 0.4), (4.0, 0.3)), 0.2),
    "kalman": partial(kalman, task=replace(TASK, drift=0.97)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_gets_its_label_and_its_scalars(name: str):
    learner, label, scalars = MEMBERS[name]
    found = name_algorithm(learner, task=TASK)
    assert found.label == label
    np.testing.assert_allclose(found.scalars(label), scalars, atol=1e-3)
    frame = found.scalar_frame()
    assert frame.value.tolist() == found.scalars(label).tolist()
    assert (frame["sem"] < 1e-6).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lms", "rls .95", "forgetting"])
def test_a_member_keeps_its_label_on_a_task_that_drifts(name: str):
    learner, label, scalars = MEMBERS[name]
    found = name_algorithm(learner, task=DRIFTS)
    assert found.label == label
    np.testing.assert_allclose(found.scalars(label), scalars, atol=1e-3)
    assert found.to_frame().loc[0, "other_drift_r2"] == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated", "normed", "rls .95"])
def test_a_member_that_predicts_with_the_next_task_vector_gets_its_label_and_scalars(name: str):
    """The best estimate of the next task vector is rho times that of the last; any other factor is another learner."""
    learner, label, scalars = MEMBERS[name]
    found = name_algorithm(make.times(learner, DRIFTS.drift), task=DRIFTS)
    assert found.label == label
    np.testing.assert_allclose(found.scalars(label), scalars, atol=1e-3)
    numbers = {number.name: number.value for number in found.numbers}
    assert numbers["read_out"] == DRIFTS.drift
    for factor, task in ((0.85, DRIFTS), (1.1, DRIFTS), (DRIFTS.drift - 0.02, TASK)):
        assert name_algorithm(make.times(learner, factor), task=task).label == UNDETERMINED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forgetting", "gated", "rls .95"])
def test_scalars_are_those_of_the_learner_although_its_read_out_is_scaled(name: str):
    """Without the factor, the penalty and the step would make up for it."""
    learner, label, scalars = MEMBERS[name]
    for factor in (0.97, 1.04):
        found = name_algorithm(make.times(learner, factor), task=TASK)
        numbers = {number.name: number.value for number in found.numbers}
        assert found.label == label
        if label == FORGETTING:  # whose step is the factor
            assert "read_out" not in numbers
            scalars = [MEMBERS[name][2][0] * factor, scalars[1]]
        else:
            assert numbers["read_out"] == pytest.approx(factor, abs=1e-4)
        np.testing.assert_allclose(found.scalars(label), scalars, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sign"), [("rls .95", 1), ("textbook", -1)])
def test_the_form_of_the_penalty_is_told_by_other_lengths(name: str, sign: int):
    found = name_algorithm(MEMBERS[name][0], task=TASK)
    (gain,) = [each for each in found.numbers if each.name == "constant_penalty"]
    assert sign * gain.value > 2 * gain.sem > 0
    (said,) = [text for text in found.sentences() if text.startswith("Its penalty")]
    assert ("is constant:" in said) == (sign > 0)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.95, 0.9])
def test_the_kalman_filter_of_its_own_task_has_no_label(rho: float):
    task = replace(TASK, drift=rho)
    assert name_algorithm(partial(kalman, task=task), task=task).label == UNDETERMINED


@pytest.mark.slow
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_has_no_label(name: str):
    assert name_algorithm(NEAR_MISSES[name], task=TASK).label == UNDETERMINED


@pytest.mark.slow
def test_ridge_stays_ridge_and_is_not_asked_for_more():
    for task in (TASK, DRIFTS, replace(TASK, noise_var=LEVELS)):
        found = name_algorithm(partial(ridge, penalty=0.5), task=task)
        assert found.label == "ridge_like"
        assert RLS not in found.members


@pytest.mark.slow
def test_one_penalty_at_the_prompts_level_is_not_one_at_all_levels():
    """On prompts of the low level alone, a learner of two levels predicts nearly as ridge regression does."""
    learner = make.mixed(((0.01, 0.5), (1.0, 0.5)), 0.2)
    found = name_algorithm(learner, task=replace(TASK, context_length=80, noise_var=0.01))
    assert found.explained("ridge_like")[0] > 0.98
    assert found.why_not["ridge_like"] is not None
    assert found.label == ADAPTIVE


def test_errors_of_scalars_cover_the_spread_over_prompts():
    """Recursive least squares with noise: the spread over 40 draws against the stated error."""
    learner = next(each for each in ALGORITHMS if each.label == RLS)
    truth = [0.95, 0.4]
    estimates, errors = [], []
    for seed in range(40):
        prompts = draw_prompts(TASK, 64, seed=seed, dtype=torch.float64)
        moments = PromptMoments(prompts, TASK)
        exact = learner.predictions(moments, truth, 1)[-1]
        generator = torch.Generator().manual_seed(seed)
        noise = 0.05 * torch.randn(exact.shape, generator=generator, dtype=torch.float64)
        fit = fit_algorithm(learner, moments, exact + noise, n_layers=1)
        estimates.append(fit.scalars)
        errors.append(scalar_errors(learner, moments, exact + noise, fit.scalars))
    z = (np.array(estimates) - truth) / np.array(errors)
    # 40 draws: the standard deviation of z is known to 11%.
    assert np.abs(z.std(0) - 1).max() < 0.35


@pytest.mark.slow
@pytest.mark.parametrize("name", ["garg-tiny-s0", "pool-gpt2-none-s0"])
def test_models_whose_pairs_have_places_are_not_taken_for_recurrent_ones(name: str):
    found = name_algorithm(load(CHECKPOINTS / name), n_prompts=128)
    assert found.measured.gate is None or not found.measured.gate.along
    assert not {FORGETTING, ONLINE, RLS, ADAPTIVE} & set(found.members)
