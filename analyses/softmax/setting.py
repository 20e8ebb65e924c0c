"""Shared code of the scripts on one layer of softmax attention: the shipped models by label, and
their heads.

He et al. 2025, arXiv 2503.12734, at its setting. A head is active if |mu| > 0.3 and its QK is
mostly diagonal; it is strong if |mu| > 1. Scales at the end are means over the last 20 logged
steps, because Adam's noise moves single steps."""

from functools import cache

import numpy as np
import plotly.graph_objects as go

from analyses.lib import checkpoint, trained
from mechinterp import circuits, classify, history
from mechinterp.analysis.one_layer.classification import Classification
from mechinterp.analysis.training.history import History

BOTH_SIGNS = {"selection": "models labelled debiased_gd"}


@cache
def label(name: str) -> Classification:
    return classify(checkpoint(name))


@cache
def dynamics(name: str) -> History:
    return history(checkpoint(name).history)


def single() -> list[str]:
    """Models of one head."""
    return trained("softmax-h1-s*")


def several() -> list[str]:
    """Models of two or more heads."""
    return trained("softmax-h[2348]-s*")


def paired(pattern: str = "softmax-h[2348]-s*") -> list[str]:
    """Models that ended with heads of both signs, as a debiased step."""
    return [name for name in trained(pattern) if label(name).label == "debiased_gd"]


def active(name: str, least: float = 0.3) -> np.ndarray:
    """Mask of the heads with |mu| above `least` and a diagonal QK."""
    found = circuits(checkpoint(name))
    return (abs(found.mu[0, :, 0]) > least) & (found.qk_diagonal[0] > 0.7)


def ends(name: str) -> tuple[np.ndarray, np.ndarray]:
    """omega and mu of each head at the end of training."""
    return dynamics(name).omega[-20:].mean(0), dynamics(name).mu[-20:].mean(0)


def gamma(name: str) -> float:
    """Common |omega| at the end of training, weighted by |mu|."""
    omega, mu = ends(name)
    return float(np.average(abs(omega), weights=abs(mu)))


def circuit_pages(name: str, step: int | None = None) -> dict[str, go.Figure]:
    """Figures of QK and OV of a model, at the end or at a saved step."""
    model = checkpoint(name)
    found = circuits(model if step is None else model.snapshots[step])
    where = name if step is None else f"{name}, step {step:,}"
    return titled({"QK": found.plot_qk(), "OV": found.plot_ov()}, where)


def scale_pages(name: str) -> dict[str, go.Figure]:
    """Figures of omega and mu of a model during training."""
    return titled({"omega": dynamics(name).plot(), "mu": dynamics(name).plot_mu()}, name)


def titled(plots: dict[str, go.Figure], where: str) -> dict[str, go.Figure]:
    names = {f"{what}, {where}": plot for what, plot in plots.items()}
    return {name: plot.update_layout(title_text=name) for name, plot in names.items()}
