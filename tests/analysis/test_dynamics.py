import numpy as np
import pandas as pd
import pytest

from mechinterp.analysis.training.over_training import SCALARS, training_dynamics


@pytest.fixture
def history() -> pd.DataFrame:
    """Two heads, three logged steps; every value tells its step and head."""
    rows = [
        {"step": step, "head": head, "loss": 1 / (step + 1), "eval_loss": 2.0 + step}
        | {name: 100.0 * place + step + head / 10 for place, name in enumerate(SCALARS)}
        for step in (0, 1000, 2000)
        for head in (0, 1)
    ]
    return pd.DataFrame(rows)


def test_values_find_their_step_and_head(history):
    found = training_dynamics(history)
    assert found.step.tolist() == [0, 1000, 2000]
    np.testing.assert_allclose(found.omega, [[0, 0.1], [1000, 1000.1], [2000, 2000.1]])
    np.testing.assert_allclose(found.mu[2], [2100, 2100.1])
    assert found.eval_loss.tolist() == [2, 1002, 2002]


def test_order_of_rows_does_not_matter_and_the_frame_round_trips(history):
    shuffled = history.sample(frac=1, random_state=0).sort_values("step", kind="stable")
    frame = training_dynamics(shuffled).to_frame()
    pd.testing.assert_frame_equal(frame[history.columns], history, check_dtype=False)


def test_figures_leave_out_step_zero_and_name_heads(history):
    found = training_dynamics(history)
    for figure in (found.plot(), found.plot_mu()):
        assert [trace.name for trace in figure.data] == ["head 0", "head 1"]
        assert list(figure.data[0].x) == [1000, 2000]
    assert {trace.name for trace in found.plot_loss().data} == {"loss", "eval_loss"}


def test_a_history_without_a_column_is_refused(history):
    with pytest.raises(
        ValueError, match="training_dynamics needs a history with mu, qk_diagonal, got one"
    ):
        training_dynamics(history.drop(columns=["mu", "qk_diagonal"]))


def test_a_mean_over_few_updates_is_not_drawn():
    step = np.array([0, 500, 1000, 1001])
    heads = {name: 1.0 for name in SCALARS}
    history = pd.DataFrame({"step": step, "head": 0, "loss": 0.5, "eval_loss": 0.25, **heads})
    traces = {trace.name: trace for trace in training_dynamics(history).plot_loss().data}
    assert np.isnan(traces["loss"].y).tolist() == [False, False, True]
    assert traces["eval_loss"].y.tolist() == [0.25, 0.25, 0.25]
