"""How many components a step of linear attention uses: on built models, rotated bases and shipped runs."""

import numpy as np
import pytest
import torch

from analyses.lib.theory.linear import fixed_point
from mechinterp import load
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.one_layer.linear_components import components, linear_components
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.heads import predict
from mechinterp.models.weights import Weights
from mechinterp.presets import preset
from mechinterp.theory.linear import MergedHeads, modes
from mechinterp.training.linear_models import initial_heads, task_moments
from tests.conftest import CHECKPOINTS, refused

LAWS = {
    "diagonal": CovarianceConfig(kind="eigenvalues", eigenvalues=(0.4, 0.3, 0.2, 0.1)),
    "rotated": CovarianceConfig(kind="kms", rho=0.6),
    "two repeat": CovarianceConfig(kind="eigenvalues", eigenvalues=(0.3, 0.3, 0.3, 0.1)),
    "all repeat": CovarianceConfig(),
}
ACROSS = np.outer([1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0])
EACH_LAW = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


def task_of(law: CovarianceConfig, **changes: float) -> TaskConfig:
    values = {"beta_var": 1.0, "noise_var": 0.0} | changes
    return TaskConfig(d_x=4, context_length=31, covariance=law, **values)


def rotation(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((4, 4)))[0]


@EACH_LAW
@pytest.mark.parametrize("n_components", range(5))
@pytest.mark.parametrize(
    "changes", [{}, {"noise_var": 0.5, "beta_var": 0.3}], ids=["plain", "noise"]
)
def test_fixed_points_have_as_many_as_they_are_made_of(
    law: CovarianceConfig, n_components: int, changes: dict[str, float]
):
    task = task_of(law, **changes)
    found = components(fixed_point(modes(task_moments(task)), range(n_components)), task)
    assert found.n_components == n_components
    assert found.learned == pytest.approx([1] * n_components + [0] * (4 - n_components), abs=1e-12)
    assert found.off_diagonal < 1e-20


@pytest.mark.parametrize("seed", range(2))
def test_any_basis_of_a_repeated_eigenvalue_will_do(seed: int):
    task, turn = task_of(LAWS["all repeat"]), rotation(seed)
    target = modes(task_moments(task)).targets[0]
    found = components(target * turn[:, :2] @ turn[:, :2].T, task)
    assert found.n_components == 2
    assert found.learned == pytest.approx([1, 1, 0, 0], abs=1e-12)


def test_a_matrix_across_the_eigenvectors_has_no_components():
    task, M = task_of(LAWS["diagonal"]), 1.5 * ACROSS
    found = components(M, task)
    assert found.n_components is None
    assert found.off_diagonal > 0.05
    moments = task_moments(task)
    off = M - np.diag(np.diag(M))
    assert found.off_diagonal == pytest.approx(float(moments.squared_norm(off)) / moments.yy)
    assert components(M, task, limit=10.0).n_components is not None


@pytest.mark.parametrize(("part", "count"), [(0.49, 0), (0.51, 1)])
def test_half_learned_is_the_line(part: float, count: int):
    task = task_of(LAWS["rotated"])
    M = part * fixed_point(modes(task_moments(task)), [0])
    assert components(M, task).n_components == count


@pytest.mark.slow
@pytest.mark.usefixtures("small_null")
@pytest.mark.parametrize("law", [LAWS["rotated"], LAWS["two repeat"]], ids=["rotated", "repeat"])
def test_the_classifier_says_how_many(law: CovarianceConfig):
    for count in (1, 3):
        M = fixed_point(modes(task_moments(task_of(law))), range(count))
        # Two heads, one of them with the other sign, and a third that does nothing.
        heads = MergedHeads(v=np.array([2.0, -1.0, 1e-6]), U=np.stack([M / 4, -M / 2, M]))
        found = classify(linear_attention(heads), task=task_of(law))
        assert (found.label, found.components.n_components) == ("linear_gd", count)
    # A step across the eigenvectors that does the task has no number.
    heads = MergedHeads(v=np.ones(1), U=1.5 * ACROSS[None])
    found = classify(linear_attention(heads), task=task_of(LAWS["diagonal"]))
    assert (found.label, found.components.n_components) == ("linear_gd", None)
    assert found.loss.r2 > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-separate-s0", "linear-rank1-s2"])
def test_every_plateau_of_a_shipped_run_has_a_snapshot_with_its_number(name: str):
    checkpoint = load(CHECKPOINTS / name)
    task, moments = checkpoint.config.task, task_moments(checkpoint.config.task)
    levels, best = modes(moments).levels, {}
    for step, weights in checkpoint.snapshots.items():
        double = weights.to(torch.float64)
        QK = double.QK[:, : task.d_x, : task.d_x]
        M = torch.einsum("h,hij->ji", double.mu[:, 0], QK).numpy()
        count = components(M, task).n_components
        gap = abs(float(moments.loss(M)) - levels[count])
        if gap < best.get(count, (np.inf, 0))[0]:
            best[count] = gap, step
    last = classify(checkpoint).components.n_components
    assert sorted(best) == list(range(last + 1))
    for count, (gap, step) in best.items():
        assert gap < 0.1 * (levels[0] - levels[1]), (count, step)
        found = classify(checkpoint.snapshots[step], task=task)
        # A step that has learned no component is no gradient step.
        pattern = "linear_gd" if count else "undetermined"
        assert (found.label, found.components.n_components) == (pattern, count)


# Parts of a direction that heads hold.


def matrix_of(weights: Weights) -> np.ndarray:
    """M, read from predictions: of one pair (e_i, 1) in the context, asked at e_j."""
    d_x = weights.d_x
    units, ones = torch.eye(d_x, dtype=torch.float64), torch.ones(d_x**2, 1, dtype=torch.float64)
    x, x_query = units.repeat_interleave(d_x, 0)[:, None], units.repeat(d_x, 1)
    prompts = Prompts(x, ones[:, None], x_query, ones, ones, torch.zeros(d_x**2, d_x, 1))
    return predict(weights.to(torch.float64), prompts).reshape(d_x, d_x).numpy()


@pytest.mark.parametrize("name", ["linear-separate-s0", "linear-merged-s0", "linear-rank4-s2"])
def test_what_heads_hold_adds_up(name: str):
    checkpoint = load(CHECKPOINTS / name)
    directions = modes(task_moments(checkpoint.config.task))
    for step in (checkpoint.steps[0], checkpoint.steps[4], checkpoint.steps[-1]):
        found = linear_components(checkpoint.at(step))
        np.testing.assert_allclose(found.held.sum(0), found.learned, rtol=1e-10, atol=1e-12)
        M = matrix_of(checkpoint.snapshots[step])
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


def test_heads_start_from_the_initial_weights_of_the_config():
    first, heads = (
        linear_components(load(CHECKPOINTS / "linear-separate-s0").at(0)),
        initial_heads(preset("linear-separate")),
    )
    np.testing.assert_allclose(first.value, heads.v, rtol=1e-6)
    # The covariance is diagonal with falling entries: its eigenvectors are the axes.
    np.testing.assert_allclose(first.key, heads.K[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(first.query, heads.Q[:, 0], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(first.eigenvalues, [0.4, 0.3, 0.2, 0.1])


def test_heads_of_higher_rank_show_norms_which_no_turn_of_their_rows_changes():
    checkpoint = load(CHECKPOINTS / "linear-rank4-s2")
    found = linear_components(checkpoint)
    assert found.rank == 4
    weights = checkpoint.weights.to(torch.float64)
    keys = weights.W_K[0, :, :8].numpy()  # the eigenvectors are the axes
    np.testing.assert_allclose(found.key, np.linalg.norm(keys, axis=2), rtol=1e-6)
    held = found.value[:, None] * np.einsum(
        "hdr,hdr->hd", keys, weights.scale * weights.W_Q[0, :, :8].numpy()
    )
    targets = modes(task_moments(checkpoint.config.task)).targets
    np.testing.assert_allclose(found.held, held / targets, atol=1e-9)


def test_models_without_linear_attention_have_no_parts():
    with refused("linear attention", "score softmax"):
        linear_components(load(CHECKPOINTS / "softmax-h2-s0"))
