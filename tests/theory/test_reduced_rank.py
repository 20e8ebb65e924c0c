"""Learning coefficients of products of matrices: against the published cases, the linear program of the proof, and the exact
volume."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from mechinterp import local_learning_coefficient
from mechinterp.analysis import Chains
from mechinterp.theory.learning_coefficient import reachable_dimension
from mechinterp.theory.reduced_rank import reduced_rank_coefficient
from tests.conftest import refused

SIZES = [
    (m, n, h, r) for m, n, h in product(range(1, 6), repeat=3) for r in range(min(m, n, h) + 1)
]


def published(m: int, n: int, h: int, r: int) -> float:
    """The main theorem of Aoyagi and Watanabe 2005, in its cases."""
    if n + r > m + h:
        return (h * m - h * r + n * r) / 2
    if m + r > n + h:
        return (h * n - h * r + m * r) / 2
    if h + r > m + n:
        return m * n / 2
    odd = (m + h + n + r) % 2
    squares = (h + r) ** 2 + m**2 + n**2
    return (odd - squares + 2 * (h + r) * m + 2 * (h + r) * n + 2 * m * n) / 8


def test_the_formula_has_the_values_of_the_published_cases():
    for m, n, h, r in SIZES:
        found = reduced_rank_coefficient(m, n, n_hidden=h, rank=r)
        assert found == published(m, n, h, r), (m, n, h, r)
        assert found == reduced_rank_coefficient(n, m, n_hidden=h, rank=r)


def test_without_spare_rank_it_is_the_dimension_of_the_matrices():
    for d, r in ((4, 1), (4, 2), (5, 3), (3, 3)):
        assert reduced_rank_coefficient(d, d, n_hidden=r, rank=r) == reachable_dimension(d, r) / 2


def test_the_exponent_is_the_least_of_the_linear_program():
    """Powers t of the singular values: the sum of the proof over 0 <= t_1 <= ... <= t_k <= 1, by a solver."""
    for m, n, h in product(range(1, 6), repeat=3):
        k = min(m, h)
        factors = [abs(m - h) + 1 + 2 * (k - i) - n for i in range(1, k + 1)]
        order = np.eye(k, k) - np.eye(k, k, 1)
        found = linprog(factors, A_ub=order[:-1], b_ub=np.zeros(k - 1), bounds=[(0, 1)] * k)
        expected = 2 * reduced_rank_coefficient(m, n, n_hidden=h, rank=0)
        assert n * k + found.fun == pytest.approx(expected)


def log_evidence(log_beta: float, m: int, n: int, h: int) -> float:
    """log of E exp(-beta |A B|^2) for Gaussian A and B, exactly: B is integrated in closed form, the singular values of A on
    a grid of their logarithms."""
    k = min(m, h)
    u = np.linspace(-60, 2.5, {1: 40_001, 2: 2_001}[k])
    grid = np.meshgrid(*[u] * k, indexing="ij")
    # The density of the singular values a = e^u, and (1 + 2 beta a^2)^(-n/2) for each.
    total = sum(
        (abs(m - h) + 1) * each
        - np.exp(2 * each) / 2
        - n / 2 * np.logaddexp(0, log_beta + np.log(2) + 2 * each)
        for each in grid
    )
    if k == 2:
        difference = np.abs(np.exp(2 * grid[0]) - np.exp(2 * grid[1]))
        total = total + np.log(np.where(difference > 0, difference, 1e-300))
    peak = total.max()
    return peak + np.log(np.exp(total - peak).sum())


@pytest.mark.parametrize(
    ("m", "n", "h"), [(4, 4, 1), (3, 5, 1), (3, 3, 1), (4, 4, 2), (2, 3, 2), (3, 3, 2), (5, 2, 2)]
)
def test_the_exact_evidence_falls_with_the_power_lambda(m: int, n: int, h: int):
    """Where no factor of the proof is 0 the slope is lambda; a factor of 0 adds log log beta, whose slope is 1 / log beta."""
    k = min(m, h)
    ties = sum(abs(m - h) + 1 + 2 * j - n == 0 for j in range(k))
    at, step = 50.0, 0.5
    slope = -(log_evidence(at + step, m, n, h) - log_evidence(at - step, m, n, h)) / (2 * step)
    exact = reduced_rank_coefficient(m, n, n_hidden=h, rank=0)
    if ties:
        assert exact - 1.5 / at < slope < exact - 0.5 / at
    else:
        assert slope == pytest.approx(exact, abs=1e-3)


def test_sizes_that_make_no_sense_are_refused():
    with refused("rank", "3"):
        reduced_rank_coefficient(4, 4, n_hidden=2, rank=3)
    with refused("n_hidden", "0"):
        reduced_rank_coefficient(4, 4, n_hidden=0, rank=0)


class Product(torch.nn.Module):
    def __init__(self, m: int, n: int, h: int) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(torch.zeros(m, h, dtype=torch.float64))
        self.B = torch.nn.Parameter(torch.zeros(h, n, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(("m", "n", "h"), [(3, 3, 1), (4, 4, 2)])
def test_the_sampler_agrees_with_the_exact_evidence(m: int, n: int, h: int):
    """The evidence has the prior of the chains: normal around the minimum, localization 1."""
    nbeta, step = 1e4, 1e-3
    chains = Chains(
        n_chains=16, n_draws=400, n_warmup=300, n_leapfrog=20, nbeta=nbeta, localization=1.0
    )
    found = local_learning_coefficient(
        Product(m, n, h), loss=lambda module: (module.A @ module.B).square().sum(), chains=chains
    )
    at = [log_evidence(np.log(nbeta) + each, m, n, h) for each in (-step, step)]
    expected = (at[0] - at[1]) / (2 * step)
    assert abs(found.estimate - expected) < 4 * found.sem
    assert found.sem < 0.1
