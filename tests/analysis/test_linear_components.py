"""What heads of linear attention hold adds up to what is learned; the algorithm is named in words."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mechinterp.analysis.one_layer.linear_components import (
    LinearComponents,
    components,
    linear_components,
)
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import AttentionWeights, predict
from mechinterp.presets import preset
from mechinterp.theory.linear import modes
from mechinterp.training.linear.trainer import initial_heads, task_moments
from tests.conftest import CHECKPOINTS

KINDS = ("linear-separate-s0", "linear-merged-s0", "linear-rank4-s2")


@pytest.fixture(scope="module")
def trained() -> Checkpoint:
    return load(CHECKPOINTS / "linear-separate-s0")


def matrix_of(weights: AttentionWeights) -> np.ndarray:
    """M, read from predictions: of one pair (e_i, 1) in the context, asked at e_j."""
    d_x = weights.d_x
    units, ones = torch.eye(d_x, dtype=torch.float64), torch.ones(d_x**2, 1, dtype=torch.float64)
    x, x_query = units.repeat_interleave(d_x, 0)[:, None], units.repeat(d_x, 1)
    prompts = Prompts(x, ones[:, None], x_query, ones, ones, torch.zeros(d_x**2, d_x, 1))
    return predict(weights.to(torch.float64), prompts).reshape(d_x, d_x).numpy()


@pytest.mark.parametrize("name", KINDS)
def test_what_heads_hold_adds_up(name: str):
    checkpoint = load(CHECKPOINTS / name)
    directions = modes(task_moments(checkpoint.config.task))
    for step in (checkpoint.steps[0], checkpoint.steps[4], checkpoint.steps[-1]):
        found = linear_components(checkpoint.at(step))
        np.testing.assert_allclose(found.held.sum(0), found.learned, rtol=1e-10, atol=1e-12)
        M = matrix_of(checkpoint.snapshots[step].circuits)
        np.testing.assert_allclose(found.learned, directions.learned(M), atol=1e-12)
        assert found.n_components == components(M, checkpoint.config.task).n_components
    # The loss in closed form, from the learned parts alone, is the one logged.
    closed = directions.diagonal_loss(found.learned)
    assert checkpoint.loss_curve[-1, 1] == pytest.approx(closed, abs=1e-4)
    frame = found.to_frame()
    assert len(frame) == found.held.size
    held = frame.groupby("component")["held"].sum()
    np.testing.assert_allclose(held, found.learned, atol=1e-9)
    assert ("key" in frame) == ("merged" not in name)


def test_heads_start_from_the_initial_weights_of_the_config(trained: Checkpoint):
    first, heads = linear_components(trained.at(0)), initial_heads(preset("linear-separate"))
    np.testing.assert_allclose(first.value, heads.v, rtol=1e-6)
    # The covariance is diagonal with falling entries: its eigenvectors are the axes.
    np.testing.assert_allclose(first.key, heads.K[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(first.query, heads.Q[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(first.eigenvalues, [0.4, 0.3, 0.2, 0.1])


def test_the_algorithm_is_named_in_words(trained: Checkpoint):
    def at(step: int) -> LinearComponents:
        return linear_components(trained.at(step))

    assert at(0).headline == "predicts nearly 0: none of 4 components learned"
    assert at(1200).headline == "principal component regression on 1 of 4 components"
    assert at(2000).headline == "principal component regression on 3 of 4 components"
    assert at(20000).headline == "a gradient step preconditioned on all 4 components"
    going = at(1600)
    assert going.headline.endswith(f"(component 3 at {going.learned[2]:.0%})")
    assert 0.1 < going.learned[2] < 0.9
    lost = replace(going, n_components=None, off_diagonal=0.25)
    assert lost.headline == "no step on components (25% of E y² off them)"


def test_heatmaps_hold_what_heads_hold(trained: Checkpoint):
    found = linear_components(trained)
    np.testing.assert_allclose(found.plot().data[0].z, found.held)
    vectors = found.plot_heads().data[0].z
    np.testing.assert_allclose(vectors[:, 0], found.value)
    np.testing.assert_allclose(vectors[:, 1:5], found.key)
    np.testing.assert_allclose(vectors[:, 5:], found.query)
    merged = linear_components(load(CHECKPOINTS / "linear-merged-s0"))
    assert list(merged.plot_heads().data[0].x) == ["v"]


def test_heads_of_higher_rank_show_norms_which_no_turn_of_their_rows_changes():
    checkpoint = load(CHECKPOINTS / "linear-rank4-s2")
    found = linear_components(checkpoint)
    assert found.rank == 4
    assert list(found.plot_heads().data[0].x)[:2] == ["v", "|k·e1|"]
    weights = checkpoint.weights.circuits.to(torch.float64)
    keys = weights.W_K[:, :8].numpy()  # the eigenvectors are the axes
    np.testing.assert_allclose(found.key, np.linalg.norm(keys, axis=2), rtol=1e-6)
    held = found.value[:, None] * np.einsum(
        "hdr,hdr->hd", keys, weights.scale * weights.W_Q[:, :8].numpy()
    )
    targets = modes(task_moments(checkpoint.config.task)).targets
    np.testing.assert_allclose(found.held, held / targets, atol=1e-9)


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="needs one layer of linear attention, got score softmax"):
        linear_components(load(CHECKPOINTS / "softmax-h2-s0"))
