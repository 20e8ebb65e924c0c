"""What the scripts on one layer of softmax attention share: the shipped models by how they ended,
and their heads.

He et al. 2025, arXiv 2503.12734, at its setting. A head is active if |mu| > 0.3 and most of its QK
lies on the diagonal, strong if |mu| > 1. Scales at the end are means over the last 20 logged steps,
which Adam's noise moves.
"""

from functools import cache

import numpy as np

from analyses.lib import checkpoint, shipped
from mechinterp import circuits, classify, training_dynamics
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.training.over_training import TrainingDynamics

BOTH_SIGNS = {"selection": "models labelled debiased_gd"}


@cache
def label(name: str) -> Classification:
    return classify(checkpoint(name))


@cache
def dynamics(name: str) -> TrainingDynamics:
    return training_dynamics(checkpoint(name).history)


def single() -> list[str]:
    """Models of one head."""
    return shipped("softmax-h1-s*")


def several() -> list[str]:
    """Models of two heads and more."""
    return shipped("softmax-h[2348]-s*")


def paired(pattern: str = "softmax-h[2348]-s*") -> list[str]:
    """Models that ended with heads of both signs, as a debiased step."""
    return [name for name in shipped(pattern) if label(name).pattern == "debiased_gd"]


def active(name: str, least: float = 0.3) -> np.ndarray:
    """Which heads have a |mu| above `least` and a diagonal QK."""
    found = circuits(checkpoint(name))
    return (abs(found.mu[:, 0]) > least) & (found.qk_diagonal > 0.7)


def ends(name: str) -> tuple[np.ndarray, np.ndarray]:
    """omega and mu of each head at the end."""
    return dynamics(name).omega[-20:].mean(0), dynamics(name).mu[-20:].mean(0)


def gamma(name: str) -> float:
    """The common |omega| at the end, weighted by |mu|."""
    omega, mu = ends(name)
    return float(np.average(abs(omega), weights=abs(mu)))
