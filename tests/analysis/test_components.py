"""How many components a step of linear attention uses: on built models, rotated bases and shipped runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from analyses.lib.theory.linear import fixed_point
from mechinterp import load
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.one_layer.linear_components import components
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.models.constructions.one_layer import debiased_gradient_step, linear_attention
from mechinterp.report.to_json import to_json
from mechinterp.theory.linear import modes
from mechinterp.theory.linear_heads import MergedHeads
from mechinterp.training.linear.trainer import task_moments

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
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


@pytest.mark.parametrize("seed", range(5))
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
@EACH_LAW
@pytest.mark.parametrize("n_components", [1, 3])
def test_the_classifier_says_how_many(law: CovarianceConfig, n_components: int):
    task = task_of(law)
    M = fixed_point(modes(task_moments(task)), range(n_components))
    # Two heads, one of them with the other sign, and a third that does nothing.
    heads = MergedHeads(v=np.array([2.0, -1.0, 1e-6]), U=np.stack([M / 4, -M / 2, M]))
    found = classify(linear_attention(heads), task)
    assert found.pattern == "linear_gd"
    assert found.components.n_components == n_components
    assert f"one preconditioned step on {n_components} of 4 components explains" in found.reason
    assert found.to_frame()["n_components"].tolist() == [n_components] * 3


@pytest.mark.slow
def test_a_step_across_the_eigenvectors_that_does_the_task_has_no_number():
    task = task_of(LAWS["diagonal"])
    heads = MergedHeads(v=np.ones(1), U=1.5 * ACROSS[None])
    found = classify(linear_attention(heads), task)
    assert found.pattern == "linear_gd"
    assert found.loss.r2 > 0.1
    assert found.components.n_components is None
    assert "between two principal directions of x predict" in found.reason
    assert "n_components" not in found.to_frame()


@pytest.mark.slow
def test_other_models_have_no_components():
    assert classify(debiased_gradient_step(0.88, 0.05, d_x=5)).components is None
    task = task_of(LAWS["diagonal"])
    two = replace(debiased_gradient_step(0.88, 0.05, d_x=4, d_y=2), score="linear/L")
    assert classify(two, replace(task, d_y=2)).components is None


@pytest.mark.slow
def test_the_document_has_the_number():
    checkpoint = load(CHECKPOINTS / "linear-separate-s0")
    evidence = to_json("classify", checkpoint, classify(checkpoint))["evidence"]
    assert evidence["n_components"] == 4
    assert evidence["learned"] == pytest.approx([1, 1, 1, 1], abs=1e-3)
    assert evidence["off_diagonal"] < 1e-6
    softmax = load(CHECKPOINTS / "softmax-h2-s0")
    document = to_json("classify", softmax, classify(softmax))
    assert document["evidence"]["n_components"] is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear-separate-s0", "linear-separate-s1", "linear-rank1-s2"])
def test_every_plateau_of_a_shipped_run_has_a_snapshot_with_its_number(name: str):
    checkpoint = load(CHECKPOINTS / name)
    task, moments = checkpoint.config.task, task_moments(checkpoint.config.task)
    levels, best = modes(moments).levels, {}
    for step, weights in checkpoint.snapshots.items():
        double = weights.circuits.to(torch.float64)
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
        found = classify(checkpoint.snapshots[step], task)
        # A step that has learned no component is no gradient step.
        pattern = "linear_gd" if count else "undetermined"
        assert (found.pattern, found.components.n_components) == (pattern, count)
