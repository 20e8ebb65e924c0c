from dataclasses import replace

import numpy as np
import pytest

from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.analysis.training.milestones import PATTERNS, milestones
from mechinterp.analysis.training.over_training import TrainingDynamics

# Two heads over five rows, and a third whose share of the step is below 1% from step 20 on.
OMEGA = np.array(
    [[0.1, 0.2, 0.1], [0.3, -0.4, 0.1], [0.6, -0.2, 0.001], [0.2, -0.2, 0.0], [0.2, -0.2, 0.0]]
)
MU = np.array(
    [[-1.0, 1.0, 1.0], [1.0, -1.0, 1.0], [2.0, -1.0, -0.1], [3.0, -3.0, 0.0], [3.0, -3.1, 0.0]]
)
ONES = np.ones((5, 3))
RUN = TrainingDynamics(
    step=np.array([0, 10, 20, 30, 40]),
    loss=np.ones(5),
    eval_loss=np.ones(5),
    omega=OMEGA,
    mu=MU,
    qk_diagonal=np.where(np.arange(5)[:, None] == 2, 0.7, ONES),
    ov_last_entry=ONES,
)


def test_each_part_has_the_step_from_which_it_holds_to_the_end():
    found = milestones(RUN, tail=2)
    assert (
        found.sign_matching == 10
    )  # the third head, of the wrong sign at step 20, is not active there
    assert found.diagonal == 30
    assert found.last_entry == 0
    assert found.zero_sum == 30
    assert found.homogeneous == 30
    np.testing.assert_allclose(found.peak_omega, [0.6, 0.4, 0.1])
    assert found.peak_step.tolist() == [20, 10, 10]
    np.testing.assert_allclose(found.overshoot, [3, 2, np.inf])


def test_a_part_that_does_not_hold_at_the_end_has_no_step():
    broken = replace(RUN, mu=np.vstack([MU[:-1], [3.0, -2.0, 0.0]]))
    assert np.isnan(milestones(broken).zero_sum)
    assert milestones(broken).sign_matching == 10


def test_thresholds_are_arguments():
    strict = Thresholds(share=1e-5)
    assert milestones(RUN, thresholds=strict).sign_matching == 30
    assert milestones(RUN, thresholds=Thresholds(zero_sum=0.3)).zero_sum == 20


def test_shares_and_group_sums():
    np.testing.assert_allclose(RUN.share[0], [0.25, 0.5, 0.25])
    np.testing.assert_allclose(RUN.group_mu[1], [2, -1])
    nothing = replace(RUN, mu=np.zeros_like(MU))
    assert not nothing.share.any()


def test_frame_figure_and_repr():
    found = milestones(RUN)
    assert found.to_frame()["pattern"].tolist() == list(PATTERNS)
    assert found.to_frame()["step"].tolist() == [10, 30, 0, 30, 30]
    assert found.plot().data[0].y == pytest.approx([10, 30, 0, 30, 30])
    assert repr(found) == (
        "Milestones(steps: sign_matching 10, diagonal 30, last_entry 0, zero_sum 30, homogeneous 30)"
    )
    assert [trace.name for trace in RUN.plot_groups().data] == [
        "positive heads",
        "negative heads",
        "all",
    ]
