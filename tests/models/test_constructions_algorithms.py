"""Models built by hand predict after every layer what their algorithm predicts there."""

import pytest
import torch
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts, covariance_matrix, sample_prompts
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    preconditioned_gd_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from tests.conftest import assert_close_to_rounding

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
KMS = CovarianceConfig(kind="kms", rho=0.6)
TASK = TaskConfig(d_x=6, context_length=25, sparsity=2, nonzeros="signs", covariance=KMS)
FALLING, GAMMAS, CS = [0.5, 0.3, 0.2, 0.1], [0.1, -0.05, 0.2, 0.3], [0.1, 0.5, 1.0, 2.0]
SIGMA = torch.from_numpy(covariance_matrix(KMS, 6))
PRECONDITIONED = preconditioned_gd_model(FALLING, CS, covariance=SIGMA)
ALGORITHM_1 = preprocess_then_optimise_model(FALLING[:3], d_x=6)
BUILT = {
    "equal steps": (gradient_descent_model([0.3] * 4, d_x=6), "gradient descent", [0.3] * 4),
    "falling steps": (gradient_descent_model(FALLING, d_x=6), "gradient descent", FALLING),
    "GD++": (gd_plus_plus_model(FALLING, GAMMAS, d_x=6), "GD++", [*FALLING, *GAMMAS[:3]]),
    "preconditioned": (PRECONDITIONED, "preconditioned gradient descent", [*FALLING, *CS]),
    "Algorithm 1": (ALGORITHM_1, "preprocess then optimise", FALLING[:3]),
}


@pytest.fixture
def prompts() -> Prompts:
    return sample_prompts(TASK, 64, dtype=torch.float64)


def path(weights: Weights, prompts: Prompts) -> Tensor:
    """The prediction of the first layers alone: the stream read out after each."""
    _, W_U = weights.reading
    return predictor_of(weights).streams(prompts)[1:, :, 0] @ W_U


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["plain", "rotated", "rotated again"])
@pytest.mark.parametrize("built", BUILT)
def test_every_layer_is_a_step(built: str, seed: int | None, prompts: Prompts):
    weights, name, scalars = BUILT[built]
    if seed is not None:
        weights = rotated(weights, seed=seed)
    expected = BY_NAME[name].predictions(PromptMoments(prompts, TASK), scalars, 4)
    predictions = path(weights, prompts)
    assert (predictions - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert expected.abs().max() > 0.5


@pytest.mark.parametrize("built", BUILT)
def test_the_residual_stream_of_the_hooked_model_holds_the_path(built: str, prompts: Prompts):
    weights, _, _ = BUILT[built]
    turned = rotated(weights, seed=3)
    model = ICLTransformer.from_weights(turned, task=TASK)
    _, cache = model.run_with_cache(prompts.tokens)
    stream = torch.stack([cache["resid_post", layer][:, -1] for layer in range(4)])
    _, W_U = turned.reading
    assert_close_to_rounding(stream @ W_U, path(weights, prompts))


@pytest.mark.parametrize("built", BUILT)
def test_rotation_leaves_no_weight_where_it_was(built: str):
    weights, _, _ = BUILT[built]
    turned = rotated(weights, seed=0)
    for name, tensor in weights.tensors.items():
        # Matrices keep their norm, zero ones among them.
        norms = tensor.norm(dim=(-2, -1))
        torch.testing.assert_close(turned.tensors[name].norm(dim=(-2, -1)), norms)
        moved = turned.tensors[name] - tensor
        assert (moved.norm(dim=(-2, -1))[norms > 0] > 0.1).all()
    assert turned.heads_per_layer == weights.heads_per_layer


def test_noise_has_the_size_asked_for():
    weights, _, _ = BUILT["Algorithm 1"]
    weights = rotated(weights, seed=0)
    noisy = with_noise(weights, 0.03, seed=1)
    assert noisy.heads_per_layer == weights.heads_per_layer
    assert (noisy.scale, noisy.model) == (weights.scale, weights.model)
    for name, tensor in weights.tensors.items():
        live = tensor.norm(dim=(-2, -1)) > 0
        added = (noisy.tensors[name] - tensor).norm(dim=(-2, -1))
        share = added[live] / tensor.norm(dim=(-2, -1))[live]
        # The square of the share, over .03^2, is a mean of as many squared normals as the matrix
        # has entries.
        entries = tensor.shape[-2] * tensor.shape[-1]
        assert ((share / 0.03).square() - 1).abs().max() < 5 * (2 / entries) ** 0.5
    again = with_noise(weights, 0.03, seed=1)
    assert torch.equal(again.W_Q, noisy.W_Q)
    assert not torch.equal(with_noise(weights, 0.03, seed=2).W_Q, noisy.W_Q)
    assert torch.equal(with_noise(weights, 0.0, seed=1).W_O, weights.W_O)


def test_bad_arguments():
    message = r"^etas and gammas must hold one number per layer, got 2 and 1\.$"
    with pytest.raises(ValueError, match=message):
        gd_plus_plus_model([0.1, 0.2], [0.1], d_x=3)
    with pytest.raises(ValueError, match=r"must hold one number per layer, got 0 and 0\.$"):
        gradient_descent_model([], d_x=3)
    message = r"^etas and cs must hold one number per layer, got 1 and 2\.$"
    with pytest.raises(ValueError, match=message):
        preconditioned_gd_model([0.1], [0.1, 0.2], covariance=SIGMA)
    with pytest.raises(ValueError, match=r"^relative must be >= 0, got -0\.1\.$"):
        with_noise(BUILT["GD++"][0], -0.1, seed=0)
