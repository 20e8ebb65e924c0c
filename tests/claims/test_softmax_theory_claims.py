"""Claims T1 to T7 of He et al. 2025 (arXiv 2503.12734): its theory, against Monte Carlo and
integration."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from analyses.lib.theory.approximate_loss import approximate_loss, loss_gradients, manifold_loss
from analyses.lib.theory.softmax import manifold_mu
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.heads import predict

pytestmark = pytest.mark.slow

SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.1}


@pytest.mark.parametrize(("omega", "mu"), [(0.03, 4.0), (0.08, 2.5), (0.15, 2.5)])
def test_t1_the_approximate_loss_misses_the_true_one_by_its_known_term(omega: float, mu: float):
    weights = diagonal_heads([omega, -omega], [mu, -mu], d_x=5).to(torch.float32)
    errors = torch.cat(
        [
            (predict(weights, prompts) - prompts.y_query).square()
            for prompts in prompt_chunks(TaskConfig(), 200_000, seed=6)
        ]
    ).to(torch.float64)
    sem = float(errors.std() / len(errors) ** 0.5)
    heads = np.array([omega, -omega]), np.array([mu, -mu])
    p = 2 * omega * mu
    term = (2 * p - (1 + 1.1 * 5 / 40) * p**2) / 40
    gap = float(errors.mean()) - approximate_loss(*heads, **SETTING)
    assert abs(gap - term) <= 0.01 + 3 * sem


@pytest.mark.exhaustive
def test_t2_the_approximate_loss_rises_along_the_manifold_where_the_true_one_is_flat_at_first():
    gammas = [0.02, 0.07, 0.13, 0.25]
    losses = [manifold_loss(gamma, **SETTING) for gamma in gammas]
    assert (np.diff(losses) > 0).all()
    gaps = {gamma: [] for gamma in gammas}
    for prompts in prompt_chunks(TaskConfig(), 400_000, seed=7):
        for gamma in gammas:
            mu = manifold_mu(gamma, **SETTING)
            weights = diagonal_heads([gamma, -gamma], [mu, -mu], d_x=5).to(torch.float32)
            gaps[gamma].append((predict(weights, prompts) - prompts.y_query).square())
    errors = {gamma: torch.cat(parts).double() for gamma, parts in gaps.items()}
    gaps = [errors[second] - errors[first] for first, second in pairwise(gammas)]
    rise = [float(gap.mean()) for gap in gaps]
    sem = [float(gap.std() / len(gap) ** 0.5) for gap in gaps]
    # Flat to 1.5e-4 up to 0.13.
    assert abs(rise[0]) < 1.5e-4 + 3 * sem[0]
    assert rise[1] > 2 * sem[1]
    assert rise[2] > 2 * sem[2]


def test_t7_opposite_heads_stay_opposite():
    omega, mu = np.array([1e-3, -1e-3]), np.array([1e-3, -1e-3])
    for _ in range(2000):
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - 0.005 * d_omega, mu - 0.005 * d_mu
    assert abs(omega.sum()) < 1e-9
    assert abs(mu.sum()) < 1e-9
    assert omega[0] > 0.4
