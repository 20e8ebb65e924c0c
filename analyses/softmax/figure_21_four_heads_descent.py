"""Figure 21: four heads trained by Adam beside gradient descent on the approximate loss.

He et al. 2025, arXiv 2503.12734, figure 21: descent from omega, mu ~ N(0, 0.1^2), step size 0.01,
noise variance 0.01, 10^6 steps; three draws. Run: python -m analyses softmax/figure_21_four_heads_descent
(two minutes; --quick 20,000 steps)
"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, checkpoint, records
from mechinterp import figures, training_dynamics
from mechinterp.theory.approximate_loss import loss_gradients
from mechinterp.theory.softmax import debiased_step_size

SETTING = {"d_x": 5, "context_length": 40, "noise_var": 0.01}
STEP_SIZE, SEEDS = 0.01, (0, 1, 2)


def descent(seed: int, n_steps: int) -> pd.DataFrame:
    """omega and mu of four heads along gradient descent on half the approximate loss."""
    omega, mu = np.random.default_rng(seed).normal(size=(2, 4)) * 0.1
    kept = set(np.unique(np.geomspace(1, n_steps, 200).astype(int)))
    rows = []
    for step in range(1, n_steps + 1):
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - STEP_SIZE / 2 * d_omega, mu - STEP_SIZE / 2 * d_mu
        if step in kept:
            rows.append(pd.DataFrame({"step": step, "head": range(4), "omega": omega, "mu": mu}))
    return pd.concat(rows).assign(seed=seed)[["seed", *rows[0]]]


def measure(quick: bool) -> Measured:
    data = pd.concat([descent(seed, 20_000 if quick else 1_000_000) for seed in SEEDS])
    last = data[data.step == data.step.max()]
    groups = last.groupby("seed").mu
    sums = {"positive": groups.apply(lambda mu: mu.clip(lower=0).sum())}
    sums["negative"] = -groups.apply(lambda mu: mu.clip(upper=0).sum())
    used = last[abs(last.mu) > 0.02]
    eta, best = (last.omega * last.mu).groupby(last.seed).sum(), debiased_step_size(**SETTING)
    heads = {f"seed {row.seed}, head {row.head}": abs(row.omega) for row in used.itertuples()}
    asked = {
        "omega": {name: value / 0.125 for name, value in heads.items()},
        "mu": {
            f"seed {n}, {sign}": mu / 3.5 for sign, one in sums.items() for n, mu in one.items()
        },
        "step": {f"seed {seed}": value / best for seed, value in eta.items()},
    }
    first = data[data.seed == SEEDS[0]]
    pages = {}
    for name in ("omega", "mu"):
        table = first.pivot(index="step", columns="head", values=name)
        curves = {f"head {head}": table[head].to_numpy() for head in table}
        shown = {"title": f"{name}, descent on the approximate loss", "y_title": name}
        pages[name] = figures.lines(
            table.index.to_numpy(), curves, x_title="step", log_x=True, **shown
        )
    adam = training_dynamics(checkpoint("softmax-h4-s0").history)
    pages |= {"adam-omega": adam.plot(), "adam-mu": adam.plot_mu()}
    return Measured(data, pages, records("softmax-four-heads-", asked))
