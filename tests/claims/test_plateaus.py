"""Plateaus of the flow against the levels, heads and jumps that theory foretells."""

import numpy as np
import pytest

from analyses.lib.plateaus import crossings, drops, plateaus
from analyses.lib.theory.linear import fixed_point
from mechinterp.theory.linear import (
    MergedHeads,
    SeparateHeads,
    merged_heads,
    modes,
    population_moments,
    separate_heads,
)
from mechinterp.training.linear import Flow, flow
from tests.conftest import refused

MOMENTS = population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31)
FOUND = modes(MOMENTS)


def trained(heads, moments=MOMENTS):
    return flow(heads, moments, duration=1e7, until_loss=modes(moments).levels[-1] + 1e-7)


def test_merged_heads_have_one_drop():
    for std in (1e-2, 1e-3, 1e-5):
        found = plateaus(trained(merged_heads(8, 4, std=std, seed=0)), MOMENTS)
        assert len(found.drop_time) == 1
        assert found.n_learned.tolist() == [0, 4]
        np.testing.assert_allclose(found.loss, FOUND.levels[[0, -1]], atol=1e-3)
        assert found.key_cosine.shape == found.query_cosine.shape == (2, 8, 0, 4)
        assert found.predicted.time.size == 0


@pytest.mark.slow
def test_too_few_heads_leave_levels_unreached():
    run = flow(separate_heads(2, 4, std=1e-2, seed=0), MOMENTS, duration=1e5)
    found = plateaus(run, MOMENTS)
    assert len(found.drop_time) == len(found.predicted.time) == 2
    assert np.isnan(found.crossing_time).tolist() == [False, False, True, True]
    np.testing.assert_allclose(found.loss, FOUND.levels[:3], atol=1e-3)


@pytest.mark.slow
def test_rank_two_has_no_foretold_jumps_but_plateaus():
    found = plateaus(trained(separate_heads(3, 4, std=1e-3, seed=0, rank=2)), MOMENTS)
    assert found.predicted.time.size == 0
    assert found.key_cosine.shape[2] == 2
    np.testing.assert_allclose(found.loss[[0, 2, 4]], FOUND.levels[[0, 2, 4]], atol=1e-4)


@pytest.mark.slow
def test_a_rotated_problem_is_described_in_its_own_eigenvectors():
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    moments = population_moments((basis * [0.4, 0.3, 0.2, 0.1]) @ basis.T, context_length=31)
    vectors, heads = modes(moments).vectors, separate_heads(5, 4, std=1e-2, seed=0)
    same = SeparateHeads(v=heads.v, K=heads.K @ vectors.T, Q=heads.Q @ vectors.T)
    found, plain = plateaus(trained(same, moments), moments), plateaus(trained(heads), MOMENTS)
    np.testing.assert_allclose(found.crossing_time, plain.crossing_time, rtol=1e-3)
    np.testing.assert_allclose(found.predicted.time, plain.predicted.time, rtol=1e-4)
    assert np.abs(np.abs(found.key_cosine[4]) - np.abs(plain.key_cosine[4])).max() < 1e-2


def made_up(descent, loss, time=None):
    """A run of one head in one dimension with a given course."""
    time = np.arange(float(len(loss))) if time is None else time
    one = np.ones((len(loss), 1))
    heads = MergedHeads(v=one, U=one[:, :, None, None])
    loss, descent = np.array(loss), np.array(descent)
    return Flow(time=time, loss=loss, descent=descent, heads=heads, M=one[..., None], learned=one)


def test_drops_are_maxima_above_a_part_of_the_largest():
    run = made_up([0.0, 5, 1, 3, 3, 2, 1e-3, 2e-3, 0, 4e-4, 0, 4], np.linspace(1, 0, 12))
    assert drops(run).tolist() == [1, 3, 7]


def test_crossings_are_interpolated_between_times():
    run = made_up([1.0] * 4, [1.0, 0.8, 0.4, 0.3], np.array([0.0, 10, 20, 30]))
    times = crossings(run, np.array([1.0, 0.4, 0.3, 0.1]))
    np.testing.assert_allclose(times, [12.5, 25 + 2.5 - 2.5, np.nan], equal_nan=True)
    first = crossings(made_up([1.0, 1], [0.2, 0.1]), np.array([1.0, 0.4]))
    assert first.tolist() == [0]


def test_runs_without_drops_are_refused():
    for run in (made_up([1.0, 1.0], [1.0, 0.9]), made_up([0.0] * 3, [1.0] * 3)):
        with refused("at least 3 times", f"got {len(run.time)} times"):
            drops(run)


@pytest.mark.slow
def test_pcr_distance_is_that_of_the_predictors():
    run = trained(separate_heads(5, 4, std=1e-2, seed=0))
    found = plateaus(run, MOMENTS)
    rows = np.searchsorted(run.time, found.time)
    for row, place in enumerate(rows):
        difference = run.M[place] - fixed_point(FOUND, range(row))
        expected = (MOMENTS.zz * np.multiply.outer(difference, difference)).sum() / MOMENTS.yy
        np.testing.assert_allclose(found.pcr_distance[row], expected, rtol=1e-9, atol=1e-18)
