"""Figure 6: loss of two opposite heads over omega and mu, its approximation, and the difference.

He et al. 2025, arXiv 2503.12734, figure 6. All cells of the grid share 10,000 prompts.
Run: python -m analyses softmax/figure_6_loss_surface (half a minute; --quick a coarser grid, 1,000
    prompts)"""

import numpy as np
import pandas as pd
import torch

from analyses.lib import SETTING, Measured, Record, records
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory.approximate_loss import approximate_loss, corrected_loss
from mechinterp import TaskConfig, heatmaps
from mechinterp.models.constructions.one_layer import diagonal_heads


def measure(quick: bool) -> Measured:
    n = 5 if quick else 20
    omegas, mus = np.linspace(0, 0.2, n), np.linspace(0, 6, n)
    grid = [(omega, mu) for omega in omegas for mu in mus]
    heads = {pair: (np.array([pair[0], -pair[0]]), np.array([pair[1], -pair[1]])) for pair in grid}
    models = {f"{o:.4f} {m:.4f}": diagonal_heads([o, -o], [m, -m], d_x=5) for o, m in grid}
    n_prompts = 1000 if quick else 10_000
    found = shared_losses(models, TaskConfig(), n_prompts=n_prompts)
    data = pd.DataFrame(grid, columns=["omega", "mu"])
    data["loss"], data["loss_sem"] = found.loss[0], found.loss_sem[0]
    data["approximate"] = [approximate_loss(*heads[pair], **SETTING) for pair in grid]
    data["corrected"] = [corrected_loss(*heads[pair], **SETTING) for pair in grid]
    claims = loss_records(4000 if quick else 400_000)
    return Measured(data, _heatmaps(data, omegas, mus), claims)


def loss_records(n_prompts: int) -> list[Record]:
    """T1: the true loss, from its difference to the zero predictor on the same prompts, and the
    approximate loss."""
    zero = 1 + SETTING["noise_var"]
    pairs = {
        f"omega {omega}, mu {mu}": (np.array([omega, -omega]), np.array([mu, -mu]))
        for omega in (0.03, 0.08, 0.15)
        for mu in (1.0, 2.5, 4.0)
    }
    models = {"zero": lambda prompts: torch.zeros_like(prompts.y_query)}
    models |= {name: diagonal_heads(*pair, d_x=5) for name, pair in pairs.items()}
    found = shared_losses(models, TaskConfig(), n_prompts=n_prompts, seed=6)
    loss = dict(zip(models, zero + found.gap[0], strict=True))
    sem = dict(zip(models, found.gap_sem[0], strict=True))
    off = {
        name: {key: (loss[key] - form(*pair, **SETTING), sem[key]) for key, pair in pairs.items()}
        for name, form in {"term": corrected_loss, "plain": approximate_loss}.items()
    }
    return records("softmax-T1-", off, over={"prompts": n_prompts, "prompts' seed": 6})


def _heatmaps(data: pd.DataFrame, omegas: np.ndarray, mus: np.ndarray) -> dict:
    surfaces = {
        "Loss, Monte Carlo": data.loss,
        "Approximate loss (4.1)": data.approximate,
        "Loss minus approximate loss": data.loss - data.approximate,
    }
    names = {"rows": [f"omega {omega:.3f}" for omega in omegas]}
    names["columns"] = [f" mu {mu:.2f}" for mu in mus]
    shape = len(omegas), len(mus)
    return {
        title: heatmaps.heatmap(values.to_numpy().reshape(shape), title=title, unit="y²", **names)
        for title, values in surfaces.items()
    }
