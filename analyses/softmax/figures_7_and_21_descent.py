"""Figures 7 and 21: gradient descent on the approximate loss: <mu, omega> from random starts of 2
to 8 heads, and four heads next to four trained by Adam.

He et al. 2025, arXiv 2503.12734, figure 7 and eq. (4.3), whose ranges are unknown; figure 21:
descent from omega, mu ~ N(0, 0.1^2), step size 0.01, noise variance 0.01, 10^6 steps, three draws.
Run: python -m analyses softmax/figures_7_and_21_descent (three minutes; --quick fewer steps)"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from analyses.lib import SETTING, Measured, checkpoint, records
from analyses.lib.theory.approximate_loss import approximate_loss, loss_gradients
from mechinterp import figures, history
from mechinterp.theory.softmax import debiased_step_size

FOUR = {"d_x": 5, "context_length": 40, "noise_var": 0.01}
STEP_SIZE, EVERY, HEADS, SEEDS = 0.01, 100, (2, 3, 4, 8), (0, 1, 2)


def descent(n_heads: int, seed: int, size: float, law: dict) -> Iterator[tuple[np.ndarray, ...]]:
    """omega and mu along gradient descent from N(0, 0.1^2); an endless iterator."""
    omega, mu = np.random.default_rng(seed).normal(size=(2, n_heads)) * 0.1
    while True:
        yield omega, mu
        d_omega, d_mu = loss_gradients(omega, mu, **law)
        omega, mu = omega - size * d_omega, mu - size * d_mu


def products(n_heads: int, n_steps: int) -> pd.DataFrame:
    """<mu, omega>, the sum of mu and the loss along the descent of figure 7."""
    rows, path = [], descent(n_heads, 0, STEP_SIZE, SETTING)
    for step, (omega, mu) in zip(range(n_steps + 1), path, strict=False):
        if step % EVERY == 0:
            loss = approximate_loss(omega, mu, **SETTING)
            rows.append({"step": step, "product": mu @ omega, "sum_mu": mu.sum(), "loss": loss})
    return pd.DataFrame(rows).assign(n_heads=n_heads)


def four_heads(seed: int, n_steps: int) -> pd.DataFrame:
    """omega and mu of four heads along descent on half the loss, as in figure 21."""
    kept = set(np.unique(np.geomspace(1, n_steps, 200).astype(int)))
    rows, path = [], descent(4, seed, STEP_SIZE / 2, FOUR)
    for step, (omega, mu) in zip(range(n_steps + 1), path, strict=False):
        if step in kept:
            rows.append(pd.DataFrame({"step": step, "head": range(4), "omega": omega, "mu": mu}))
    return pd.concat(rows).assign(seed=seed)[["seed", *rows[0]]]


def figure_7(quick: bool) -> Measured:
    """<mu, omega> from random starts, and its final value."""
    runs = {n_heads: products(n_heads, 3_000 if quick else 100_000) for n_heads in HEADS}
    eta = debiased_step_size(**SETTING)
    ends = {f"{n} heads": run.iloc[-1] for n, run in runs.items()}
    asked = {"step": {name: end["product"] / eta for name, end in ends.items()}}
    asked["sum"] = {name: abs(end["sum_mu"]) for name, end in ends.items()}
    first = next(iter(runs.values()))
    curves = {f"{n} heads": run["product"].to_numpy()[1:] for n, run in runs.items()}
    curves["1/(1 + (1 + s²) d/L)"] = np.full(len(first) - 1, eta)
    shown = {"title": "<mu, omega> along gradient descent", "y_title": "<mu, omega> (1/x²)"}
    steps = first["step"].to_numpy()[1:]
    pages = {"product": figures.lines(steps, curves, x_title="step", log_x=True, **shown)}
    return Measured(pd.concat(runs.values()), pages, records("softmax-descent-", asked))


def measure(quick: bool) -> Measured:
    data = pd.concat([four_heads(seed, 20_000 if quick else 1_000_000) for seed in SEEDS])
    last = data[data.step == data.step.max()]
    groups = last.groupby("seed").mu
    sums = {"positive": groups.apply(lambda mu: mu.clip(lower=0).sum())}
    sums["negative"] = -groups.apply(lambda mu: mu.clip(upper=0).sum())
    used = last[abs(last.mu) > 0.02]
    eta, best = (last.omega * last.mu).groupby(last.seed).sum(), debiased_step_size(**FOUR)
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
    adam = history(checkpoint("softmax-h4-s0").history)
    pages |= {"adam-omega": adam.plot(), "adam-mu": adam.plot_mu()}
    first, claims = figure_7(quick), records("softmax-four-heads-", asked)
    data = pd.concat([first.data.assign(figure=7), data.assign(figure=21)])
    return Measured(data, pages | dict(first.figures), [*first.claims, *claims])
