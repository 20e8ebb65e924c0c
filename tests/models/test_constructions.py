"""Models built by hand do what they are named for, those of algorithms after every layer."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts
from mechinterp.models.constructions.descent import (
    gd_plus_plus_model,
    gradient_descent_model,
    preconditioned_gd_model,
    rotated,
    with_noise,
)
from mechinterp.models.constructions.one_layer import (
    debiased_gradient_step,
    diagonal_heads,
    kernel_head,
    zero_head,
)
from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
from mechinterp.models.heads import head_outputs, predict
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.weights import Weights
from tests.conftest import refused

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
def sparse_prompts() -> Prompts:
    return draw_prompts(TASK, 64, dtype=torch.float64)


def path(weights: Weights, prompts: Prompts) -> Tensor:
    """The prediction of the first layers alone: the stream read out after each."""
    _, W_U = weights.reading
    return predictor_of(weights).streams(prompts)[1:, :, 0] @ W_U


@pytest.mark.parametrize("seed", [None, 0], ids=["plain", "rotated"])
@pytest.mark.parametrize("built", BUILT)
def test_every_layer_is_a_step(built: str, seed: int | None, sparse_prompts: Prompts):
    weights, name, scalars = BUILT[built]
    if seed is not None:
        weights = rotated(weights, seed=seed)
    expected = BY_NAME[name].predictions(PromptMoments(sparse_prompts, TASK), scalars, 4)
    predictions = path(weights, sparse_prompts)
    assert (predictions - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert expected.abs().max() > 0.5


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


def debiased_gd(prompts: Prompts, eta: float) -> torch.Tensor:
    """(eta/L) sum_l y_l <x_l - mean x, x_query>, a He et al. eq. (4.10)."""
    centred = prompts.x - prompts.x.mean(1, keepdim=True)
    weight = (centred * prompts.x_query[:, None]).sum(-1)
    return eta * (prompts.y * weight[..., None]).mean(1)


@pytest.mark.parametrize("d_y", [1, 2])
def test_diagonal_heads_have_the_circuits_asked_for(d_y: int):
    heads = diagonal_heads([0.1, -0.2], [3.0, -4.0], d_x=3, d_y=d_y)
    assert heads.W_Q.dtype == torch.float64
    on_x, on_y = torch.eye(3).double(), torch.eye(d_y).double()
    for h, (omega, mu) in enumerate([(0.1, 3.0), (-0.2, -4.0)]):
        QK, OV = pad(omega * on_x, (0, d_y, 0, d_y)), pad(mu * on_y, (0, 0, 3, 0))
        torch.testing.assert_close(heads.QK[h], QK, rtol=1e-12, atol=0)
        torch.testing.assert_close(heads.OV[h], OV, rtol=1e-12, atol=0)
    assert heads.scale == (3 + d_y) ** -0.5


def test_a_pair_of_heads_tends_to_debiased_gradient_descent(prompts: Prompts):
    expected = debiased_gd(prompts, 0.88)

    def error(omega: float) -> float:
        model = debiased_gradient_step(0.88, omega, d_x=5)
        return (predict(model, prompts) - expected).square().mean().sqrt().item()

    assert error(1e-3) < 1e-5
    # The error is of order omega^2: half of omega is a quarter of it.
    assert error(0.02) / error(0.01) == pytest.approx(4, rel=0.02)


def test_a_kernel_head_is_the_kernel_average(prompts: Prompts):
    kernel = torch.exp(0.5 * torch.einsum("bld,bd->bl", prompts.x, prompts.x_query))
    average = (kernel[..., None] * prompts.y).sum(1) / kernel.sum(1, keepdim=True)
    actual = predict(kernel_head(omega=0.5, mu=1.5, d_x=5), prompts)
    torch.testing.assert_close(actual, 1.5 * average, rtol=1e-11, atol=1e-13)


def test_a_zero_head_writes_nothing(prompts: Prompts):
    head = zero_head(d_x=5)
    assert head_outputs(head, prompts).abs().max() == 0
    assert head.QK.abs().max() == 0


BAD = {
    "gammas": (lambda: gd_plus_plus_model([0.1, 0.2], [0.1], d_x=3), ("etas and gammas", 2, 1)),
    "no layer": (lambda: gradient_descent_model([], d_x=3), ("etas", "got 0")),
    "cs": (
        lambda: preconditioned_gd_model([0.1], [0.1, 0.2], covariance=SIGMA),
        ("etas and cs", 1, 2),
    ),
    "noise": (lambda: with_noise(BUILT["GD++"][0], -0.1, seed=0), ("relative", ">= 0", -0.1)),
    "mu": (lambda: diagonal_heads([0.1, 0.2], [1.0], d_x=2), ("omega and mu", 2, 1)),
    "omega": (lambda: debiased_gradient_step(0.88, 0.0, d_x=2), ("omega", "> 0", 0.0)),
}


@pytest.mark.parametrize(("build", "words"), BAD.values(), ids=BAD)
def test_what_is_no_model_is_refused(build, words):
    with refused(*words):
        build()
