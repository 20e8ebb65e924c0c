"""Figures 12 and 15: pairs of heads trained on correlated covariates take a preconditioned step.

He et al. 2025, arXiv 2503.12734, figures 12 and 15. QK circuits are compared with the inverse
covariance and the best preconditioner. The inverse of a pair's step is compared with the covariance
plus a multiple of the identity. Sigma_ij = rho^|i-j|. The paper's d, L and rho are unknown; here
d_x 5, L 40 and rho 0.3, 0.5, 0.8.
Run: python -m analyses softmax/figures_12_and_15_correlated (half a minute)"""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from analyses.lib import Measured, checkpoint, record, records, trained
from analyses.lib.shared_losses import shared_losses
from analyses.lib.theory import preconditioning as theory
from mechinterp import circuits, classify, heatmaps
from mechinterp.icl.prompts import covariance_matrix

SETTING = {"context_length": 40, "noise_var": 0.1}
RHOS = (0.3, 0.5, 0.8)
ASKED = {
    "off-tridiagonal": "off_tridiagonal",
    "ov": "ov_last_entry",
    "opposite": "opposite",
    "debiased": "to_debiased",
    "vanilla": "to_vanilla",
    "inverse": "times_nearer",
}
"""Data columns of the clauses of N1."""


def distance(matrix: np.ndarray, other: np.ndarray) -> float:
    """Relative Frobenius distance."""
    return float(np.linalg.norm(matrix - other) / np.linalg.norm(other))


def off_tridiagonal(QK: np.ndarray) -> float:
    """Largest entry outside the three middle diagonals, for the head where it is smallest."""
    row, column = np.indices(QK.shape[1:])
    far = abs(row - column) > 1
    return min(float(abs(one[far]).max()) for one in QK)


def step_of(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """QK of both heads on x, the step that they take together, and Sigma."""
    found = circuits(checkpoint(name))
    QK, sigma = found.QK[0, :, :5, :5], covariance_matrix(checkpoint(name).task.covariance, 5)
    return QK, np.einsum("h,hij->ij", found.mu[0, :, 0], QK), sigma


def grown(sigma: np.ndarray) -> np.ndarray:
    """Sigma + (tr Sigma + d s²) / L, which is close to the inverse of the best step."""
    return sigma + (5 + 5 * 0.1) / 40 * np.eye(5)


def pair_row(name: str, n_prompts: int) -> dict[str, float | str]:
    """Label of a pair, distances of its step from the closed forms, and its loss next to that of
    the best step."""
    model, (QK, step, sigma) = checkpoint(name), step_of(name)
    debiased, inverse = theory.debiased_preconditioner(sigma, **SETTING), np.linalg.inv(sigma)
    losses = shared_losses({name: model}, model.task, n_prompts=n_prompts, seed=1)
    return {
        "model": name,
        "pattern": classify(model).label,
        "rho": model.task.covariance.rho,
        "off_tridiagonal": off_tridiagonal(QK),
        "ov_last_entry": circuits(model).ov_last_entry.min(),
        "opposite": distance(QK[0], -QK[1]),
        "to_debiased": distance(step, debiased),
        "times_nearer": distance(step, inverse) / distance(step, debiased),
        "to_vanilla": distance(step, theory.vanilla_preconditioner(sigma, **SETTING)),
        "to_inverse": distance(step, inverse),
        "inverse_gap": distance(np.linalg.inv(step), grown(sigma)),
        "loss": losses.loss[0, 0],
        "loss_sem": losses.loss_sem[0, 0],
        "best": theory.debiased_step_risk(debiased, sigma, **SETTING),
    }


def pages(rho: float) -> dict[str, go.Figure]:
    """Figures of a pair's circuits and of the matrices for comparison."""
    name, axis = f"kms-{rho}-h2-s0", [f"x{i}" for i in range(5)]
    _, step, sigma = step_of(name)
    matrices = {
        "inverse of Sigma": np.linalg.inv(sigma),
        "best debiased preconditioner": theory.debiased_preconditioner(sigma, **SETTING),
        "inverse of sum mu QK": np.linalg.inv(step),
        "Sigma + (tr Sigma + d s²)/L I": grown(sigma),
    }
    shown = {f"QK-{rho}": circuits(checkpoint(name)).plot_qk()}
    for title, matrix in matrices.items():
        title = f"{title}, rho {rho}"
        shown[title] = heatmaps.heatmap(matrix, title=title, rows=axis, columns=axis)
    return shown


def measure(quick: bool) -> Measured:
    names = [name for rho in RHOS for name in trained(f"kms-{rho}-h2-s*")]
    n_prompts = 10_000 if quick else 200_000
    over = {"selection": "pairs labelled preconditioned_gd"}
    data = pd.DataFrame([pair_row(name, n_prompts) for name in names])
    stepped = data.pattern == "preconditioned_gd"
    both = dict(zip(names, stepped.astype(float), strict=True))
    claims, shown = [record("softmax-N1-preconditioned", both)], {}
    for rho, rows in data[stepped].set_index("model").groupby("rho"):
        asked = {f"N1-{name}-rho{rho}": rows[column] for name, column in ASKED.items()}
        asked[f"N3-rho{rho}"] = rows.inverse_gap
        drawn = {"prompts": n_prompts} | over
        claims += records("softmax-", asked, over=over)
        claims.append(record(f"softmax-N2-rho{rho}", rows.loss, errors=rows.loss_sem, over=drawn))
    for rho in RHOS:
        shown |= pages(rho)
    return Measured(data, shown, claims)
