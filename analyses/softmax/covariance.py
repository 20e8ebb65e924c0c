"""What the scripts of figures 12 and 15 share: pairs of heads trained on correlated covariates.

Sigma_ij = rho^|i-j|. The paper's d, L and rho are not known: here d_x 5, L 40 and rho 0.3, 0.5,
0.8.
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import checkpoint, shipped
from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.preconditioning import (
    debiased_preconditioner,
    debiased_step_risk,
    vanilla_preconditioner,
)

SETTING = {"context_length": 40, "noise_var": 0.1}
RHOS = (0.3, 0.5, 0.8)


def distance(matrix: np.ndarray, other: np.ndarray) -> float:
    """Relative Frobenius distance."""
    return float(np.linalg.norm(matrix - other) / np.linalg.norm(other))


def off_tridiagonal(QK: np.ndarray) -> float:
    """The largest entry off the three middle diagonals, of the head where it is least."""
    row, column = np.indices(QK.shape[1:])
    far = abs(row - column) > 1
    return min(float(abs(one[far]).max()) for one in QK)


def pair_row(name: str, n_prompts: int) -> dict[str, float | str]:
    """What a pair is, how far its step is from the closed forms, and its loss beside that of the
    best step."""
    model = checkpoint(name)
    task, found = model.config.task, circuits(model)
    sigma, QK = covariance_matrix(task.covariance, 5), found.QK[:, :5, :5]
    step = np.einsum("h,hij->ij", found.mu[:, 0], QK)
    debiased = debiased_preconditioner(sigma, **SETTING)
    losses = shared_losses({name: model}, task, n_prompts=n_prompts, seed=1)
    return {
        "model": name,
        "pattern": classify(model).pattern,
        "rho": task.covariance.rho,
        "off_tridiagonal": off_tridiagonal(QK),
        "ov_last_entry": found.ov_last_entry.min(),
        "opposite": distance(QK[0], -QK[1]),
        "to_debiased": distance(step, debiased),
        "times_nearer": distance(step, np.linalg.inv(sigma)) / distance(step, debiased),
        "to_vanilla": distance(step, vanilla_preconditioner(sigma, **SETTING)),
        "to_inverse": distance(step, np.linalg.inv(sigma)),
        "inverse_gap": distance(np.linalg.inv(step), sigma + (5 + 5 * 0.1) / 40 * np.eye(5)),
        "loss": losses.loss[0, 0],
        "loss_sem": losses.loss_sem[0, 0],
        "best": debiased_step_risk(debiased, sigma, **SETTING),
    }


def pairs(quick: bool) -> pd.DataFrame:
    names = [name for rho in RHOS for name in shipped(f"kms-{rho}-h2-s*")]
    return pd.DataFrame([pair_row(name, 10_000 if quick else 200_000) for name in names])
