"""What heads of linear attention hold at each step adds up to what is learned, and is told in words."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mechinterp.analysis.one_layer.pca_components import components
from mechinterp.analysis.training.linear_components import LinearSnapshots, linear_snapshots
from mechinterp.checkpoints.checkpoint import load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights, predict
from mechinterp.presets import preset
from mechinterp.theory.linear import modes
from mechinterp.training.linear.trainer import initial_heads, task_moments
from tests.conftest import CHECKPOINTS

KINDS = ("linear-separate-s0", "linear-merged-s0", "linear-rank4-s2")


@pytest.fixture(scope="module")
def separate() -> LinearSnapshots:
    return linear_snapshots(load(CHECKPOINTS / "linear-separate-s0"))


def matrix_of(weights: AttentionWeights) -> np.ndarray:
    """M, read from predictions: of one pair (e_i, 1) in the context, asked at e_j."""
    d_x = weights.d_x
    units, ones = torch.eye(d_x, dtype=torch.float64), torch.ones(d_x**2, 1, dtype=torch.float64)
    x, x_query = units.repeat_interleave(d_x, 0)[:, None], units.repeat(d_x, 1)
    prompts = Prompts(x, ones[:, None], x_query, ones, ones, torch.zeros(d_x**2, d_x, 1))
    return predict(weights.to(torch.float64), prompts).reshape(d_x, d_x).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_what_heads_hold_adds_up(name: str):
    checkpoint = load(CHECKPOINTS / name)
    found = linear_snapshots(checkpoint)
    np.testing.assert_allclose(found.held.sum(1), found.learned, rtol=1e-10, atol=1e-12)
    directions = modes(task_moments(checkpoint.config.task))
    for row in (0, 4, -1):
        M = matrix_of(checkpoint.snapshots[int(found.step[row])].circuits)
        np.testing.assert_allclose(found.learned[row], directions.learned(M), atol=1e-12)
        assert found.n_components[row] == components(M, checkpoint.config.task).n_components
    # The loss in closed form, from the learned parts alone, is the one logged.
    closed = directions.diagonal_loss(found.learned[-1])
    assert found.eval_loss[-1] == pytest.approx(closed, abs=1e-4)


@pytest.mark.slow
def test_heads_start_from_the_initial_weights_of_the_config(separate: LinearSnapshots):
    heads = initial_heads(preset("linear-separate"))
    np.testing.assert_allclose(separate.value[0], heads.v, rtol=1e-6)
    # The covariance is diagonal with falling entries: its eigenvectors are the axes.
    np.testing.assert_allclose(separate.key[0], heads.K[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(separate.query[0], heads.Q[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(separate.eigenvalues, [0.4, 0.3, 0.2, 0.1])


def test_the_algorithm_is_told_in_words(separate: LinearSnapshots):
    words = {int(step): separate.algorithm(row) for row, step in enumerate(separate.step)}
    assert words[0] == "predicts nearly 0: none of 4 components learned"
    assert words[1200] == "principal component regression on 1 of 4 components"
    assert words[2000] == "principal component regression on 3 of 4 components"
    assert words[20000] == "a gradient step preconditioned on all 4 components"
    row = separate.step.tolist().index(1600)
    assert words[1600].startswith("principal component regression on ")
    assert words[1600].endswith(f"(component 3 at {separate.learned[row, 2]:.0%})")
    assert 0.1 < separate.learned[row, 2] < 0.9
    lost = replace(separate, n_components=(None,) * 101, off_diagonal=np.full(101, 0.25))
    assert lost.algorithm(0) == "no step on components (25% of E y² off them)"


def test_jumps_are_predicted_where_the_theory_applies(separate: LinearSnapshots):
    assert separate.jumps.round().tolist() == [851, 1334, 1598, 9714]
    assert separate.forecast.startswith("Predicted from the initial weights alone: component 1 at")
    merged = linear_snapshots(load(CHECKPOINTS / "linear-merged-s0"))
    assert merged.jumps.size == 0
    assert merged.forecast.startswith("No jumps are predicted.")
    assert "merged_qk must be false" in merged.forecast
    assert merged.key is None
    assert merged.query is None


def test_the_figure_has_levels_jumps_mark_and_words(separate: LinearSnapshots):
    figure = separate.plot()
    lines = [(shape.line.dash, shape.y0, shape.x0) for shape in figure.layout.shapes]
    assert [y for dash, y, _ in lines if dash == "dot"] == separate.levels.tolist()
    assert [x for dash, _, x in lines if dash == "dash"] == separate.jumps.tolist()
    frame = figure.frames[6]
    assert (frame.name, frame.data[0].x[0]) == ("1,200", 1200)
    title = f"Step 1,200: loss {separate.eval_loss[6]:.4f}, {separate.algorithm(6)}"
    assert frame.layout.title.text == title


def test_heatmaps_hold_what_heads_hold(separate: LinearSnapshots):
    learned = separate.plot_learned().frames[6].data[0].z
    np.testing.assert_allclose(learned, separate.held[6], atol=1e-6)
    vectors = separate.plot_heads().frames[6].data[0].z
    np.testing.assert_allclose(vectors[:, 0], separate.value[6], atol=1e-6)
    np.testing.assert_allclose(vectors[:, 1:5], separate.key[6], atol=1e-6)
    np.testing.assert_allclose(vectors[:, 5:], separate.query[6], atol=1e-6)
    merged = linear_snapshots(load(CHECKPOINTS / "linear-merged-s0"))
    assert list(merged.plot_heads().data[0].x) == ["v"]


def test_heads_of_higher_rank_show_norms_which_no_turn_of_their_rows_changes():
    checkpoint = load(CHECKPOINTS / "linear-rank4-s2")
    found = linear_snapshots(checkpoint)
    assert found.rank == 4
    assert list(found.plot_heads().data[0].x)[:2] == ["v", "|k·e1|"]
    weights = checkpoint.snapshots[int(found.step[-1])].circuits.to(torch.float64)
    keys = weights.W_K[:, :8].numpy()  # the eigenvectors are the axes
    np.testing.assert_allclose(found.key[-1], np.linalg.norm(keys, axis=2), rtol=1e-6)
    held = found.value[-1, :, None] * np.einsum(
        "hdr,hdr->hd", keys, weights.scale * weights.W_Q[:, :8].numpy()
    )
    targets = modes(task_moments(checkpoint.config.task)).targets
    np.testing.assert_allclose(found.held[-1], held / targets, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_there_is_a_row_for_each_snapshot_head_and_component(name: str):
    found = linear_snapshots(load(CHECKPOINTS / name))
    frame = found.to_frame()
    assert len(frame) == found.held.size
    held = frame.groupby(["step", "component"])["held"].sum()
    np.testing.assert_allclose(held, found.learned.ravel(), atol=1e-9)
    assert ("key" in frame) == ("merged" not in name)


def test_other_models_are_refused(tmp_path: Path):
    rule = "linear_snapshots needs one layer of linear attention, got score softmax"
    with pytest.raises(ValueError, match=rule):
        linear_snapshots(load(CHECKPOINTS / "softmax-h2-s0"))
