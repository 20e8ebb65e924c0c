"""Figure 7: <mu, omega> along gradient descent on the approximate loss, from random starts of 1 to
8 heads.

He et al. 2025, arXiv 2503.12734, figure 7 and eq. (4.3); the paper's ranges are not known.
Run: python -m analyses softmax/figure_7_descent_step (seconds)
"""

import numpy as np
import pandas as pd

from analyses.lib import SETTING, Measured, records
from mechinterp import figures
from mechinterp.theory.approximate_loss import approximate_loss, loss_gradients
from mechinterp.theory.softmax import debiased_step_size

STEP_SIZE, EVERY, HEADS = 0.01, 100, (2, 3, 4, 8)


def descent(n_heads: int, n_steps: int, seed: int = 0) -> pd.DataFrame:
    """omega, mu and the loss along gradient descent from N(0, 0.1^2)."""
    omega, mu = np.random.default_rng(seed).normal(size=(2, n_heads)) * 0.1
    rows = []
    for step in range(n_steps + 1):
        if step % EVERY == 0:
            loss = approximate_loss(omega, mu, **SETTING)
            rows.append({"step": step, "product": mu @ omega, "sum_mu": mu.sum(), "loss": loss})
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - STEP_SIZE * d_omega, mu - STEP_SIZE * d_mu
    return pd.DataFrame(rows).assign(n_heads=n_heads)


def measure(quick: bool) -> Measured:
    runs = {n_heads: descent(n_heads, 3_000 if quick else 100_000) for n_heads in HEADS}
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
