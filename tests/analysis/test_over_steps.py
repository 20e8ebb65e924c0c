"""An analysis over steps is that analysis of each kept model, beside the loss of the history."""

import json
from pathlib import Path

import numpy as np
import pytest

from mechinterp import over_steps
from mechinterp.analysis import over_steps as module
from mechinterp.analysis.ablation.single import ablate_heads
from mechinterp.analysis.learners.priors import compare_priors
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.one_layer.linear_components import linear_components
from mechinterp.analysis.over_steps import OverSteps
from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.config import ExperimentConfig, override
from mechinterp.models.constructions.one_layer import debiased_gradient_step, kernel_head, zero_head
from mechinterp.models.heads import stack
from mechinterp.models.run.evaluation import evaluation_prompts
from tests.conftest import CHECKPOINTS, Run


@pytest.fixture
def grown(tmp_path: Path) -> Checkpoint:
    """Two heads that are a kernel smoother at step 10 and a gradient step at step 20; no history."""
    kernel = stack([kernel_head(0.5, 1.5, d_x=5), zero_head(d_x=5)])
    pair = debiased_gradient_step(0.88, 0.02, d_x=5)
    config = override(ExperimentConfig(), "model.n_heads=2")
    save(tmp_path / "grown", config, pair, step=20, snapshots={10: kernel, 20: pair})
    return load(tmp_path / "grown")


def test_each_step_is_classified_as_a_model_of_its_own(grown: Checkpoint):
    found = over_steps(grown, n_prompts=256)
    assert found.headlines == ["kernel_regression", "debiased_gd"]
    frame = found.to_frame()
    assert frame["step"].tolist() == [10, 10, 20, 20]
    assert frame["label"].tolist() == ["positive", "dummy", "positive", "negative"]
    assert frame["omega_mean"].tolist() == pytest.approx([0.5, 0, 0.02, -0.02])
    alone = classify(grown.at(10), n_prompts=256).to_frame()
    np.testing.assert_array_equal(frame["share"][:2], alone["share"])
    # Without a history there is no loss, and no figure of it.
    assert np.isnan(found.eval_loss).all()
    assert "classify_loss" not in found.figures()


def test_a_slider_holds_the_circuits_of_each_step_on_one_scale(grown: Checkpoint):
    figure = over_steps(grown, "circuits").plot()
    assert [frame.name for frame in figure.frames] == ["10", "20"]
    assert figure.layout.sliders[0].active == 1
    own = [circuits(grown.at(step)) for step in (10, 20)]
    drawn = [[*each.QK[:, :5], *each.OV.swapaxes(1, 2)] for each in own]
    for frame, matrices in zip(figure.frames, drawn, strict=True):
        for trace, matrix in zip(frame.data, matrices, strict=True):
            np.testing.assert_allclose(trace.z, matrix, rtol=1e-6)
    for kind in (slice(2), slice(2, 4)):  # QK, OV
        largest = max(np.abs(matrix).max() for matrices in drawn for matrix in matrices[kind])
        for trace in figure.data[kind]:
            assert trace.zmax == -trace.zmin == pytest.approx(largest)


def test_curves_hold_a_column_of_each_row(grown: Checkpoint):
    found = over_steps(grown, "classify", n_prompts=64)
    figure = found.plot_curve("omega_mean")
    assert {trace.name: tuple(trace.y) for trace in figure.data} == {
        "H0": pytest.approx((0.5, 0.02)),
        "H1": pytest.approx((0, -0.02)),
    }
    assert figure.data[0].x.tolist() == [10, 20]


@pytest.mark.slow
def test_loss_and_mark_are_those_of_the_history():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    found = over_steps(checkpoint, n_prompts=64)
    history = checkpoint.history.set_index("step")["eval_loss"]
    expected = [history.loc[step].iloc[0] for step in found.step]
    np.testing.assert_allclose(found.eval_loss, expected)
    figure = found.plot_loss()
    marks = {frame.name: (frame.data[0].x[0], frame.data[0].y[0]) for frame in figure.frames}
    assert marks["5,000"] == (5000, pytest.approx(history.loc[5000].iloc[0]))
    # Step 0 has no place on a logarithmic axis: it has half the first logged step.
    assert marks["0"] == (found.curve[1, 0] / 2, pytest.approx(history.loc[0].iloc[0]))
    assert {frame.traces for frame in figure.frames} == {(1,)}
    assert found.headlines[-1] == classify(checkpoint).pattern


def test_the_loss_between_logged_steps_is_that_of_the_last_one():
    curve, step = np.array([[10.0, 3.0], [20.0, 2.0]]), np.array([5, 10, 19, 20, 99])
    found = OverSteps("classify", (), step, curve)
    np.testing.assert_array_equal(found.eval_loss, [np.nan, 3, 3, 2, 2])


def test_a_history_ends_at_the_step_of_the_model():
    checkpoint = load(CHECKPOINTS / "softmax-h2-s0")
    assert checkpoint.at(5000).history["step"].max() == 5000


@pytest.mark.slow
def test_a_slider_of_many_numbers_is_thinned_and_keeps_the_last_step(
    grown: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    pair = grown.snapshots[20]
    many = Checkpoint(grown.path, grown.config, 9, pair, kept=dict.fromkeys(range(10), pair))
    many.__dict__["history"] = None
    found = over_steps(many, "circuits")
    assert len(found.plot().frames) == 10
    numbers = sum(np.size(trace[name]) for trace in circuits(pair).plot().data for name in "xyz")
    monkeypatch.setattr(module, "MOST_NUMBERS", 4 * numbers)
    assert [frame.name for frame in found.plot().frames] == ["0", "3", "6", "9"]


@pytest.mark.slow
def test_heads_are_masked_at_each_step_on_the_same_prompts():
    checkpoint = load(CHECKPOINTS / "sparse-h4-noise0.1-s0")
    some = evaluation_prompts(checkpoint, n_prompts=64)
    found = over_steps(checkpoint, "ablate-heads", some)
    assert found.step.tolist() == [0, 1000, 2000, 5000, 10_000, 20_000, 50_000]
    for row in (0, 2):
        own = ablate_heads(checkpoint.snapshots[int(found.step[row])], some)
        np.testing.assert_array_equal(found.results[row].rise, own.rise)
        assert found.headlines[row] == own.headline
    assert len(found.to_frame()) == 7 * 16
    shown = [np.array(each.data[0].z) for each in found.plot().frames]
    np.testing.assert_allclose(shown, [each.rise for each in found.results], rtol=1e-6)


def test_arguments_of_the_analysis_are_passed_on():
    checkpoint = load(CHECKPOINTS / "pool-linear-m4-s0")
    found = over_steps(checkpoint, "priors", n_prompts=64, context_lengths=[2, 5])
    for step, each in zip(found.step, found.results, strict=True):
        own = compare_priors(checkpoint.at(int(step)), n_prompts=64, context_lengths=[5, 2]).overall
        np.testing.assert_allclose(each.overall.relative, own.relative)
    with pytest.raises(ValueError, match=r"priors takes .*context_lengths.*, got steps"):
        over_steps(checkpoint, "priors", steps=3)


@pytest.mark.slow
def test_levels_of_the_loss_are_dotted():
    found = over_steps(load(CHECKPOINTS / "linear-separate-s0"), "components")
    lines = [shape.y0 for shape in found.plot_loss().layout.shapes if shape.line.dash == "dot"]
    assert lines == linear_components(load(CHECKPOINTS / "linear-separate-s0")).levels.tolist()


def test_a_checkpoint_without_snapshots_is_refused(tmp_path: Path):
    config = override(ExperimentConfig(), "model.n_heads=1")
    save(tmp_path / "one", config, zero_head(d_x=5), step=0)
    with pytest.raises(ValueError, match="classify over steps needs a checkpoint with snapshots"):
        over_steps(load(tmp_path / "one"))


@pytest.mark.slow
def test_the_command_gives_the_numbers_of_the_call(run: Run):
    path = CHECKPOINTS / "softmax-h2-s0"
    ran = run("analyse", "classify", path, "--over-steps", "--n-prompts", 64, "--json").done()
    rows = json.loads(ran.out)["rows"]
    found = over_steps(load(path), "classify", n_prompts=64)
    assert [row["headline"] for row in rows] == found.to_frame()["headline"].tolist()
    shown = run("analyse", "ablate-heads", path, "--over-steps", "--n-prompts", 16).done().out
    assert "10 saved steps, 0 to 500,000" in shown
