"""The exact learning coefficient: as many directions as the loss has curvature in, and as heads can move M in."""

import numpy as np
import pytest

from analyses.coefficients.sampler import SPECTRA, heads_at, moments_of
from analyses.lib.theory.linear import fixed_point, level_coefficients
from mechinterp.analysis.training.local_losses import population_loss
from mechinterp.analysis.training.sampler import LocalLoss
from mechinterp.theory.learning_coefficient import (
    learning_coefficient,
    map_rank,
    reachable_dimension,
    whitened_singular_values,
)
from mechinterp.theory.linear import (
    Moments,
    merged_heads,
    modes,
    population_moments,
    separate_heads,
)
from tests.conftest import refused


def curved_directions(loss: LocalLoss) -> int:
    """Rank of the Hessian, from central differences of the gradient."""
    step, eye = 1e-5, np.eye(loss.at.size)
    up, down = (loss.function(loss.at + sign * step * eye)[1] for sign in (1, -1))
    values = np.linalg.svd((up - down) / (2 * step), compute_uv=False)
    return int((values > 1e-6 * values[0]).sum())


@pytest.mark.parametrize("d_x", [3, 4, 5, 6])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_heads_move_m_in_as_many_directions_as_matrices_of_their_rank_have(d_x: int, rank: int):
    for n_heads in range(1, d_x + 2):
        heads = separate_heads(n_heads, d_x, std=1.0, seed=n_heads, rank=rank)
        assert map_rank(heads) == reachable_dimension(d_x, n_heads * rank)
    assert map_rank(merged_heads(1, d_x, std=1.0, seed=0)) == d_x**2


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("d_x", [3, 4, 5])
def test_it_is_half_the_number_of_directions_in_which_the_loss_is_curved(
    d_x: int, rank: int, spectrum: str
):
    moments = moments_of(d_x, spectrum)
    for n_heads in range(1, d_x // rank + 2):
        loss = population_loss(heads_at(moments, n_heads, rank), moments)
        assert loss.exact == learning_coefficient(moments, n_heads=n_heads, rank=rank)
        assert curved_directions(loss) == 2 * loss.exact


def test_the_numbers_of_the_staircase():
    assert level_coefficients(moments_of(4, "distinct")).tolist() == [0, 3.5, 6, 7.5, 8]
    assert level_coefficients(moments_of(4, "equal")).tolist() == [0, 2, 4, 6, 8]
    # Two of three equal ones: a tie only for one head, whose direction may turn in the plane of both.
    tied = population_moments(np.array([0.4, 0.4, 0.2]), context_length=31)
    assert level_coefficients(tied).tolist() == [0, 2, 4, 4.5]
    assert learning_coefficient(moments_of(4, "distinct"), n_heads=1, rank=3) == 7.5


def test_learning_a_direction_lowers_the_loss_by_the_square_of_its_singular_value():
    turned = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    covariance = turned @ np.diag([0.4, 0.3, 0.2, 0.1]) @ turned.T
    moments = population_moments(covariance, context_length=31, noise_var=0.1)
    gains = modes(moments).gains
    np.testing.assert_allclose(whitened_singular_values(moments) ** 2, gains, rtol=1e-10)
    # Covariances that do not commute have no modes, but singular values.
    law = np.array([4, 3, 2, 1.0])
    other = population_moments(covariance, context_length=31, task_covariance=law)
    best = other.minimiser()
    fall = other.yy - float(other.loss(best))
    assert (whitened_singular_values(other) ** 2).sum() == pytest.approx(fall, rel=1e-10)


MOMENTS = moments_of(3, "distinct")
NOISE = np.random.default_rng(0).standard_normal((9, 40))
# The moments of a training set couple all directions; those of few tasks leave some out.
SAMPLED = Moments(MOMENTS.yy, MOMENTS.yz, (NOISE @ NOISE.T).reshape(3, 3, 3, 3))
FEW = Moments(1.0, np.diag([1.0, 0, 0]), MOMENTS.zz)


@pytest.mark.parametrize(
    ("moments", "n_heads", "rank", "words"),
    [
        (MOMENTS, 0, 1, (">= 1", 0)),
        (MOMENTS, 1, 0, (">= 1", 0)),
        (SAMPLED, 2, 1, ("must be a product",)),
        (FEW, 2, 1, ("rank 2 or more", "got 1")),
        (Moments(1.0, MOMENTS.yz, 0 * MOMENTS.zz), 3, 1, ("must not be singular",)),
    ],
)
def test_where_theory_says_nothing_it_is_refused(moments, n_heads, rank, words):
    assert learning_coefficient(SAMPLED, n_heads=3, rank=1) == 4.5
    with refused(*words):
        learning_coefficient(moments, n_heads=n_heads, rank=rank)


def test_a_head_that_serves_nothing_changes_nothing_and_one_that_takes_from_another_leaves_it_open():
    moments = moments_of(3, "distinct")
    dead = heads_at(moments, 4, 1)
    dead.K[-1], dead.Q[-1], dead.v[-1] = 0, 0, 0
    loss = population_loss(dead, moments)
    assert loss.exact == 4.5 == curved_directions(loss) / 2
    M = fixed_point(modes(moments), [0])
    loss = population_loss(heads_at(moments, 2, 1, M=M), moments)
    assert loss.exact is None
    assert "directions here" in loss.unknown
