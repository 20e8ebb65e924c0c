"""What a slider over training shows is what lies in the snapshots and the history; each step is analysed by itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.training import kept_steps
from mechinterp.analysis.training.deep_snapshots import deep_snapshots
from mechinterp.analysis.training.kept_steps import KeptSteps
from mechinterp.analysis.training.snapshots import training_snapshots
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import stack
from mechinterp.models.run.evaluation import evaluation_prompts
from tests.conftest import CHECKPOINTS


@pytest.fixture
def grown(tmp_path: Path) -> Checkpoint:
    """Two heads that are a kernel smoother at step 10 and a gradient step at step 20; no history."""
    kernel = stack([kernel_head(0.5, 1.5, d_x=5), zero_head(d_x=5)])
    pair = debiased_gradient_step(0.88, 0.02, d_x=5)
    config = override(ExperimentConfig(), "model.n_heads=2")
    save(tmp_path / "grown", config, pair, step=20, snapshots={10: kernel, 20: pair})
    return load(tmp_path / "grown")


def test_each_snapshot_is_classified_as_a_model_of_its_own(grown: Checkpoint):
    found = training_snapshots(grown, n_prompts=256)
    assert found.step.tolist() == [10, 20]
    assert found.pattern == ("kernel_regression", "debiased_gd")
    assert found.labels == (("positive", "dummy"), ("positive", "negative"))
    assert repr(found) == "Snapshots(2, kernel_regression to debiased_gd)"
    frame = found.to_frame()
    assert frame["step"].tolist() == [10, 10, 20, 20]
    assert frame["omega_mean"].tolist() == pytest.approx([0.5, 0, 0.02, -0.02])
    # Without a history there is no loss.
    assert np.isnan(found.eval_loss).all()


def test_frames_hold_the_circuits_of_their_step_on_one_scale(grown: Checkpoint):
    found = training_snapshots(grown, n_prompts=256)
    for figure, name, rows in ((found.plot(), "QK", 5), (found.plot_ov(), "OV", 6)):
        assert [frame.name for frame in figure.frames] == ["10", "20"]
        drawn = [getattr(circuits(grown.snapshots[step]), name)[:, :rows] for step in (10, 20)]
        if name == "OV":  # strips: a row for each response
            drawn = [matrices.swapaxes(1, 2) for matrices in drawn]
        for frame, matrices in zip(figure.frames, drawn, strict=True):
            for trace, matrix in zip(frame.data, matrices, strict=True):
                np.testing.assert_allclose(trace.z, matrix, rtol=1e-6)
        for trace in figure.data:
            assert trace.zmax == -trace.zmin == pytest.approx(np.abs(drawn).max())
        # It begins at the last step.
        np.testing.assert_allclose(figure.data[0].z, drawn[1][0], rtol=1e-6)
        assert figure.layout.sliders[0].active == 1
        assert figure.layout.title.text == f"{name} circuits at step 20"


@pytest.mark.slow
def test_loss_and_mark_are_those_of_the_history():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    found = training_snapshots(checkpoint, n_prompts=64)
    history = checkpoint.history.set_index("step")["eval_loss"]
    expected = [history.loc[step].iloc[0] for step in found.step]
    np.testing.assert_allclose(found.eval_loss, expected)
    figure = found.plot_loss()
    marks = {frame.name: (frame.data[0].x[0], frame.data[0].y[0]) for frame in figure.frames}
    assert marks["5,000"] == (5000, pytest.approx(history.loc[5000].iloc[0]))
    # Step 0 has no place on a logarithmic axis.
    assert marks["0"] == (500, pytest.approx(history.loc[0].iloc[0]))
    assert {frame.traces for frame in figure.frames} == {(1,)}
    assert found.pattern[-1] == classify(checkpoint).pattern


def test_the_loss_between_logged_steps_is_that_of_the_last_one():
    curve, step = np.array([[10.0, 3.0], [20.0, 2.0]]), np.array([5, 10, 19, 20, 99])
    np.testing.assert_array_equal(KeptSteps(step=step, curve=curve).eval_loss, [np.nan, 3, 3, 2, 2])


def test_many_large_snapshots_are_thinned_and_the_last_is_kept(
    grown: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    pair = grown.snapshots[20]
    many = Checkpoint(grown.path, grown.config, 9, grown.weights)
    many.__dict__["snapshots"] = dict.fromkeys(range(10), pair)
    assert kept_steps.kept_steps(many) == list(range(10))
    monkeypatch.setattr(kept_steps, "MAX_NUMBERS", 4 * pair.circuits.QK.numel())
    assert kept_steps.kept_steps(many) == [0, 3, 6, 9]


@pytest.mark.slow
def test_each_step_is_masked_on_its_own():
    checkpoint = load(CHECKPOINTS / "sparse-h4-noise0.1-s0")
    some = evaluation_prompts(checkpoint, n_prompts=64)
    found = deep_snapshots(checkpoint, some)
    assert found.step.tolist() == [0, 1000, 2000, 5000, 10_000, 20_000, 50_000]
    for row in (0, 2):
        own = ablate_heads(checkpoint.snapshots[int(found.step[row])], some)
        np.testing.assert_array_equal(found.rise[row], own.rise)
        np.testing.assert_array_equal(found.importance[row], own.importance)
        assert (found.risk[row], found.risk_sem[row]) == (own.full_risk, own.full_risk_sem)
        assert found.effective_heads[row].tolist() == own.effective_heads.tolist()
    history = checkpoint.history
    assert found.eval_loss[-1] == history["eval_loss"].iloc[-1]
    frame = found.to_frame()
    assert len(frame) == 7 * 4
    assert frame.top_rise[9] == found.rise[2, 1].max()
    shown = [np.array(each.data[0].z) for each in found.plot().frames]
    np.testing.assert_allclose(shown, found.importance, rtol=1e-6)
    assert [each.name for each in found.plot_loss().frames][:2] == ["0", "1,000"]
    assert repr(found).startswith("DeepSnapshots(7, risk ")


@pytest.mark.parametrize("analysis", [training_snapshots, deep_snapshots])
def test_a_checkpoint_without_snapshots_is_refused(analysis: Callable, tmp_path: Path):
    config = override(ExperimentConfig(), "model.n_heads=1")
    save(tmp_path / "one", config, zero_head(d_x=5), step=0)
    rule = f"{analysis.__name__} needs a checkpoint with snapshots, got .*one without"
    with pytest.raises(ValueError, match=rule):
        analysis(load(tmp_path / "one"))
