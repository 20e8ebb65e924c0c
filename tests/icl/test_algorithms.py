"""Algorithms with a prediction after every layer, held against closed forms and each other."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import (
    ols,
    preprocess_then_optimise,
)
from tests.conftest import assert_close_to_rounding, refused

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
    return draw_prompts(TASK, 32, generator=generator_for(1, "eval", 0), dtype=torch.float64)


@pytest.fixture
def moments(prompts: Prompts) -> PromptMoments:
    return PromptMoments(prompts, TASK)


def run(name: str, moments: PromptMoments, scalars: list[float], n_layers: int) -> Tensor:
    return BY_NAME[name].predictions(moments, scalars, n_layers)


def attention(tokens: Tensor, QK: Tensor, OV: Tensor) -> Tensor:
    """One layer of linear attention, scores over L; the query is no key."""
    context = tokens[:, :-1]
    return tokens + tokens @ QK @ context.mT @ context @ OV / context.shape[1]


def test_equal_steps_have_their_closed_form(prompts: Prompts, moments: PromptMoments):
    # w_n = (1 - (1 - eta S)^n) S^-1 b
    identity = torch.eye(5, dtype=torch.float64)
    left = identity - torch.linalg.matrix_power(identity - 0.3 * moments.S, 6)
    w = left @ torch.linalg.solve(moments.S, moments.b)
    expected = (prompts.x_query[:, None] @ w)[:, 0]
    assert_close_to_rounding(run("gradient descent", moments, [0.3] * 6, 6)[-1], expected)


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


def test_ista_rests_where_the_lasso_is_least(prompts: Prompts):
    """At rest with threshold eta alpha the gradient is alpha at nonzero entries."""
    eta, alpha = 0.3, 0.05
    # Queries at the unit vectors read out w.
    one = prompts[torch.zeros(5, dtype=torch.long)]
    moments = PromptMoments(replace(one, x_query=torch.eye(5, dtype=torch.float64)), TASK)
    w = run("ISTA", moments, [eta] * 600 + [eta * alpha] * 600, 600)[-1]
    gradient = moments.b[0] - moments.S[0] @ w
    live = w != 0
    assert 0 < live.sum() < live.numel()
    torch.testing.assert_close(gradient[live], alpha * w[live].sign(), rtol=0, atol=1e-12)
    assert (gradient[~live].abs() <= alpha).all()


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("ridge", [1.0], 0), ("n_layers", ">= 1", 0)),
        (("GD++", [1.0, 1.0, 1.0], 3), ("GD++", 5, "[3]")),
    ],
)
def test_bad_numbers_are_refused(call, words: tuple):
    with refused(*words):
        run(call[0], PromptMoments(draw_prompts(TASK, 4), TASK), *call[1:])


def test_the_posterior_penalty_counts_the_zeros_of_sparse_tasks(moments: PromptMoments):
    # 2 of 5 entries are +-1/sqrt(2).
    assert moments.penalty == pytest.approx(0.2 / (0.4 * 0.5))
