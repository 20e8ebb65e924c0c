"""This package's samplers of the learning coefficient, on the entries of the suite whose coefficient is known.

Run: python -m analyses known/samplers (ten minutes; --quick: short chains on the hand-made minima)"""

from dataclasses import replace
from functools import partial

import pandas as pd

from analyses.lib import Measured
from mechinterp.analysis import Chains, Langevin
from mechinterp.analysis.training.learning_coefficient import local_learning_coefficient
from mechinterp.known import Entry, judge_sampler, suite

CHAINS = Chains(n_chains=8, n_draws=500, n_warmup=250)
MINI_BATCHES = Chains(n_chains=4, n_draws=40, n_warmup=10, n_leapfrog=50)
SHORT = Chains(n_chains=2, n_draws=10, n_warmup=8, n_leapfrog=5)
SAMPLERS = {
    "Hamiltonian Monte Carlo": (None, CHAINS),
    "SGLD, step 1e-06, batch 64": (Langevin(1e-6, 64), MINI_BATCHES),
}


def sampled(
    entry: Entry, seed: int, *, langevin: Langevin | None, chains: Chains
) -> tuple[float, float]:
    """Estimate and standard error by Hamiltonian Monte Carlo, or on mini-batches."""
    chains = replace(chains, langevin=langevin)
    found = local_learning_coefficient(entry.checkpoint, chains=chains, seed=seed)
    return found.estimate, found.sem


def measure(quick: bool) -> Measured:
    known, frames = suite(1, trained="none" if quick else "all"), []
    for name, (langevin, chains) in SAMPLERS.items():
        sampler = partial(sampled, langevin=langevin, chains=SHORT if quick else chains)
        judged = judge_sampler(sampler, known, seeds=range(1 if quick else 4))
        frames.append(judged.to_frame().assign(method=name))
    return Measured(pd.concat(frames, ignore_index=True))
