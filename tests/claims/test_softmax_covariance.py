"""Claims N1 to N3 of He et al. 2025 (arXiv 2503.12734): covariates with a Kac-Murdock-Szego
covariance, rho 0.3, 0.5 and 0.8.

The paper's d, L and rho for these runs are not known; here d_x 5, L 40, noise variance 0.1.
"""

from functools import cache

import numpy as np
import pytest

from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.checkpoints.checkpoint import load
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.theory.preconditioning import (
    debiased_preconditioner,
    debiased_step_risk,
    vanilla_preconditioner,
)
from mechinterp.training.sweep_file import load_sweep
from tests.conftest import CHECKPOINTS

pytestmark = pytest.mark.slow

RHOS = ("0.3", "0.5", "0.8")
NAMES = [f"kms-{rho}-h{h}-s{s}" for rho in RHOS for h in (1, 2) for s in (0, 1)]
# Ends above a pair: see test_outcomes.py.
STUCK = "kms-0.8-h2-s1"
PAIRS = [name for name in NAMES if "-h2-" in name and name != STUCK]
SETTING = {"context_length": 40, "noise_var": 0.1}


def sigma(name: str) -> np.ndarray:
    return covariance_matrix(load(CHECKPOINTS / name).config.task.covariance, 5)


@cache
def label(name: str) -> Classification:
    return classify(load(CHECKPOINTS / name))


def step(name: str) -> np.ndarray:
    """sum_h mu_h QK_h on x: the preconditioner of the model's step."""
    found = label(name).circuits
    return np.einsum("h,hij->ij", found.mu[:, 0], found.QK[:, :5, :5])


def distance(matrix: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(matrix - other) / np.linalg.norm(other))


def test_the_sweep_file_names_the_shipped_models_with_their_configs():
    models = load_sweep(CHECKPOINTS.parent / "analyses" / "sweeps" / "covariance.json")
    assert models == {name: load(CHECKPOINTS / name).config for name in NAMES}


@pytest.mark.parametrize("name", PAIRS)
def test_n1_a_pair_is_one_preconditioned_debiased_step(name: str):
    found = label(name)
    assert found.pattern == "preconditioned_gd"
    assert found.learner.r2 > 0.99
    debiased, vanilla = (
        preconditioner(sigma(name), **SETTING)
        for preconditioner in (debiased_preconditioner, vanilla_preconditioner)
    )
    assert distance(step(name), debiased) <= 0.04
    assert distance(step(name), debiased) < distance(step(name), vanilla) <= 0.06
    assert distance(step(name), np.linalg.inv(sigma(name))) > 3 * distance(step(name), debiased)


@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("kms-0.8")])
def test_n1_the_two_qk_circuits_are_opposite_within_5_percent_at_rho_08(name: str):
    first, second = label(name).circuits.QK[:, :5, :5]
    assert distance(first, -second) <= 0.05


@pytest.mark.parametrize("name", PAIRS)
def test_n1_qk_has_entries_off_its_three_diagonals_and_only_y_is_read(name: str):
    found, (row, column) = label(name).circuits, np.indices((5, 5))
    for QK in found.QK[:, :5, :5]:
        # Adam moves an entry by 0.003.
        assert abs(QK[abs(row - column) > 1]).max() > 0.003
    assert (found.ov_last_entry >= 0.999).all()


@pytest.mark.parametrize("name", PAIRS)
def test_n2_the_loss_is_that_of_the_best_debiased_preconditioner(name: str):
    model = load(CHECKPOINTS / name)
    found = shared_losses({name: model}, model.config.task, n_prompts=400_000, seed=1)
    best = debiased_step_risk(
        debiased_preconditioner(sigma(name), **SETTING), sigma(name), **SETTING
    )
    # The facts have the range for rho 0.5, 1.3% above the exact loss.
    low, high = (0.237, 0.240) if name.startswith("kms-0.5") else (best, 1.013 * best)
    assert low <= found.loss[0, 0] <= high


@pytest.mark.parametrize("name", PAIRS)
def test_n3_the_inverse_of_the_step_is_sigma_plus_a_multiple_of_the_identity(name: str):
    expected = sigma(name) + (5 + 5 * 0.1) / 40 * np.eye(5)
    assert distance(np.linalg.inv(step(name)), expected) <= 0.06
