"""The logged steps of a training, and those from which parts of the pattern hold."""

import numpy as np
import pandas as pd
import pytest

from analyses.lib.milestones import PATTERNS, milestones
from mechinterp.analysis.training.history import History, history

SCALARS = ("omega", "mu", "qk_diagonal", "ov_last_entry")

# Two heads over five rows, and a third whose share of the step is below 1% from step 20 on.
OMEGA = np.array(
    [[0.1, 0.2, 0.1], [0.3, -0.4, 0.1], [0.6, -0.2, 0.001], [0.2, -0.2, 0.0], [0.2, -0.2, 0.0]]
)
MU = np.array(
    [[-1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [2.0, -1.0, -0.1], [3.0, -3.0, 0.0], [3.0, -3.1, 0.0]]
)


def run_of(mu: np.ndarray = MU) -> History:
    step, head = np.repeat([0, 10, 20, 30, 40], 3), np.tile([0, 1, 2], 5)
    scales = {"omega": OMEGA.ravel(), "mu": mu.ravel(), "ov_last_entry": 1.0}
    scales["qk_diagonal"] = np.where(step == 20, 0.7, 1.0)
    losses = {"loss": 1.0, "eval_loss": 1.0}
    return history(pd.DataFrame({"step": step, "head": head, **losses, **scales}))


RUN = run_of()


def test_each_part_has_the_step_from_which_it_holds_to_the_end():
    found = milestones(RUN, tail=2)
    # The third head, of the wrong sign at step 20, is not active there.
    assert [getattr(found, name) for name in PATTERNS] == [10, 30, 0, 30, 30]
    np.testing.assert_allclose(found.peak_omega, [0.6, 0.4, 0.1])
    assert found.peak_step.tolist() == [20, 10, 10]
    np.testing.assert_allclose(found.overshoot, [3, 2, np.inf])


def test_a_part_that_does_not_hold_at_the_end_has_no_step():
    broken = run_of(np.vstack([MU[:-1], [3.0, -2.0, 0.0]]))
    assert np.isnan(milestones(broken).zero_sum)
    assert milestones(broken).sign_matching == 10


@pytest.fixture
def rows() -> pd.DataFrame:
    """Two heads, three logged steps; every value tells its step and head."""
    values = [
        {"step": step, "head": head, "loss": 1 / (step + 1), "eval_loss": 2.0 + step}
        | {name: 100.0 * place + step + head / 10 for place, name in enumerate(SCALARS)}
        for step in (0, 1000, 2000)
        for head in (0, 1)
    ]
    return pd.DataFrame(values)


def test_values_find_their_step_and_head(rows):
    found = history(rows)
    assert found.step.tolist() == [0, 1000, 2000]
    np.testing.assert_allclose(found.omega, [[0, 0.1], [1000, 1000.1], [2000, 2000.1]])
    np.testing.assert_allclose(found.mu[2], [2100, 2100.1])
    assert found.eval_loss.tolist() == [2, 1002, 2002]


def test_order_of_rows_does_not_matter_and_the_frame_round_trips(rows):
    shuffled = rows.sample(frac=1, random_state=0).sort_values("step", kind="stable")
    frame = history(shuffled).to_frame()
    pd.testing.assert_frame_equal(frame[rows.columns], rows, check_dtype=False)


def test_a_mean_over_few_updates_is_not_drawn():
    step = np.array([0, 500, 1000, 1001])
    heads = {name: 1.0 for name in SCALARS}
    rows = pd.DataFrame({"step": step, "head": 0, "loss": 0.5, "eval_loss": 0.25, **heads})
    traces = {trace.name: trace for trace in history(rows).plot_loss().data}
    assert np.isnan(traces["loss"].y).tolist() == [False, False, True]
    assert traces["eval_loss"].y.tolist() == [0.25, 0.25, 0.25]
