"""Scalars of algorithms are found again from their predictions."""

import numpy as np
import pytest
import torch

from mechinterp.config import CovarianceConfig, TaskConfig
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.algorithm_fits import TOLERANCE, _jacobian, fit_algorithm
from mechinterp.icl.algorithms import ALGORITHMS
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import draw_prompts, generator_for
from tests.conftest import refused

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
FITTED = [algorithm for algorithm in ALGORITHMS if algorithm.scalars]
N_LAYERS = 3
TASK = TaskConfig(
    d_x=5,
    context_length=20,
    sparsity=2,
    nonzeros="signs",
    covariance=CovarianceConfig(kind="kms", rho=0.6),
)


def drawn(seed: int, n_prompts: int = 128) -> PromptMoments:
    return PromptMoments(
        draw_prompts(TASK, n_prompts, generator=generator_for(seed, "eval", 0)), TASK
    )


@pytest.fixture
def moments() -> PromptMoments:
    return drawn(0)


def uneven(algorithm: Algorithm, moments: PromptMoments) -> torch.Tensor:
    """Scalars that are neither natural nor equal."""
    natural = algorithm.start(moments, N_LAYERS)
    return natural * torch.linspace(1.4, 0.6, len(natural), dtype=torch.float64)


@pytest.mark.parametrize("algorithm", FITTED, ids=lambda algorithm: algorithm.name)
def test_scalars_are_recovered_from_the_path(algorithm: Algorithm, moments: PromptMoments):
    scalars = uneven(algorithm, moments)
    target = algorithm.predictions(moments, scalars, N_LAYERS)
    fit = fit_algorithm(algorithm, moments, target, n_layers=N_LAYERS)
    np.testing.assert_allclose(fit.scalars, scalars.numpy(), rtol=1e-6)
    assert fit.names == algorithm.names(N_LAYERS)


@pytest.mark.parametrize("algorithm", FITTED, ids=lambda algorithm: algorithm.name)
def test_last_predictions_are_recovered_on_other_prompts(
    algorithm: Algorithm, moments: PromptMoments
):
    """Step sizes that change places may predict the same, so that the predictions are compared."""
    scalars, others = uneven(algorithm, moments), drawn(1)
    target = algorithm.predictions(moments, scalars, N_LAYERS)[-1]
    fit = fit_algorithm(algorithm, moments, target, n_layers=N_LAYERS)
    expected = algorithm.predictions(others, scalars, N_LAYERS)[-1]
    found = algorithm.predictions(others, torch.from_numpy(fit.scalars), N_LAYERS)[-1]
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_steps_of_chebyshevs_iteration_are_found(seed: int):
    """Six steps that reach from .5 to 7.6: a search from equal sizes never leaves them, and one from
    sizes near to each other may end with several at 0."""
    task = TaskConfig(d_x=4, context_length=32, noise_var=0)
    prompts = draw_prompts(task, 128, generator=generator_for(seed, "eval", 0))
    moments, descent = PromptMoments(prompts, task), BY_NAME["gradient descent"]
    angles = (2 * np.arange(6) + 1) * np.pi / 12
    etas = 1 / (1.05 + 0.95 * np.cos(angles))  # for eigenvalues from .1 to 2
    target = descent.predictions(moments, etas.tolist(), 6)[-1]
    natural = descent.start(moments, 6)
    equal = fit_algorithm(descent, moments, target, n_layers=6, n_starts=1, start=natural)
    np.testing.assert_allclose(equal.scalars, equal.scalars[0], rtol=1e-6)
    assert equal.error > 1e-3 * target.square().mean()
    fit = fit_algorithm(descent, moments, target, n_layers=6, n_starts=2)
    np.testing.assert_allclose(np.sort(fit.scalars), np.sort(etas), rtol=1e-4)


def test_unequal_steps_on_reweighted_x_are_found():
    moments, algorithm = drawn(0), BY_NAME["preprocess then optimise"]
    etas = algorithm.start(moments, 4) * torch.tensor([0.3, 1.0, 3.0]).double()
    target = algorithm.predictions(moments, etas, 4)[-1]
    fit = fit_algorithm(algorithm, moments, target, n_layers=4, n_starts=2)
    np.testing.assert_allclose(np.sort(fit.scalars), etas.numpy(), rtol=1e-4)


@pytest.mark.slow
def test_a_search_ends_where_derivatives_are_not_finite():
    """Six layers of GD++ are of degree 729 in their scalars: their derivatives are not finite here, the predictions are."""
    task = TaskConfig(d_x=4, context_length=32, noise_var=0)
    prompts = draw_prompts(task, 24, generator=generator_for(1, "eval", 0))
    moments, algorithm = PromptMoments(prompts, task), BY_NAME["GD++"]
    start, target = 30 * algorithm.start(moments, 6), moments.prompts.y_query
    lost = fit_algorithm(algorithm, moments, target, n_layers=6, n_starts=1, start=start)
    assert np.isfinite(lost.scalars).all()
    assert lost.error > target.square().mean()
    fit = fit_algorithm(algorithm, moments, target, n_layers=6, n_starts=2)
    assert fit.error < 0.1 * target.square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("eta", [1.0, 1.2, 1.4])
def test_one_step_is_found_among_several(eta: float):
    """A search from four natural steps ends at four steps, with an error of a twentieth and more."""
    task = TaskConfig(d_x=4, context_length=20)
    moments = PromptMoments(draw_prompts(task, 128, generator=generator_for(0, "eval", 0)), task)
    descent = BY_NAME["gradient descent"]
    target = descent.predictions(moments, [eta], 1)[0]
    natural = descent.start(moments, 4)
    four = fit_algorithm(descent, moments, target, n_layers=4, n_starts=1, start=natural)
    assert four.error > 0.02 * target.square().mean()
    one = fit_algorithm(descent, moments, target, n_layers=4, n_starts=1)
    np.testing.assert_allclose(one.scalars, [eta, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize("name", ["GD++", "ISTA"])
def test_an_algorithm_that_contains_another_falls_back_to_it(name: str, moments: PromptMoments):
    """With scalars of 0, which for thresholds are the least that they may be."""
    etas = [0.5, 0.35, 0.2]
    target = BY_NAME["gradient descent"].predictions(moments, etas, 3)
    fit = fit_algorithm(BY_NAME[name], moments, target, n_layers=3)
    np.testing.assert_allclose(fit.scalars[:3], etas, rtol=1e-6)
    np.testing.assert_allclose(fit.scalars[3:], 0, atol=1e-6)


@pytest.mark.slow
def test_scalars_stop_at_their_least_value(moments: PromptMoments):
    """Where thresholds would have to be negative, ISTA becomes the best gradient descent."""
    etas = torch.full((3,), 0.4).double()
    target = BY_NAME["gradient descent"].run(moments, 3, etas) * 1.1
    fit = fit_algorithm(BY_NAME["ISTA"], moments, target, n_layers=3)
    best = fit_algorithm(BY_NAME["gradient descent"], moments, target, n_layers=3)
    assert fit.scalars[3:].tolist() == [0, 0, 0]
    # Scalars are as exact as the root of what a last step may take off the error.
    np.testing.assert_allclose(fit.scalars[:3], best.scalars, rtol=10 * TOLERANCE**0.5)
    assert fit.error == pytest.approx(best.error, rel=1e-6)
    away = fit_algorithm(BY_NAME["gradient descent"], moments, -moments.prompts.y_query, n_layers=1)
    assert away.scalars.tolist() == [0]


@pytest.mark.slow
def test_a_fit_of_a_noisy_target_is_a_minimum():
    """No scalar changed by itself, either way, comes nearer; the error is its own."""
    moments = drawn(0, 48)
    noise = torch.randn(48, 1, generator=generator_for(0, "eval", 7), dtype=torch.float64)
    target = ridge(moments.prompts, penalty=1.0) + 0.1 * noise
    for algorithm in FITTED:
        fit = fit_algorithm(algorithm, moments, target, n_layers=2)

        def error(scalars: np.ndarray, algorithm: Algorithm = algorithm) -> float:
            found = algorithm.predictions(moments, torch.from_numpy(scalars), 2)[-1]
            return (found - target).square().mean().item()

        assert fit.error == pytest.approx(error(fit.scalars), rel=1e-12)
        assert fit.error < target.square().mean()
        for index, least in enumerate(algorithm.lower(2).tolist()):
            for factor in (0.99, 1.01):
                moved = fit.scalars.copy()
                moved[index] = max(moved[index] * factor, least)
                assert error(moved) >= fit.error * (1 - 1e-6), (algorithm.name, index)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"n_starts": 0}, ("n_starts", ">= 1", 0)),
        ({"target": torch.ones(127, 1).double()}, ("target", "[128, 1]", "[127, 1]")),
        ({"target": torch.full((128, 1), torch.nan).double()}, ("target", "finite")),
    ],
)
def test_what_cannot_be_fitted_is_refused(call, words: tuple):
    with refused(*words):
        fit_algorithm(
            BY_NAME["ridge"], drawn(0), n_layers=3, **{"target": torch.ones(128, 1).double()} | call
        )


@pytest.mark.parametrize("algorithm", FITTED, ids=lambda algorithm: algorithm.name)
def test_derivatives_of_the_fit_are_those_of_autograd(algorithm: Algorithm, moments: PromptMoments):
    def difference(scalars: torch.Tensor) -> torch.Tensor:
        return algorithm.predictions(moments, scalars, N_LAYERS).flatten()

    scalars = uneven(algorithm, moments)
    expected = torch.autograd.functional.jacobian(difference, scalars)
    J = _jacobian(difference, scalars)
    torch.testing.assert_close(J, expected, rtol=1e-10, atol=1e-12)
    assert J.mT.is_contiguous()  # other strides have other bits, and long fits end elsewhere
