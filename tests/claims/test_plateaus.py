"""Plateaus of the flow against the levels, heads and jumps that theory foretells."""

import numpy as np
import plotly.graph_objects as go
import pytest

from analyses.lib.plateaus import crossings, drops, plateaus
from analyses.lib.theory.linear import fixed_point
from analyses.lib.theory.linear_jumps import first_jump_bound
from mechinterp.theory.linear import modes, population_moments
from mechinterp.theory.linear_heads import MergedHeads, SeparateHeads, merged_heads, separate_heads
from mechinterp.training.linear.flow import Flow, flow

MOMENTS = population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31)
FOUND = modes(MOMENTS)
SEEDS = range(3)


def trained(heads, moments=MOMENTS):
    return flow(heads, moments, duration=1e7, until_loss=modes(moments).levels[-1] + 1e-7)


@pytest.fixture(scope="module")
def runs():
    """Flows and plateaus by size of the initial weights, over seeds."""
    table = {}
    for std in (1e-2, 1e-3):
        flows = [trained(separate_heads(5, 4, std=std, seed=seed)) for seed in SEEDS]
        table[std] = [(run, plateaus(run, MOMENTS)) for run in flows]
    return table


@pytest.mark.slow
@pytest.mark.parametrize(("std", "tolerance"), [(1e-2, 1e-3), (1e-3, 1e-5)])
def test_loss_rests_on_every_level_in_turn(runs, std, tolerance):
    for _, found in runs[std]:
        assert len(found.drop_time) == 4
        assert found.n_learned.tolist() == [0, 1, 2, 3, 4]
        assert np.abs(found.loss - FOUND.levels).max() < tolerance
        np.testing.assert_array_equal(found.level, FOUND.levels)
        # The largest eigenvalue first, one at a time.
        expected = np.tri(5, 4, -1)
        assert np.abs(found.learned - expected).max() < (0.05 if std == 1e-2 else 2e-3)
        assert np.all(np.diff(np.sort(np.concatenate([found.time, found.drop_time]))) > 0)
        assert np.all((found.time[:-1] < found.drop_time) & (found.drop_time < found.time[1:]))


@pytest.mark.slow
@pytest.mark.parametrize(("std", "cosine", "norm"), [(1e-2, 1e-3, 3e-2), (1e-3, 1e-3, 1e-3)])
def test_one_head_holds_each_direction(runs, std, cosine, norm):
    misses = []
    for run, found in runs[std]:
        for row in range(1, 5):
            head = np.abs(found.value[row] * found.key_cosine[row, :, 0, row - 1]).argmax()
            v = abs(found.value[row, head])
            cosines = found.key_cosine, found.query_cosine
            misses += [1 - abs(cosine[row, head, 0, row - 1]) for cosine in cosines]
            place = int(np.flatnonzero(run.time == found.time[row])[0])
            for part in (run.heads.K, run.heads.Q):
                assert abs(np.linalg.norm(part[place, head]) / v - 1) < norm
            assert abs(v / FOUND.targets[row - 1] ** (1 / 3) - 1) < 0.03
    assert np.median(misses) < cosine


@pytest.mark.slow
@pytest.mark.parametrize(("std", "median", "worst"), [(1e-2, 1e-6, 1e-2), (1e-3, 1e-10, 1e-6)])
def test_plateaus_are_principal_component_regression(runs, std, median, worst):
    distance = np.array([found.pcr_distance for _, found in runs[std]])
    assert np.median(distance) < median
    assert distance.max() < worst


@pytest.mark.slow
@pytest.mark.parametrize(("std", "median"), [(1e-2, 2e-2), (1e-3, 5e-3)])
def test_jumps_come_when_foretold(runs, std, median):
    errors = []
    for run, found in runs[std]:
        assert found.predicted.mode.tolist() == [0, 1, 2, 3]
        errors.append(np.abs(found.predicted.time / found.crossing_time - 1))
        start = SeparateHeads(v=run.heads.v[0], K=run.heads.K[0], Q=run.heads.Q[0])
        assert first_jump_bound(start, FOUND) < found.crossing_time[0]
    assert np.median(errors, axis=0).max() < median
    assert np.max(errors, axis=0)[0] < 1e-3


@pytest.mark.slow
def test_plateaus_last_longer_with_smaller_weights(runs):
    for (_, large), (_, small) in zip(runs[1e-2], runs[1e-3], strict=True):
        assert abs(small.crossing_time[0] / large.crossing_time[0] / 10 - 1) < 0.04


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
        rule = f"must have at least 3 times and a falling loss, got {len(run.time)} times"
        with pytest.raises(ValueError, match=rule):
            drops(run)


@pytest.mark.slow
def test_pcr_distance_is_that_of_the_predictors(runs):
    run, found = runs[1e-2][0]
    rows = np.searchsorted(run.time, found.time)
    for row, place in enumerate(rows):
        difference = run.M[place] - fixed_point(FOUND, range(row))
        expected = (MOMENTS.zz * np.multiply.outer(difference, difference)).sum() / MOMENTS.yy
        np.testing.assert_allclose(found.pcr_distance[row], expected, rtol=1e-9, atol=1e-18)


@pytest.mark.slow
def test_frames_and_figures(runs):
    _, found = runs[1e-2][0]
    frame = found.to_frame()
    assert len(frame) == 5 * 4
    row = frame[(frame.plateau == 2) & (frame["mode"] == 1)].iloc[0]
    assert (row.loss, row.learned, row.n_learned) == (found.loss[2], found.learned[2, 1], 2)
    figure = found.plot()
    dashes = [shape.line.dash for shape in figure.layout.shapes]
    assert (dashes.count("dot"), dashes.count("dash")) == (5, 4)
    levels = [shape.y0 for shape in figure.layout.shapes if shape.line.dash == "dot"]
    np.testing.assert_allclose(levels, FOUND.levels)
    marks = [shape.x0 for shape in figure.layout.shapes if shape.line.dash == "dash"]
    np.testing.assert_allclose(marks, found.predicted.time)
    assert figure.data[0].x[0] > 0
    assert isinstance(found.plot_learned(), go.Figure)
    assert repr(found).startswith("Plateaus(4 drops, plateaus at 1, 0.64")
