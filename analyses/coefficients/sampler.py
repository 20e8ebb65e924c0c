"""Check of the sampler of learning coefficients against exact values, and bias of mini-batches
without rejection.

Minima built by hand with d from 3 to 6, every number of heads, and tasks of distinct and of equal
variances; a shipped model by stochastic gradient Langevin dynamics; and the same model over n_beta.
Lau et al. 2023, arXiv 2308.12108.
Run: python -m analyses coefficients/sampler (ten minutes; --quick: a few cases, short chains)"""

from dataclasses import replace

import numpy as np
import pandas as pd

from analyses.lib import Measured, checkpoint
from analyses.lib.theory.linear import fixed_point
from mechinterp.analysis.training.learning_coefficient import (
    LearningCoefficient,
    local_learning_coefficient,
)
from mechinterp.analysis.training.local_losses import population_loss
from mechinterp.analysis.training.sampler import Chains, Langevin
from mechinterp.theory.linear import Moments, SeparateHeads, modes, population_moments

SPECTRA = ("distinct", "equal")
GRID = [
    (d_x, n_heads, spectrum)
    for d_x in (3, 4, 5, 6)
    for n_heads in range(1, d_x + 2)
    for spectrum in SPECTRA
]
CHAINS = Chains(n_chains=48, n_draws=500, n_warmup=250, n_leapfrog=40)
MODEL = "linear-separate-s0"
LANGEVIN = [Langevin(step_size, 64) for step_size in (1e-6, 1e-5)]
LANGEVIN_CHAINS = Chains(n_chains=8, n_draws=60, n_warmup=20, n_leapfrog=100)
TEMPERATURES = (1e2, 1e3, 1e4, 1e5, 1e6)
SHORT = Chains(n_chains=4, n_draws=60, n_warmup=40, n_leapfrog=10)


def moments_of(d_x: int, spectrum: str) -> Moments:
    """Moments for x ~ N(0, I), 20 pairs, noise variance 0.1, and tasks of distinct or equal
    variances."""
    variances = np.linspace(1, 0.3, d_x) if spectrum == "distinct" else np.full(d_x, 0.6)
    if spectrum == "distinct" and d_x == 4:
        variances = np.array([1, 0.7, 0.5, 0.3])
    return population_moments(
        np.ones(d_x), context_length=20, task_covariance=variances, noise_var=0.1
    )


def heads_at(
    moments: Moments, n_heads: int, rank: int = 1, *, M: np.ndarray | None = None
) -> SeparateHeads:
    """Heads at the minimum or at a given matrix, M = A C cut into heads. Unused heads have random
    keys and zero queries."""
    d_x, rng = len(moments.yz), np.random.default_rng(0)
    rows = n_heads * rank
    m = min(rows, d_x)
    M = fixed_point(modes(moments), range(m)) if M is None else M
    left, values, right = np.linalg.svd(M)
    turn = np.linalg.qr(rng.standard_normal((m, m)))[0]
    keys = rng.standard_normal((rows, d_x))
    queries = np.zeros((rows, d_x))
    keys[:m] = turn @ (left[:, :m] * values[:m] ** 0.5).T
    queries[:m] = turn @ (values[:m, None] ** 0.5 * right[:m])
    shape = (n_heads, rank, d_x)
    return SeparateHeads(v=np.ones(n_heads), K=keys.reshape(shape), Q=queries.reshape(shape))


def at_minimum(d_x: int, n_heads: int, spectrum: str, chains: Chains) -> LearningCoefficient:
    """Estimate at a minimum built by hand."""
    moments = moments_of(d_x, spectrum)
    loss = population_loss(heads_at(moments, n_heads), moments)
    return local_learning_coefficient(loss, chains=chains)


def row(part: str, found: LearningCoefficient, **where: object) -> dict[str, object]:
    """One row of the data."""
    names = ("estimate", "sem", "exact", "r_hat", "effective_draws", "acceptance")
    measured = {name: getattr(found, name) for name in names}
    return {"part": part, **where, **measured, "n_beta": found.nbeta}


def measure(quick: bool) -> Measured:
    rows = []
    for d_x, n_heads, spectrum in GRID[::11] if quick else GRID:
        found = at_minimum(d_x, n_heads, spectrum, SHORT if quick else CHAINS)
        rows.append(row("grid", found, d_x=d_x, n_heads=n_heads, spectrum=spectrum))
    for langevin in LANGEVIN[-1:] if quick else LANGEVIN:
        chains = replace(SHORT if quick else LANGEVIN_CHAINS, langevin=langevin)
        found = local_learning_coefficient(checkpoint(MODEL), chains=chains)
        where = {"step_size": langevin.step_size, "batch_size": langevin.batch_size}
        rows.append(row("mini-batches", found, model=MODEL, reason=found.reason, **where))
    chains = replace(SHORT if quick else Chains(), other_nbeta=TEMPERATURES[: 1 if quick else None])
    curve = local_learning_coefficient(checkpoint(MODEL), chains=chains)
    rows += [row("n_beta", each, model=MODEL) for each in (*curve.curve, curve)]
    return Measured(pd.DataFrame(rows).sort_values(["part", "n_beta"], kind="stable"))
