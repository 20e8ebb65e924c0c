"""Figures 1, 3, 5 and 14: circuits of one and two heads, and the change of heads during training.

He et al. 2025, arXiv 2503.12734, figures 1 and 3, and circuits at snapshots of two heads and of a
model with a dummy head, figures 5 and 14. Run: python -m analyses
softmax/figures_1_3_5_and_14_circuits (seconds)"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib import Measured, Record, checkpoint, records, trained
from analyses.lib.milestones import milestones
from analyses.softmax.setting import circuit_pages, dynamics, label, scale_pages
from mechinterp import circuits, figures
from mechinterp.analysis.training.history import History

ONE, TWO, FOUR = "softmax-h1-s0", "softmax-h2-s0", "softmax-h4-s0"
STEPS = (0, 1_000, 2_000, 10_000, 100_000, 500_000)


def of_heads(values: np.ndarray) -> dict[str, float]:
    return {f"head {head}": float(value) for head, value in enumerate(values)}


def snapshots() -> tuple[pd.DataFrame, dict[str, go.Figure], list[Record]]:
    """Circuits at snapshots, and how clear the pattern is early on."""
    with_dummy = [n for n in trained("softmax-h[348]-s*") if "dummy" in label(n).labels]
    frames, pages = [], {}
    for name in (TWO, with_dummy[0]):
        for step in STEPS:
            found = circuits(checkpoint(name).snapshots[step])
            frames.append(found.to_frame().assign(model=name, step=step, part="snapshots"))
            pages |= circuit_pages(name, step)
    early = {name: checkpoint(name).snapshots[2000] for name in trained("softmax-h2-s*")}
    clear = {name: circuits(weights).qk_diagonal.min() for name, weights in early.items()}
    asked = {"early-pattern": clear, "O1e-some": {"models": len(with_dummy)}}
    return pd.concat(frames), pages, records("softmax-", asked)


def grouped(found: History) -> go.Figure:
    """Sums of the positive mu, of the negative mu and of all mu over training."""
    positive, negative = found.group_mu[found.step > 0].T
    return figures.lines(
        found.step[found.step > 0],
        {"positive heads": positive, "negative heads": negative, "all": positive + negative},
        title="Sums of mu during training",
        x_title="step",
        y_title="sum of mu",
        log_x=True,
        zero_line=True,
    )


def measure(quick: bool) -> Measured:
    pair, moved = circuits(checkpoint(TWO)), dynamics(TWO)
    sums = abs(moved.mu[moved.step >= 5000].sum(1)).max()
    scales = {"omega": abs(pair.omega_mean[0]), "mu": abs(pair.mu[0, :, 0])}
    scales["peak"] = milestones(moved).peak_step
    asked = {f"two-heads-{name}": of_heads(values) for name, values in scales.items()}
    asked["two-heads-sum"] = {TWO: sums}
    singles = {name: circuits(checkpoint(name)) for name in trained("softmax-h1-s*")}
    omega = {name: abs(found.omega_mean[0, 0]) for name, found in singles.items()}
    mu = {name: abs(found.mu[0, 0, 0]) for name, found in singles.items()}
    smoothers = {name: float(label(name).label == "kernel_regression") for name in singles}
    asked |= {"S1-smoother": smoothers, "S1-omega": omega, "S1-mu": mu}
    asked |= {"S1-theory-omega": omega, "S1-theory-mu": mu}
    four = {name: dynamics(name) for name in trained("softmax-h4-s*")}
    groups = {name: abs(found.group_mu[-20:].mean(0)) for name, found in four.items()}
    for column, sign in enumerate(("positive", "negative")):
        asked[f"four-heads-{sign}"] = {name: sums[column] for name, sums in groups.items()}
    pages = {"groups": grouped(four[FOUR])}
    pages |= circuit_pages(ONE) | circuit_pages(TWO) | scale_pages(TWO) | scale_pages(FOUR)
    data = pd.concat([dynamics(name).to_frame().assign(model=name) for name in (TWO, *four)])
    kept, more, claims = snapshots()
    data = pd.concat([data.assign(part="training"), kept])
    return Measured(data, pages | more, records("softmax-", asked) + claims)
