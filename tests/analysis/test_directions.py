"""Progress along each direction: models that ascend, or stand still, where x varies little get no name of a descent."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mechinterp.analysis.multi_layer.directions import directions_of, progress_of
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.multi_layer.naming_rules import Limits, decide
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import Prompts, covariance_matrix

WEAK = CovarianceConfig(kind="eigenvalues", eigenvalues=(1.0, 1.0, 1.0, 0.02, 0.02))
TASK = TaskConfig(d_x=5, context_length=40, covariance=WEAK)
KMS = TaskConfig(d_x=5, context_length=40, covariance=CovarianceConfig(kind="kms", rho=0.7))
BY_LABEL = {each.label: each for each in ALGORITHMS}
SCALARS = {
    "gradient_descent": [0.8, 0.5],
    "gd_plus_plus": [0.6, 0.5, 0.2],
    "newton": [0.2],
    "preconditioned_descent": [0.6, 0.5, 0.3, 0.3],
    "ridge_like": [0.5],
}


def reading(label: str, M: Tensor, task: TaskConfig = TASK) -> Callable[[Prompts], Tensor]:
    """An algorithm that reads M^T x_query in place of the query."""

    def path(prompts: Prompts) -> Tensor:
        changed = replace(prompts.to(torch.float64), x_query=prompts.x_query.double() @ M)
        return BY_LABEL[label].predictions(PromptMoments(changed, task), SCALARS[label], 2)

    return path if BY_LABEL[label].has_path else lambda prompts: path(prompts)[-1]


def without_last(factor: float, noise: float = 0.01) -> Tensor:
    """Identity whose last direction, one of small variance, has another factor, with noise of weights."""
    generator = torch.Generator().manual_seed(0)
    E = noise * torch.randn(5, 5, generator=generator, dtype=torch.float64)
    return torch.tensor([1, 1, 1, 1, factor], dtype=torch.float64).diag() + E


@pytest.mark.slow
@pytest.mark.parametrize("label", ["gradient_descent", "gd_plus_plus", "newton"])
def test_a_model_that_ascends_in_a_weak_direction_gets_no_name(label: str) -> None:
    right, wrong = (
        name_algorithm(reading(label, without_last(factor)), task=TASK) for factor in (1.0, -1.0)
    )
    assert right.label == label
    assert wrong.label == "undetermined"
    assert wrong.why in ("ascends", "rest")
    assert wrong.measured.path is not None
    assert wrong.measured.path.progress[label].least < -0.5


@pytest.mark.slow
def test_the_rule_alone_takes_the_name_of_a_direction_that_is_not_a_coordinate() -> None:
    """Reflections of x take the rest of such a model for noise of weights."""
    u = torch.tensor([0, 0, 0, 0.8, 0.6], dtype=torch.float64)
    naming = name_algorithm(
        reading("gradient_descent", torch.eye(5).double() - 2 * torch.outer(u, u)), task=TASK
    )
    assert (naming.label, naming.why) == ("undetermined", "ascends")
    anyway = decide(naming.measured, replace(Limits(), progress=-np.inf))
    assert anyway.label == "gradient_descent"


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.02, -1.0])
def test_a_step_that_leaves_a_direction_out_gets_no_name(factor: float) -> None:
    """The limit is that of one layer's steps, .05 of the largest."""
    naming = name_algorithm(reading("gradient_descent", without_last(factor)), task=TASK)
    assert (naming.label, naming.why) == ("undetermined", "ascends")


@pytest.mark.parametrize("task", [TASK, KMS], ids=["weak", "kms"])
@pytest.mark.parametrize("label", SCALARS)
def test_progress_is_1_for_the_algorithm_and_a_factor_for_its_multiple(
    label: str, task: TaskConfig
) -> None:
    learner, scalars = BY_LABEL[label], np.array(SCALARS[label])
    directions = directions_of(task, 40, seed=0)
    assert directions is not None
    for factor in (1.0, 0.3, -0.7):

        def read(prompts: Prompts, factor: float = factor) -> Tensor:
            return factor * learner.predictions(PromptMoments(prompts, task), scalars.tolist(), 2)

        progress = progress_of(directions, read, learner, scalars, 2, ("layer 0", "layer 1"))
        assert progress.least == pytest.approx(factor, abs=1e-9)


def test_a_layer_in_which_the_learner_moves_by_rounding_alone_counts_nothing() -> None:
    """A fitted step of 9e-16 beside a model that does nothing there is 0/0."""
    learner = BY_LABEL["gradient_descent"]
    directions = directions_of(TASK, 40, seed=0)
    assert directions is not None

    def read(prompts: Prompts) -> Tensor:
        return learner.predictions(PromptMoments(prompts, TASK), [0.0, 0.5], 2)

    columns = ("layer 0", "layer 1")
    progress = progress_of(directions, read, learner, np.array([9e-16, 0.5]), 2, columns)
    assert progress.least == pytest.approx(1, abs=1e-9)
    assert progress.where == "layer 1"


def test_progress_along_one_direction_is_that_of_the_mean_step() -> None:
    """One step of descent with matrix M on one context: x_query^T M S beta, along all directions at once."""
    directions = directions_of(KMS, 40, seed=3)
    assert directions is not None
    M = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    learner = BY_LABEL["gradient_descent"]

    def read(prompts: Prompts) -> Tensor:
        b = prompts.x.mT @ prompts.y / 40
        return (prompts.x_query[:, None] @ M @ b)[:, 0][None]

    progress = progress_of(directions, read, learner, np.array([0.5]), 1, ("layer 0",))
    S = directions.prompts.x[:: len(directions.query)]
    S = (S.mT @ S / 40).mean(0)
    values, vectors = np.linalg.eigh(covariance_matrix(KMS.covariance, 5))
    # In coordinates in which a query and a task vector along one direction have product 1.
    query, beta = vectors * np.sqrt(values), vectors / np.sqrt(values)
    C = query.T @ (M @ S).numpy() @ beta
    A = 0.5 * query.T @ S.numpy() @ beta
    C, A = C + C.T, A + A.T
    least = np.linalg.eigvals(np.linalg.solve(A, C)).real.min()
    assert progress.least == pytest.approx(least, rel=1e-9)


def test_no_directions_without_a_law_or_with_a_pool() -> None:
    assert directions_of(replace(TASK, n_tasks=4), 40, seed=0) is None
    assert directions_of(replace(TASK, d_y=1, supports=((0, 1),)), 40, seed=0) is None
