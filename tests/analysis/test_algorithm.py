"""The algorithm of a model of several layers: models built by hand get their labels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from mechinterp.analysis.multi_layer.algorithm import AlgorithmEvidence, name_algorithm
from mechinterp.checkpoints.checkpoint import load, save
from mechinterp.config import CovarianceConfig, ExperimentConfig, ModelConfig, TaskConfig
from mechinterp.icl.prompts import covariance_matrix, generator_for, sample_prompts
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    preconditioned_gd_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.stacks import DeepWeights
from mechinterp.models.weights import Weights, as_weights
from mechinterp.training.general.trainer import initial_deep_weights
from tests.conftest import sampled

DENSE = TaskConfig(d_x=8)
KMS = TaskConfig(d_x=8, covariance=CovarianceConfig(kind="kms", rho=0.6))
SPARSE = TaskConfig(d_x=16, sparsity=4, nonzeros="signs")
SIGMA = torch.from_numpy(covariance_matrix(KMS.covariance, 8))

EQUAL = gradient_descent_model([0.4] * 4, d_x=8)
FALLING = gradient_descent_model([0.7, 0.5, 0.3, 0.2], d_x=8)
GD_PLUS_PLUS = gd_plus_plus_model([0.6, 0.5, 0.4, 0.4], [0.2, 0.2, 0.15, 0.0], d_x=8)
PRECONDITIONED = preconditioned_gd_model(
    [0.5, 0.4, 0.3, 0.3], [0.2, 0.2, 0.4, 0.4], covariance=SIGMA
)
ALGORITHM_1 = preprocess_then_optimise_model([1.0, 0.8, 0.6], d_x=16)
LABELS = {
    "gradient_descent": (FALLING, DENSE),
    "gd_plus_plus": (GD_PLUS_PLUS, DENSE),
    "preconditioned_gd": (PRECONDITIONED, KMS),
    "preprocess_then_optimise": (ALGORITHM_1, SPARSE),
}


def noisy(weights: DeepWeights, seed: int = 0) -> DeepWeights:
    return with_noise(rotated(weights, seed=seed), 0.03, seed=seed)


def saved(weights: DeepWeights | Weights, task: TaskConfig, folder: Path) -> Path:
    if isinstance(weights, Weights):
        save(folder, ExperimentConfig(task=task, model=weights.model), weights, step=0)
        return folder
    model = ModelConfig(
        n_layers=weights.n_layers,
        n_heads=weights.n_heads,
        d_head=weights.W_Q.shape[-1],
        d_model=weights.d_model,
        score="linear/L",
        context_only=True,
    )
    save(folder, ExperimentConfig(task=task, model=model), weights, step=0)
    return folder


def row(found: AlgorithmEvidence, label: str) -> int:
    return found.members.index(label)


@pytest.fixture(scope="module")
def exact() -> AlgorithmEvidence:
    return name_algorithm(rotated(FALLING, seed=0), task=DENSE, n_prompts=128)


@pytest.mark.parametrize("seed", [0, 1])
def test_chebyshevs_iteration_is_gradient_descent(seed: int):
    """Its six steps reach from .5 to 7.6, for eigenvalues from .1 to 2."""
    task = TaskConfig(d_x=4, context_length=32, noise_var=0)
    etas = 1 / (1.05 + 0.95 * np.cos((2 * np.arange(6) + 1) * np.pi / 12))
    found = name_algorithm(gradient_descent_model(etas.tolist(), d_x=4), task=task, seed=seed)
    assert found.label == "gradient_descent"


@pytest.mark.slow
def test_an_exact_model_is_explained_to_rounding_in_every_setting(exact: AlgorithmEvidence):
    own = row(exact, "gradient_descent")
    assert exact.label == "gradient_descent"
    assert exact.answered.all()
    np.testing.assert_allclose(exact.r2[own], 1, rtol=0, atol=1e-9)
    np.testing.assert_allclose(exact.path_r2[own], 1, rtol=0, atol=1e-9)
    assert sorted(exact.scalars[own]) == pytest.approx([0.2, 0.3, 0.5, 0.7], abs=1e-6)
    np.testing.assert_allclose(exact.test_r2, 1, rtol=0, atol=1e-12)
    assert exact.test_answer == ("yes",) * 4
    assert exact.context_length.tolist() == [40, 20, 80, 40]
    assert exact.n_scalars.tolist() == [4, 7, 1, 3, 8, 1]


@pytest.mark.slow
def test_differences_are_those_of_the_r2_and_paired(exact: AlgorithmEvidence):
    expected = exact.r2[:, None] - exact.r2[None]
    np.testing.assert_allclose(exact.difference, expected, rtol=0, atol=1e-9)
    ridge, newton = row(exact, "ridge_like"), row(exact, "newton")
    assert (exact.difference_sem[ridge, ridge] == 0).all()
    assert (exact.difference_sem[ridge, newton] > 0).all()


def test_tables_and_picture(exact: AlgorithmEvidence):
    frame, path = exact.to_frame(), exact.path_frame()
    assert (len(frame), len(path), len(exact.test_frame())) == (24, 4 * len(exact.drawn), 4)
    one = frame[(frame.candidate == "ridge_like") & (frame.prompts == "double length")]
    assert one.r2.item() == exact.r2[row(exact, "ridge_like"), 2]
    assert one.context_length.item() == 80
    assert set(path.candidate) == {exact.members[m] for m in exact.drawn}
    assert "ridge_like" not in set(path.candidate)
    own = path[path.candidate == "gradient_descent"]
    np.testing.assert_allclose(own.readout_r2, 1, rtol=0, atol=1e-9)
    figure = exact.plot()
    assert isinstance(figure, go.Figure)
    assert {trace.name for trace in figure.data} >= {"gradient_descent", "gd_plus_plus"}
    assert repr(exact).startswith(
        "AlgorithmEvidence(gradient_descent: gradient_descent at R² 1.0000 ± "
    )


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_models_with_noise_get_their_labels(label: str):
    weights, task = LABELS[label]
    found = name_algorithm(noisy(weights), task=task, n_prompts=256)
    assert (found.label, found.candidates) == (label, (label,)), found.reason


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(2), keep=lambda seed: seed == 0))
@pytest.mark.parametrize("label", LABELS)
def test_checkpoints_get_their_labels(label: str, seed: int, tmp_path: Path):
    weights, task = LABELS[label]
    checkpoint = load(saved(noisy(weights, seed), task, tmp_path / "model"))
    found = name_algorithm(checkpoint, seed=seed)
    assert found.label == label, found.reason


@pytest.mark.slow
def test_equal_steps_with_noise():
    assert name_algorithm(noisy(EQUAL, 1), task=DENSE).label == "gradient_descent"


@pytest.mark.parametrize("seed", range(3))
def test_random_weights_have_no_structure(seed: int):
    config = ExperimentConfig(
        task=SPARSE,
        model=ModelConfig(n_layers=4, n_heads=4, score="linear/L", context_only=True, d_model=64),
        seed=seed,
    )
    found = name_algorithm(initial_deep_weights(config), task=SPARSE, n_prompts=128)
    assert (found.label, found.candidates) == ("unstructured", ())
    assert np.isnan(found.r2).all()
    assert found.relative_risk[0] > 0.95


@pytest.mark.slow
def test_where_a_model_fails_it_is_not_answered():
    # Steps that are stable for I and far from it for eigenvalues of 3 and more.
    found = name_algorithm(gradient_descent_model([0.9] * 6, d_x=8), task=DENSE, n_prompts=128)
    assert found.relative_risk[3] > 1
    assert found.relative_risk[0] < 0.5
    assert found.answered.tolist() == (found.relative_risk < 0.95).tolist()
    assert np.isnan(found.r2[:, 3]).all()
    assert found.label == "gradient_descent"


@pytest.mark.slow
def test_preconditioning_is_no_candidate_where_it_changes_nothing(exact: AlgorithmEvidence):
    assert "preconditioned_gd" not in exact.members
    found = name_algorithm(gradient_descent_model([0.3, 0.2], d_x=8), task=KMS, n_prompts=128)
    assert "preconditioned_gd" in found.members
    assert found.label == "gradient_descent"


@pytest.mark.slow
def test_lengths_beyond_the_positions_are_not_answered():
    from tests.analysis.test_layered_analysis import checkpoint_of
    from tests.models.test_layered_models import garg

    checkpoint = checkpoint_of(garg(), n_heads=4)
    longest = (checkpoint.weights.model.n_positions - 1) // 2
    task = replace(checkpoint.task, context_length=longest)
    found = name_algorithm(checkpoint, task=task, n_prompts=16)
    assert np.isnan(found.relative_risk).tolist() == [False, False, True, False]
    assert not found.answered[2]


@pytest.mark.slow
def test_prompts_of_ones_own():
    prompts = sample_prompts(DENSE, 64, generator=generator_for(3, "eval", 0), context_length=30)
    found = name_algorithm(FALLING, prompts, task=DENSE)
    assert found.label == "gradient_descent"
    assert (found.n_prompts, found.context_length.tolist()) == (64, [30, 15, 60, 30])


def test_refusals():
    with pytest.raises(ValueError, match="name_algorithm needs >= 8 prompts, got 4"):
        name_algorithm(FALLING, n_prompts=4)
    with pytest.raises(ValueError, match=r"the model's, \(8, 1\), got \(16, 1\)"):
        name_algorithm(FALLING, task=SPARSE, n_prompts=8)


def test_random_weights_do_not_depend_on_the_order_of_tensors_in_a_file():
    weights = as_weights(FALLING)
    other = replace(weights, tensors=dict(reversed(weights.tensors.items())))
    one, same = (name_algorithm(each, task=DENSE, n_prompts=128) for each in (weights, other))
    assert np.array_equal(one.null_risk, same.null_risk)
    assert len(set(one.null_risk)) > 1
