"""Predictors against plain formulas, one prompt at a time, in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analyses.lib.theory.learners import lasso, one_step_pcr, pcr
from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.given import PENALTIES
from mechinterp.icl.predictors import debiased_gd, nadaraya_watson, ridge, ridge_path, vanilla_gd
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import (
    descend,
    gradient_descent,
    preprocess_then_optimise,
)
from tests.conftest import refused


@pytest.fixture(params=[(5, 1, 40), (3, 2, 2), (4, 2, 1)], ids=str)
def small_prompts(request):
    d_x, d_y, length = request.param
    task = TaskConfig(d_x=d_x, d_y=d_y, context_length=length)
    return draw_prompts(task, 16, generator=generator_for(3, "eval", 0), dtype=torch.float64)


def by_prompt(prompts, formula):
    rows = [
        formula(prompts.x[i].numpy(), prompts.y[i].numpy(), prompts.x_query[i].numpy())
        for i in range(len(prompts))
    ]
    return torch.from_numpy(np.stack(rows))


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_vanilla_gd_is_a_gradient_step_from_zero(small_prompts):
    # The gradient of (1/2L) sum_l |y_l - beta^T x_l|^2 at 0, by automatic differentiation.
    beta = torch.zeros_like(small_prompts.beta, requires_grad=True)
    residual = small_prompts.y - small_prompts.x @ beta
    loss = residual.square().sum() / (2 * small_prompts.x.shape[1])
    (gradient,) = torch.autograd.grad(loss, beta)
    expected = torch.einsum("bdn,bd->bn", -0.7 * gradient, small_prompts.x_query)
    same(vanilla_gd(small_prompts, eta=0.7), expected)


def test_debiased_gd_centres_the_covariates(small_prompts):
    def formula(x, y, x_query):
        return 0.7 / len(x) * y.T @ (x - x.mean(0)) @ x_query

    same(debiased_gd(small_prompts, eta=0.7), by_prompt(small_prompts, formula))


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_ridge_solves_the_normal_equations(small_prompts, penalty):
    def formula(x, y, x_query):
        if penalty == 0:
            return np.linalg.lstsq(x, y, rcond=None)[0].T @ x_query
        return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y).T @ x_query

    torch.testing.assert_close(
        ridge(small_prompts, penalty=penalty),
        by_prompt(small_prompts, formula),
        rtol=1e-9,
        atol=1e-10,
    )


@pytest.mark.parametrize(
    ("d_x", "length", "d_y"), [(5, 3, 1), (5, 5, 2), (4, 12, 1), (20, 9, 2), (3, 0, 1)]
)
def test_one_decomposition_gives_ridge_at_every_penalty(d_x: int, length: int, d_y: int):
    task = TaskConfig(d_x=d_x, context_length=12, d_y=d_y)
    prompts = draw_prompts(task, 16, dtype=torch.float64).prefix(length)
    found = ridge_path(prompts, PENALTIES)
    for penalty, each in zip(PENALTIES, found, strict=True):
        expected = ridge(prompts, penalty=penalty)
        torch.testing.assert_close(each, expected, rtol=2e-12, atol=2e-12)
    with refused("penalty", -1):
        ridge_path(prompts, [0.5, -1])


def test_the_bayes_penalty_beats_its_neighbours():
    kms = CovarianceConfig(kind="kms", rho=0.8)
    task = TaskConfig(context_length=12, noise_var=0.4, covariance=kms)
    prompts = draw_prompts(task, 20_000, dtype=torch.float64)
    bayes = task.noise_var / task.beta_variance

    def squares(penalty):
        return (ridge(prompts, penalty=penalty) - prompts.y_query_clean).square()[:, 0]

    for other in (0.4 * bayes, 2.5 * bayes):
        rise = squares(other) - squares(bayes)
        assert rise.mean() > 3 * rise.std() / len(prompts) ** 0.5


def test_nadaraya_watson_averages_with_exponential_weights(small_prompts):
    omega = torch.linspace(0.2, 0.6, small_prompts.x.shape[2], dtype=torch.float64)

    def formula(x, y, x_query):
        weight = np.exp(x @ (omega.numpy() * x_query))
        return 1.5 * (weight / weight.sum()) @ y

    same(nadaraya_watson(small_prompts, omega=omega, mu=1.5), by_prompt(small_prompts, formula))


SKEWED = np.array([[0.3, 0.1, 0.0], [0.1, 0.5, 0.05], [0.0, 0.05, 0.2]])


def skewed_prompts(n_prompts, length):
    """x ~ N(0, SKEWED), beta ~ N(0, I), no noise."""
    task = TaskConfig(d_x=3, context_length=length, beta_var=1.0, noise_var=0.0)
    prompts = draw_prompts(
        task, n_prompts, generator=generator_for(5, "eval", 0), dtype=torch.float64
    )
    root = torch.from_numpy(np.linalg.cholesky(SKEWED)).mT
    x, x_query = prompts.x @ root, prompts.x_query @ root
    y_query = torch.einsum("bd,bdn->bn", x_query, prompts.beta)
    return replace(
        prompts, x=x, y=x @ prompts.beta, x_query=x_query, y_query=y_query, y_query_clean=y_query
    )


@pytest.mark.parametrize("components", [0, 1, 2, 3])
def test_pcr_on_population_components(components):
    prompts = skewed_prompts(16, 20)
    basis = np.linalg.eigh(SKEWED)[1][:, ::-1][:, :components]

    def formula(x, y, x_query):
        gram = basis.T @ x.T @ x @ basis
        return np.linalg.solve(gram, basis.T @ x.T @ y).T @ basis.T @ x_query

    found = pcr(prompts, components=components, covariance=SKEWED)
    torch.testing.assert_close(found, by_prompt(prompts, formula), rtol=1e-9, atol=1e-10)
    if components == 3:
        torch.testing.assert_close(found, prompts.y_query_clean, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("components", [0, 1, 2, 3])
def test_one_step_pcr_has_the_loss_of_its_level(components):
    prompts = skewed_prompts(20_000, 10)
    square = (
        one_step_pcr(prompts, components=components, covariance=SKEWED) - prompts.y_query
    ).square()[:, 0]
    values = np.sort(np.linalg.eigvalsh(SKEWED))[::-1]
    ratio = 1 + (1 + values.sum() / values) / 10
    level = values.sum() - (values / ratio)[:components].sum()
    assert abs(square.mean() - level) < 3 * square.std() / len(prompts) ** 0.5


# Learners of sparse regression, and the laws of the prompts they meet.

TASK = TaskConfig(d_x=6, d_y=2, context_length=20, sparsity=2, nonzeros="signs", noise_var=0.2)


@pytest.fixture
def sparse() -> Prompts:
    return draw_prompts(TASK, 32, generator=generator_for(4, "eval", 0), dtype=torch.float64)


def test_supports_are_random_and_of_one_size():
    task = replace(TASK, d_y=1)
    beta = draw_prompts(task, 6000, generator=generator_for(0, "eval", 0)).beta[..., 0]
    live = beta != 0
    assert (live.sum(1) == 2).all()
    share = live.double().mean(0)
    assert ((share - 1 / 3).abs() < 4 * (2 / 9 / 6000) ** 0.5).all()
    assert beta.abs().unique().tolist() == pytest.approx([0, 2**-0.5])
    assert abs((beta[live] > 0).double().mean() - 0.5) < 4 * 0.5 / 12_000**0.5


@pytest.mark.parametrize("nonzeros", ["signs", "gaussian"])
def test_signal_variance_is_that_of_the_prompts(nonzeros: str):
    covariance = CovarianceConfig(kind="eigenvalues", eigenvalues=(3.0, 1.0, 1.0, 0.5))
    task = TaskConfig(d_x=4, sparsity=2, nonzeros=nonzeros, covariance=covariance)
    prompts = draw_prompts(task, 40_000, generator=generator_for(0, "eval", 0))
    squares = prompts.y_query_clean.square()
    sem = squares.std().item() / 200
    assert abs(squares.mean().item() - task.signal_var) < 4 * sem


def test_descent_step_by_step_as_it_is_written(sparse: Prompts):
    features, query = sparse.x[:, :, :, None].expand(-1, -1, -1, 2) * 0.5, sparse.x_query * 0.5
    found = descend(features, sparse.y, query[..., None].expand(-1, -1, 2), steps=4, eta=0.9)
    for prompt in range(4):
        for response in range(2):
            X, y = features[prompt, :, :, response], sparse.y[prompt, :, response]
            u = torch.zeros(6, dtype=torch.float64)
            for step in range(5):
                assert found[step, prompt, response].item() == pytest.approx(
                    (u @ query[prompt]).item(), abs=1e-12
                )
                u = u + 0.9 * X.T @ (y - X @ u) / len(y)


@pytest.mark.parametrize("eta", [None, 0.3])
@pytest.mark.parametrize("n_pairs", [3, 9])
def test_descent_on_more_features_than_pairs_is_descent(n_pairs: int, eta: float | None):
    """u_{t+1} = u_t - eta ((1/L) phi^T phi u_t - (1/L) phi^T y), one step at a time for each response."""
    generator = torch.Generator().manual_seed(0)
    phi, y, query = (
        torch.randn(4, *size, generator=generator, dtype=torch.float64)
        for size in ((n_pairs, 6, 2), (n_pairs, 2), (6, 2))
    )
    found = descend(phi, y, query, steps=5, eta=eta)
    for prompt in range(4):
        for n in range(2):
            own, responses = phi[prompt, :, :, n], y[prompt, :, n]
            gram = own.mT @ own / n_pairs
            rate = 1 / torch.linalg.eigvalsh(gram).max() if eta is None else eta
            u = torch.zeros(6, dtype=torch.float64)
            for step in range(6):
                torch.testing.assert_close(
                    found[step, prompt, n], u @ query[prompt, :, n], rtol=1e-10, atol=1e-12
                )
                u = u - rate * (gram @ u - own.mT @ responses / n_pairs)


def test_own_step_sizes_are_the_inverse_of_the_largest_curvature(sparse: Prompts):
    own = gradient_descent(sparse, steps=5)
    for prompt in range(3):
        x = sparse.x[prompt]
        eta = 1 / torch.linalg.eigvalsh(x.T @ x / 20)[-1].item()
        alone = gradient_descent(sparse[prompt : prompt + 1], steps=5, eta=eta)
        torch.testing.assert_close(own[:, prompt], alone[:, 0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 6), (8, 3)])
def test_a_prompt_whose_features_are_0_is_predicted_as_0(shape: tuple[int, int]):
    """y is 0 in all pairs of the first prompt, as in data of two classes: its reweighted x are 0, with no largest eigenvalue."""
    prompts = skewed_prompts(2, shape[1])
    y, x = prompts.y.clone(), prompts.x[:, : shape[0]]
    y[0] = 0
    some = replace(prompts, x=x, y=y[:, : shape[0]])
    found = preprocess_then_optimise(some, steps=4)
    assert (found[:, 0] == 0).all()
    torch.testing.assert_close(found[:, 1:], preprocess_then_optimise(some[1:], steps=4))
    nothing = replace(some, x=0 * some.x)
    assert (gradient_descent(nothing, steps=4) == 0).all()


def test_preprocessing_reweights_by_the_correlations(sparse: Prompts):
    for response in range(2):
        r = (sparse.x * sparse.y[..., response, None]).mean(1)
        reweighted = replace(
            sparse, x=sparse.x * r[:, None], x_query=sparse.x_query * r, y=sparse.y
        )
        for eta in (None, 2.5):
            expected = gradient_descent(reweighted, steps=6, eta=eta)[..., response]
            found = preprocess_then_optimise(sparse, steps=6, eta=eta)[..., response]
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_lasso_meets_the_conditions_of_its_minimum(sparse: Prompts):
    alpha = 0.05
    # Queries at the unit vectors read out the solution.
    for prompt in range(3):
        copies = sparse[torch.full((6,), prompt)]
        repeated = replace(copies, x_query=torch.eye(6, dtype=torch.float64))
        u = lasso(repeated, alpha=alpha)
        gradient = copies.x[0].T @ (copies.y[0] - copies.x[0] @ u) / 20
        assert (gradient.abs() <= alpha + 1e-4).all()
        live = u != 0
        assert live.any()
        torch.testing.assert_close(gradient[live], alpha * u[live].sign(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ridge(skewed_prompts(2, 5), penalty=-1), ("penalty", ">= 0", -1)),
        (lambda: pcr(skewed_prompts(2, 5), components=-1), ("components", "d_x = 3", -1)),
        (lambda: pcr(skewed_prompts(2, 5), components=4), ("components", "d_x = 3", 4)),
        (
            lambda: one_step_pcr(skewed_prompts(2, 5), components=4, covariance=SKEWED),
            ("components", "d_x = 3", 4),
        ),
        (lambda: gradient_descent(skewed_prompts(2, 5), steps=-1), ("steps", ">= 0", -1)),
        (
            lambda: preprocess_then_optimise(skewed_prompts(2, 5), steps=1, eta=0.0),
            ("eta", "> 0", 0.0),
        ),
        (lambda: lasso(skewed_prompts(2, 5), alpha=-1.0), ("alpha", "> 0", -1.0)),
    ],
)
def test_settings_out_of_range_are_refused(call, words: tuple):
    with refused(*words):
        call()


@pytest.mark.parametrize(("n_pairs", "d_x"), [(6, 3), (3, 6), (5, 5), (1, 4), (4, 1)])
def test_least_squares_is_the_one_of_least_norm_at_every_rank(n_pairs: int, d_x: int):
    """Prompts of one batch have full rank, columns of zeros, equal columns, equal pairs, nearly equal columns, and zeros alone."""
    rng = np.random.default_rng(0)
    x, y, query = (
        rng.normal(size=(42, n_pairs, d_x)),
        rng.normal(size=(42, n_pairs, 2)),
        rng.normal(size=(42, d_x)),
    )
    x[1::6, :, rng.integers(d_x)] = 0
    x[2::6] = x[2::6, :, :1]
    x[3::6] = x[3::6, :1]
    x[4::6, :, -1] = x[4::6, :, 0] * (1 + 1e-4 * rng.normal(size=n_pairs))
    x[5::12] = 0
    given = Prompts.from_arrays(x, y, query, np.zeros((42, 2)))
    expected = [
        q @ np.linalg.pinv(one, rcond=max(one.shape) * np.finfo(float).eps) @ t
        for one, t, q in zip(x, y, query, strict=True)
    ]
    np.testing.assert_allclose(ridge(given, penalty=0), expected, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_least_squares_is_that_of_the_pseudoinverse():
    x = torch.randn(4, 6, 3, dtype=torch.float64)
    x[1] = 0
    x[2, :, 1] = x[2, :, 0]
    y = torch.randn(4, 6, 1, dtype=torch.float64, requires_grad=True)
    query = torch.randn(4, 3, dtype=torch.float64)
    given = Prompts.from_arrays(x, y.detach(), query, torch.zeros(4, 1, dtype=torch.float64))
    (found,) = torch.autograd.grad(ridge(replace(given, y=y), penalty=0).sum(), y)
    torch.testing.assert_close(
        found, (query[:, None] @ torch.linalg.pinv(x)).mT, rtol=1e-10, atol=1e-12
    )
