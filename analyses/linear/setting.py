"""Shared code of the scripts on linear attention: the paper's task, flows, and curves on one axis.

Zhang, Singh, Latham, Saxe 2025, arXiv 2501.16265. Unless stated otherwise N is 31, the eigenvalues
are 0.4, 0.3, 0.2, 0.1, weights start from N(0, init^2), the flow is exact and on the population,
and times are in tau."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import plotly.graph_objects as go

from analyses.lib.plateaus import Plateaus, plateaus
from analyses.lib.theory.linear_dynamics import learning_rate_time
from mechinterp import TaskConfig, figures
from mechinterp.config import CovarianceConfig
from mechinterp.theory.linear import Heads, Moments, modes, population_moments, separate_heads
from mechinterp.training.linear import Flow, flow
from mechinterp.training.linear_models import sample_moments, training_set

EIGENVALUES, LENGTH = (0.4, 0.3, 0.2, 0.1), 31
MOMENTS = population_moments(np.array(EIGENVALUES), context_length=LENGTH)
FOUND = modes(MOMENTS)
TAU, FACTOR = learning_rate_time(0.02, n_factors=3, context_length=LENGTH)
"""Steps of descent per unit of time, and the factor of the weights in the published code, for
separate heads."""
NORMS = FOUND.targets ** (1 / 3)  # |v| of a head that has learned one direction
INITS = (1e-2, 1e-3)
# The same covariance in axes other than the eigenvectors.
AXES = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
TURNED = population_moments(AXES * EIGENVALUES @ AXES.T, context_length=LENGTH)


def task(context_length: int = LENGTH) -> TaskConfig:
    law = CovarianceConfig(kind="eigenvalues", eigenvalues=EIGENVALUES)
    return TaskConfig(
        d_x=4, context_length=context_length, covariance=law, beta_var=1.0, noise_var=0.0
    )


@cache
def set_moments(n_sequences: int, seed: int = 0) -> Moments:
    """Moments of a training set."""
    return sample_moments(training_set(task(), n_sequences, seed=seed), basis=np.eye(4))


def trained(heads: Heads, moments: Moments = MOMENTS, gap: float = 1e-8) -> Flow:
    """The flow until the loss is `gap` above its minimum."""
    return flow(heads, moments, duration=1e9, until_loss=modes(moments).levels[-1] + gap)


@cache
def separate(init: float, seed: int) -> tuple[Flow, Plateaus]:
    """Five separate heads of rank one, and the plateaus of their loss."""
    run = trained(separate_heads(5, 4, std=init, seed=seed))
    return run, plateaus(run, MOMENTS)


def half_time(run: Flow) -> float:
    """Time at which the loss first passes the middle of its first and last value."""
    return float(np.interp(-(run.loss[0] + run.loss[-1]) / 2, -run.loss, run.time))


def losses(time: np.ndarray, runs: Mapping[str, Flow]) -> dict[str, np.ndarray]:
    """Losses of several runs on one time axis; a run keeps its last value after its end."""
    return {name: np.interp(time, run.time, run.loss) for name, run in runs.items()}


def named(values: np.ndarray, *axes: str) -> dict[str, float]:
    """Entries of an array by their places: named(x, "seed", "level") -> {"seed 0, level 0": ...}."""
    return {
        ", ".join(f"{axis} {place}" for axis, place in zip(axes, index, strict=True)): float(value)
        for index, value in np.ndenumerate(values)
    }


def page(
    time: np.ndarray,
    curves: Mapping[str, np.ndarray],
    title: str,
    *,
    x_title: str = "time (tau)",
    levels: Sequence[float] | np.ndarray = FOUND.levels,
    log_x: bool = False,
) -> go.Figure:
    """Figure of losses with the levels of eq. (19) dotted."""
    return figures.lines(
        time, curves, title=title, x_title=x_title, y_title="loss (y²)", levels=levels, log_x=log_x
    )
