"""Principal components that the heads of linear attention have learned, and the algorithm they make.

The prediction is b^T M x_query with M = sum_h v_h U_h, U_h = K_h^T Q_h for separate heads. In the eigenbasis of
the covariance M says how far each principal component is learned, and each head what it adds to that.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.result import HEAD_COLUMNS, Table
from mechinterp.config import TaskConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.models.run.evaluation import task_for
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import Heads, MergedHeads, Modes, SeparateHeads, modes
from mechinterp.training.linear_models import task_moments

SAME_RATE = 1e-6  # growth rates closer than this, relative to the largest, share an eigenspace
UNDER_WAY = (0.1, 0.9)
"""Learned fractions between which a component counts as partly learned; a wider range shows more
components."""
EQUAL = 0.05
"""Relative difference below which two things count as equal: the default of `Thresholds.equal`."""
LEARNED = 0.5
"""A direction counts as used if its learned part exceeds this."""


@dataclass(frozen=True, eq=False)
class Components:
    """A step of linear attention in the eigenbasis of its task."""

    learned: Float[np.ndarray, " mode"]
    """f_d, the learned part of each direction, fastest direction first: 0 before learning, 1 after.
    """
    off_diagonal: float
    """E y_off^2 / E y^2, where y_off is the prediction due to entries of M between two directions.
    """
    n_components: int | None
    """Number of directions that are more than half learned; None if `off_diagonal` exceeds its
    limit."""


def components(
    M: Float[np.ndarray, "d_x d_x"], task: TaskConfig, *, limit: float = EQUAL
) -> Components:
    """Components of the step y_hat = b^T M x_query, b = (1/L) sum_l y_l x_l.

    Within the space of a repeated eigenvalue, the directions are those of M itself.

    Args:
        limit: Largest `off_diagonal` at which `n_components` is given.
    Raises:
        ValueError: If the task has several responses or supports.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (22).
    Example:
        >>> task = TaskConfig(d_x=2, noise_var=0.0)
        >>> components(np.diag([0.9, 0.0]), task).n_components
        1
    """
    moments = task_moments(task)
    given = modes(moments)
    vectors = given.vectors.copy()
    gaps = -np.diff(given.rates) > SAME_RATE * given.rates[0]
    for space in np.split(np.arange(len(given.rates)), 1 + np.flatnonzero(gaps)):
        basis = vectors[:, space]
        block = basis.T @ M @ basis
        vectors[:, space] = basis @ np.linalg.eigh((block + block.T) / 2)[1][:, ::-1]
    learned = Modes(given.variance, given.rates, given.targets, vectors).learned(M)
    along = (vectors * learned * given.targets) @ vectors.T
    off = float(moments.squared_norm(M - along)) / moments.yy
    count = int((learned > LEARNED).sum()) if off <= limit else None
    return Components(learned=learned, off_diagonal=off, n_components=count)


@dataclass(frozen=True, eq=False, repr=False)
class LinearComponents(Result):
    """Learned part of each principal component, and what each head adds to it."""

    learned: Float[np.ndarray, " mode"]
    held: Float[np.ndarray, "head mode"]
    value: Float[np.ndarray, " head"]
    key: Float[np.ndarray, "head mode"] | None
    query: Float[np.ndarray, "head mode"] | None
    rank: int
    """Rows of a head's key and query; those of U for merged heads."""
    n_components: int | None
    """Number of directions more than half learned; None if M is not diagonal in the eigenbasis."""
    off_diagonal: float
    """Share of E y^2 that M predicts off the diagonal."""
    eigenvalues: Float[np.ndarray, " mode"]
    """Eigenvalues of the covariance of x, in the order of learning; unit x^2."""
    levels: Float[np.ndarray, " level"]
    """Loss with 0, 1, ... directions learned, unit y^2."""
    COLUMNS: ClassVar = {
        "learned": "f_d, the learned fraction of each direction: 0 before learning, 1 after.",
        "held": "Contribution of each head to f_d: v_h e_d^T U_h e_d / m_d; they add up to f_d.",
        "value": "Value weights v_h.",
        "key": "K_h e_d; its norm over the rows of K_h for heads of rank 2 and more; None for merged heads.",
        "query": "Q_h e_d, with norms as in key.",
        "head": HEAD_COLUMNS["head"],
        "component": "Principal component of x, 1 for the one learned first.",
    }

    def __repr__(self) -> str:
        return f"LinearComponents({self.headline})"

    @property
    def headline(self) -> str:
        """The algorithm that the heads make, in words."""
        count, n_modes = self.n_components, len(self.learned)
        if count is None:
            return f"no step on components ({self.off_diagonal:.0%} of E y² off them)"
        text = f"principal component regression on {count} of {n_modes} components"
        if count == 0:
            text = f"predicts nearly 0: none of {n_modes} components learned"
        if count == n_modes:
            text = f"a gradient step preconditioned on all {n_modes} components"
        low, high = UNDER_WAY
        parts = enumerate(self.learned, start=1)
        going = [f"{number} at {part:.0%}" for number, part in parts if low < part < high]
        return f"{text} (component {', '.join(going)})" if going else text

    def to_frame(self) -> pd.DataFrame:
        """One row per head and direction."""
        head, mode = np.indices(self.held.shape).reshape(2, -1)
        columns = {"head": head, "component": mode + 1}
        columns |= {"held": self.held.ravel(), "learned": self.learned[mode]}
        columns["value"] = self.value[head]
        vectors = {"key": self.key, "query": self.query}
        columns |= {name: each.ravel() for name, each in vectors.items() if each is not None}
        return pd.DataFrame(columns)

    def tables(self) -> dict[str, Table]:
        """Every component and head."""
        return {"components": Table(self.to_frame(), "Components", by="held")}

    def figures(self) -> dict[str, go.Figure]:
        """Learned parts, and the heads."""
        return {"components": self.plot(), "component_heads": self.plot_heads()}

    def plot(self) -> go.Figure:
        """Learned part of each direction, divided among the heads."""
        columns = [f"e{number} (λ {value:.3g})" for number, value in enumerate(self.eigenvalues, 1)]
        return self._plot(self.held, "Contribution of each head to the learned part", columns)

    def plot_heads(self) -> go.Figure:
        """Value, key and query of each head in the eigenbasis."""
        if self.key is None or self.query is None:
            return self._plot(self.value[:, None], "Value weight of each head", ["v"])
        form = "{}·e{}" if self.rank == 1 else "|{}·e{}|"
        numbers = range(1, len(self.learned) + 1)
        names = ["v", *(form.format(kind, number) for kind in "kq" for number in numbers)]
        vectors = np.concatenate([self.value[:, None], self.key, self.query], 1)
        return self._plot(vectors, "Value, key and query of each head", names)

    def _plot(self, values: np.ndarray, title: str, columns: list[str]) -> go.Figure:
        rows = [f"head {head}" for head in range(len(values))]
        limit = float(np.abs(values).max()) or 1.0
        return heatmaps.heatmap(values, title=title, rows=rows, columns=columns, limit=limit)


def linear_components(source: Source) -> LinearComponents:
    """Principal components that the heads of one layer of linear attention have learned.

    With M = Σ v K^T Q over heads, the learned fraction of a component e of the covariance is e^T M e
    divided by its value at the optimum. A component counts as learned if the fraction is above one
    half. Each head contributes v (K e)^T (Q e) to e^T M e. For heads of rank two and more, the
    norms of K e and Q e are shown. `over_steps` shows the learning of components during training.

    Raises:
        ValueError: If the model has another score, several layers, responses or supports.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (19), (20) and (22).
    See also:
        `circuits`, `over_steps`, `jump_forecast`.
    Example:
        >>> from mechinterp import load
        >>> linear_components(load("checkpoints/linear-separate-s2"))
        LinearComponents(principal component regression on 3 of 4 components)
    """
    weights = predictor_of(source).weights
    if weights is None or weights.model.score != "linear/L" or not weights.model.one_attention:
        got = "a model without weights by name"
        if weights is not None:
            got = weights.model.beyond_one_layer or f"score {weights.model.score}"
        raise ValueError(f"linear_components needs one layer of linear attention, got {got}.")
    task = task_for(source, None, "linear_components")
    directions, heads = modes(task_moments(task)), heads_of_linear(weights)
    basis = directions.vectors
    if isinstance(heads, MergedHeads):
        U, rank, key, query = heads.U, task.d_x, None, None
    else:
        U, rank = np.einsum("hri,hrj->hij", heads.K, heads.Q), heads.K.shape[1]
        key, query = (rows @ basis for rows in (heads.K, heads.Q))
        # A rotation of the rows of a head changes nothing: with several rows only norms are shown.
        norms = (np.linalg.norm(rows, axis=1) for rows in (key, query))
        key, query = (key[:, 0], query[:, 0]) if rank == 1 else norms
    U = basis.T @ U @ basis
    M = np.einsum("h,hij->ij", heads.v, U)
    used = components(basis @ M @ basis.T, task)
    covariance = covariance_matrix(task.covariance, task.d_x)
    return LinearComponents(
        learned=np.diag(M) / directions.targets,
        held=np.einsum("h,hdd->hd", heads.v, U) / directions.targets,
        value=heads.v,
        key=key,
        query=query,
        rank=rank,
        n_components=used.n_components,
        off_diagonal=used.off_diagonal,
        eigenvalues=np.einsum("id,ij,jd->d", basis, covariance, basis),
        levels=directions.levels,
    )


def heads_of_linear(weights: Weights) -> Heads:
    """v, K and Q (or U) of one layer of linear attention with one response, in float64."""
    weights = weights.to(torch.float64)
    d_x, factor = weights.d_x, weights.scale * weights.model.score_slope
    value, key = weights.mu[:, 0].numpy(force=True), weights.W_K[0, :, :d_x].mT.numpy(force=True)
    query = factor * weights.W_Q[0, :, :d_x].mT.numpy(force=True)
    if weights.model.merged_qk:
        return MergedHeads(v=value, U=np.einsum("hri,hrj->hij", key, query))
    return SeparateHeads(v=value, K=key, Q=query)
