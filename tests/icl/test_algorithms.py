"""Algorithms with a prediction after every layer, held against closed forms and each other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from analyses.lib.theory.learners import nearest_neighbours
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts, covariance_matrix, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import (
    gradient_descent,
    ols,
    preprocess_then_optimise,
)
from tests.conftest import assert_close_to_rounding

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
TASK = TaskConfig(
    d_x=5,
    d_y=2,
    context_length=30,
    sparsity=2,
    nonzeros="signs",
    noise_var=0.2,
    covariance=CovarianceConfig(kind="kms", rho=0.6),
    n_tasks=16,
)
ETA, GAMMA = [0.5, 0.3, 0.2, 0.1], [0.2, -0.1, 0.15]


@pytest.fixture
def prompts() -> Prompts:
    return sample_prompts(TASK, 32, generator=generator_for(1, "eval", 0), dtype=torch.float64)


@pytest.fixture
def moments(prompts: Prompts) -> PromptMoments:
    return PromptMoments(prompts, TASK)


def run(name: str, moments: PromptMoments, scalars: list[float], n_layers: int) -> Tensor:
    return BY_NAME[name].predictions(moments, scalars, n_layers)


def attention(tokens: Tensor, QK: Tensor, OV: Tensor) -> Tensor:
    """One layer of linear attention, scores over L; the query is no key."""
    context = tokens[:, :-1]
    return tokens + tokens @ QK @ context.mT @ context @ OV / context.shape[1]


def test_equal_steps_are_gradient_descent(prompts: Prompts, moments: PromptMoments):
    expected = gradient_descent(prompts, steps=6, eta=0.3)[1:]
    assert_close_to_rounding(run("gradient descent", moments, [0.3] * 6, 6), expected)


def test_equal_steps_have_their_closed_form(prompts: Prompts, moments: PromptMoments):
    # w_n = (1 - (1 - eta S)^n) S^-1 b
    identity = torch.eye(5, dtype=torch.float64)
    left = identity - torch.linalg.matrix_power(identity - 0.3 * moments.S, 6)
    w = left @ torch.linalg.solve(moments.S, moments.b)
    expected = (prompts.x_query[:, None] @ w)[:, 0]
    assert_close_to_rounding(run("gradient descent", moments, [0.3] * 6, 6)[-1], expected)


def test_gd_plus_plus_without_curvature_correction_is_gradient_descent(moments: PromptMoments):
    expected = run("gradient descent", moments, ETA, 4)
    assert_close_to_rounding(run("GD++", moments, [*ETA, 0, 0, 0], 4), expected)


@pytest.mark.parametrize("name", ["GD++", "gradient descent", "preconditioned gradient descent"])
def test_descent_is_a_recursion_on_tokens(name: str, prompts: Prompts, moments: PromptMoments):
    """Linear attention writes -eta into y and -gamma into x; y_query is minus the prediction."""
    x_block = torch.diag(torch.tensor([1.0] * 5 + [0] * 2)).double()
    y_block = torch.eye(7) - x_block
    Sigma = torch.from_numpy(covariance_matrix(TASK.covariance, 5))
    gamma = [*GAMMA, 0.0] if name == "GD++" else [0.0] * 4
    tokens, expected, c = prompts.tokens, [], [0.1, 0.5, 1.0, 2.0]
    for layer, eta in enumerate(ETA):
        QK = x_block.clone()
        if name.startswith("pre"):
            QK[:5, :5] = torch.linalg.inv(Sigma + c[layer] * torch.eye(5).double())
        tokens = attention(tokens, QK, -eta * y_block - gamma[layer] * x_block)
        expected.append(-tokens[:, -1, 5:])
    rest = {"GD++": GAMMA, "gradient descent": []}.get(name, c)
    assert_close_to_rounding(run(name, moments, [*ETA, *rest], 4), torch.stack(expected))


def test_preconditioning_with_much_of_the_identity_is_gradient_descent(moments: PromptMoments):
    expected, c = run("gradient descent", moments, ETA, 4), 1e13
    found = run("preconditioned gradient descent", moments, [eta * c for eta in ETA] + [c] * 4, 4)
    assert_close_to_rounding(found, expected)


def test_preconditioning_knows_the_covariance_of_its_task(prompts: Prompts):
    """The covariance is the task's, whatever that of the prompts."""
    isotropic = PromptMoments(prompts, replace(TASK, covariance=CovarianceConfig()))
    found = run("preconditioned gradient descent", isotropic, [1.0, 0.5, 1.0, 3.0], 2)
    assert_close_to_rounding(found, run("gradient descent", isotropic, [0.5, 0.125], 2))


def test_newton_inverts_and_converges_to_least_squares(prompts: Prompts, moments: PromptMoments):
    alpha, M, expected = 0.05, 0.05 * moments.S, []
    for _ in range(25):
        expected.append((prompts.x_query[:, None] @ M @ moments.b)[:, 0])
        M = 2 * M - M @ moments.S @ M
    found = run("iterative Newton", moments, [alpha], 25)
    assert_close_to_rounding(found[:8], torch.stack(expected[:8]))
    assert_close_to_rounding(found[-1], ols(prompts))


@pytest.mark.parametrize("length", [3, 30])
def test_ridge_is_ridge(prompts: Prompts, length: int):
    short = replace(prompts, x=prompts.x[:, :length], y=prompts.y[:, :length])
    found = run("ridge", PromptMoments(short, TASK), [0.7], 3)
    assert_close_to_rounding(found, ridge(short, penalty=0.7).expand(3, -1, -1))


def test_algorithm_1_with_fixed_steps(prompts: Prompts, moments: PromptMoments):
    expected = preprocess_then_optimise(prompts, steps=4, eta=0.9)
    assert_close_to_rounding(run("preprocess then optimise", moments, [0.9] * 4, 5), expected)


def test_ista_without_thresholds_is_gradient_descent(moments: PromptMoments):
    found = run("ISTA", moments, [*ETA, 0, 0, 0, 0], 4)
    assert_close_to_rounding(found, run("gradient descent", moments, ETA, 4))


def test_ista_rests_where_the_lasso_is_least(prompts: Prompts):
    """At rest with threshold eta alpha the gradient is alpha at nonzero entries."""
    eta, alpha = 0.3, 0.05
    # Queries at the unit vectors read out w.
    one = Prompts(**{k: v[:1].repeat_interleave(5, 0) for k, v in vars(prompts).items()})
    moments = PromptMoments(replace(one, x_query=torch.eye(5, dtype=torch.float64)), TASK)
    w = run("ISTA", moments, [eta] * 600 + [eta * alpha] * 600, 600)[-1]
    gradient = moments.b[0] - moments.S[0] @ w
    live = w != 0
    assert 0 < live.sum() < live.numel()
    torch.testing.assert_close(gradient[live], alpha * w[live].sign(), rtol=0, atol=1e-12)
    assert (gradient[~live].abs() <= alpha).all()


def read(prompts: Prompts, w: Tensor) -> Tensor:
    return (prompts.x_query[:, None] @ w)[:, 0]


def test_sums_in_place_of_means_are_larger_steps(prompts: Prompts):
    twice = PromptMoments(prompts, TASK).times(2)
    found = run("gradient descent", twice, ETA, 4)
    plain = run("gradient descent", PromptMoments(prompts, TASK), [2 * eta for eta in ETA], 4)
    assert_close_to_rounding(found, plain)


@pytest.mark.parametrize("name", ["GD++", "preprocess then optimise"])
def test_covariates_are_what_layers_make_of_x(name: str, prompts: Prompts, moments: PromptMoments):
    """Of every token alike: x of the context is changed as that of the query is."""
    scalars = [*ETA, *GAMMA] if name == "GD++" else ETA[1:]
    sides = ("y", "y_query", "y_query_clean", "beta")
    single = replace(prompts, **{side: getattr(prompts, side)[..., :1] for side in sides})
    one = PromptMoments(single, TASK)
    found = BY_NAME[name].changed_covariates(one, scalars, 4)
    if name == "GD++":
        X, x = prompts.x, prompts.x_query
        for gamma in GAMMA:
            S = X.mT @ X / 30
            X, x = X - gamma * X @ S, x - gamma * (x[:, None] @ S)[:, 0]
        assert_close_to_rounding(found[2], x)
        assert_close_to_rounding(found[3], x)
    else:
        assert_close_to_rounding(found[0], one.b[..., 0] * prompts.x_query)
    assert BY_NAME["gradient descent"].changed_covariates(one, ETA, 4) is None


def test_posterior_mean_is_the_best_ridge():
    """Of dense Gaussian tasks of the same variance per entry: other penalties have larger risks."""
    dense = replace(TASK, n_tasks=None, sparsity=None, nonzeros="gaussian", beta_var=0.2)
    prompts = sample_prompts(dense, 4000, generator=generator_for(2, "eval", 0))
    moments = PromptMoments(prompts, dense)
    error = ridge(moments.prompts, penalty=moments.penalty) - prompts.y_query_clean
    for factor in (0.2, 5.0):
        other = ridge(moments.prompts, penalty=factor * moments.penalty) - prompts.y_query_clean
        rise = (other.square() - error.square()).mean(1)
        assert rise.mean() > 4 * rise.std() / 4000**0.5
    # 2 of 5 entries are +-1/sqrt(2).
    assert PromptMoments(prompts, TASK).penalty == pytest.approx(0.2 / (0.4 * 0.5))


def test_nearest_neighbours(prompts: Prompts):
    found = nearest_neighbours(prompts, count=3)
    for i in range(5):
        distance = (prompts.x[i] - prompts.x_query[i]).norm(dim=1).numpy()
        nearest = prompts.y[i, np.argsort(distance)[:3].copy()]
        assert_close_to_rounding(found[i], nearest.mean(0))
    with pytest.raises(ValueError, match=r"^count must be >= 1, got 0\.$"):
        nearest_neighbours(prompts, count=0)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
class TestWhatTellsThemApart:
    def test_linearity_in_y(self, algorithm: Algorithm, prompts: Prompts):
        other = replace(prompts, y=prompts.y.flip(0))
        total = replace(prompts, y=prompts.y + other.y)
        scalars = algorithm.start(PromptMoments(prompts, TASK), 3)
        one, two, both = (
            algorithm.predictions(PromptMoments(p, TASK), scalars, 3)[-1]
            for p in (prompts, other, total)
        )
        gap = (one + two - both).abs().max() / both.abs().max().clamp(min=1)
        assert (gap < 1e-12) == algorithm.linear_in_y
        assert algorithm.linear_in_y or gap > 0.01

    def test_equivariance(self, algorithm: Algorithm, prompts: Prompts):
        noise = torch.randn(5, 5, generator=generator_for(0, "eval", 1), dtype=torch.float64)
        R = torch.linalg.qr(noise).Q
        turned = replace(prompts, x=prompts.x @ R, x_query=prompts.x_query @ R)
        scalars = algorithm.start(PromptMoments(prompts, TASK), 3)
        one, two = (
            algorithm.predictions(PromptMoments(p, TASK), scalars, 3)[-1] for p in (prompts, turned)
        )
        gap = (one - two).abs().max() / one.abs().max().clamp(min=1)
        assert (gap < 1e-12) == algorithm.equivariant
        assert algorithm.equivariant or gap > 0.01

    def test_layers(self, algorithm: Algorithm, moments: PromptMoments):
        """The first layers do not know of later ones, and those without a path are all the same."""
        names = algorithm.names(4)
        scalars = dict(zip(names, algorithm.start(moments, 4).tolist(), strict=True))
        four = algorithm.predictions(moments, list(scalars.values()), 4)
        two = algorithm.predictions(moments, [scalars[name] for name in algorithm.names(2)], 2)
        assert_close_to_rounding(two, four[:2])
        assert four.shape == (4, 32, 2)
        steps = four.diff(dim=0).abs().amax((1, 2))
        assert (steps > 0).all() if algorithm.has_path else (steps == 0).all()


def test_labels_and_scalars():
    labels = [algorithm.label for algorithm in ALGORITHMS if algorithm.label]
    assert len(set(labels)) == len(labels) == 8
    assert BY_NAME["GD++"].names(3) == ("eta_0", "eta_1", "eta_2", "gamma_0", "gamma_1")
    assert BY_NAME["preprocess then optimise"].names(3) == ("eta_1", "eta_2")
    assert BY_NAME["iterative Newton"].names(3) == ("alpha",)


def test_single_precision_is_computed_in_double(prompts: Prompts):
    single = prompts.to(torch.float32)
    found = run("ridge", PromptMoments(single, TASK), [0.5], 1)
    assert_close_to_rounding(found[0], ridge(single.to(torch.float64), penalty=0.5))


def test_bad_arguments(moments: PromptMoments):
    with pytest.raises(ValueError, match=r"^n_layers must be >= 1, got 0\.$"):
        run("ridge", moments, [1.0], 0)
    message = r"^scalars of GD\+\+ must be 5 numbers for n_layers = 3, got shape \[3\]\.$"
    with pytest.raises(ValueError, match=message):
        run("GD++", moments, [1.0, 1.0, 1.0], 3)
