"""Claims of the theory without a figure: T2, T3 and T4.

He et al. 2025, arXiv 2503.12734, section 4 and theorem 4.2. Run: python -m analyses softmax/theory
(a minute)"""

from itertools import pairwise

import numpy as np
import pandas as pd

from analyses.lib import SETTING, Measured, record
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.approximate_loss import approximate_loss, loss_gradients, manifold_loss
from analyses.lib.theory.softmax import manifold_mu
from mechinterp import TaskConfig
from mechinterp.icl.predictors import debiased_gd
from mechinterp.icl.prompts import prompt_chunks
from mechinterp.models.constructions.one_layer import debiased_gradient_step, diagonal_heads
from mechinterp.models.heads import predict

GAMMAS = (0.02, 0.04, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25)


def gradient_error() -> float:
    """Largest difference between the closed-form gradients and central differences."""
    start = np.random.default_rng(0).normal(size=(2, 4)) * [[0.3], [1.0]]
    closed, worst = loss_gradients(*start, **SETTING), 0.0
    for index in np.ndindex(2, 4):
        ends = [start.copy(), start.copy()]
        ends[0][index], ends[1][index] = start[index] + 1e-5, start[index] - 1e-5
        above, below = (approximate_loss(*end, **SETTING) for end in ends)
        worst = max(worst, abs((above - below) / 2e-5 - closed[index[0]][index[1]]))
    return worst


def slope_towards_descent() -> float:
    """Power of gamma with which a pair's predictions approach those of debiased GD."""
    prompts = next(iter(prompt_chunks(TaskConfig(), 8192, seed=8)))
    gammas, gaps = np.array([0.1, 0.05, 0.025]), []
    for gamma in gammas:
        pair = debiased_gradient_step(0.88, gamma, d_x=5)
        double = prompts.to(pair.W_Q.dtype)
        gap = predict(pair, double) - debiased_gd(double, eta=0.88)
        gaps.append(float(gap.square().mean().sqrt()))
    return float(np.polyfit(np.log(gammas), np.log(gaps), 1)[0])


def measure(quick: bool) -> Measured:
    mus = {gamma: manifold_mu(gamma, **SETTING) for gamma in GAMMAS}
    models = {f"{g}": diagonal_heads([g, -g], [m, -m], d_x=5) for g, m in mus.items()}
    n_prompts = 20_000 if quick else 400_000
    found = shared_losses(models, TaskConfig(), n_prompts=n_prompts, seed=7)
    approximate = np.array([manifold_loss(gamma, **SETTING) for gamma in GAMMAS])
    columns = {"gamma": GAMMAS, "approximate": approximate, "loss": found.loss[0]}
    data = pd.DataFrame(columns | {"rise": found.gap[0], "rise_sem": found.gap_sem[0]})
    steps = [f"{low:g} to {high:g}" for low, high in pairwise(GAMMAS)]
    true = {f"{GAMMAS[0]:g} to {row.gamma:g}": row for row in data.iloc[1:].itertuples()}
    rises = {name: (row.rise / row.rise_sem, 1.0) for name, row in true.items()}
    over, drawn = ({"prompts": n, "prompts' seed": s} for n, s in ((n_prompts, 7), (8192, 8)))
    claims = [
        record("softmax-T2-approximate", dict(zip(steps, np.diff(approximate), strict=True))),
        record("softmax-T2-true", rises, over=over),
        record("softmax-T3", {"closed form": gradient_error()}),
        record("softmax-T4", {"pair": slope_towards_descent()}, over=drawn),
    ]
    return Measured(data, claims=claims)
