"""Principal components in the heads of linear attention at each saved step, and the algorithm that
they form.

The prediction is b^T M x_query with M = sum_h v_h U_h, U_h = K_h^T Q_h for separate heads. In the
eigenbasis of the covariance, M shows the learned part of each principal component, and each head
its contribution."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.one_layer.pca_components import components
from mechinterp.analysis.result import Table
from mechinterp.analysis.training.kept_steps import KeptSteps, kept_steps, loss_curve, snapshots_of
from mechinterp.analysis.training.plateaus import dashed, jump_forecast
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import covariance_matrix
from mechinterp.models.run.predictor import Source
from mechinterp.models.weights import Weights, why_no_circuits
from mechinterp.theory.linear import Modes, modes
from mechinterp.training.linear.trainer import task_moments

UNDER_WAY = (0.1, 0.9)  # a component with a learned part in this range is being learned


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LinearSnapshots(KeptSteps):
    """Loss, heads and learned components at each saved step."""

    learned: Float[np.ndarray, "snapshot mode"]
    """f_d, the learned part of each direction: 0 before learning, 1 after."""
    held: Float[np.ndarray, "snapshot head mode"]
    """Contribution of each head to f_d, v_h e_d^T U_h e_d / m_d; the sum over heads is f_d."""
    value: Float[np.ndarray, "snapshot head"]
    """Value weights v_h."""
    key: Float[np.ndarray, "snapshot head mode"] | None
    """K_h e_d; for heads of rank 2 and more its norm over the rows of K_h; None for merged heads.
    """
    query: Float[np.ndarray, "snapshot head mode"] | None
    """Q_h e_d, in the same form."""
    rank: int
    """Number of rows of a head's key and query; for merged heads that of U."""
    n_components: tuple[int | None, ...]
    """Number of directions that are more than half learned; None if M is not diagonal in the
    eigenbasis."""
    off_diagonal: Float[np.ndarray, " snapshot"]
    """Fraction of E y^2 predicted by off-diagonal entries of M."""
    eigenvalues: Float[np.ndarray, " mode"]
    """Eigenvalues of the covariance of x, in the order of learning; unit x^2."""
    levels: Float[np.ndarray, " level"]
    """Loss with 0, 1, ... directions learned; unit y^2."""
    jumps: Float[np.ndarray, " jump"]
    """Steps at which the loss is predicted to drop, from the initial weights alone."""
    forecast: str
    """Sentence with the predicted jumps, or why there are none."""
    COLUMNS: ClassVar = {"algorithm": "Algorithm that the model computes at this step, in words."}

    def __repr__(self) -> str:
        return f"LinearSnapshots({len(self.step)}; at the end {self.algorithm(-1)})"

    def algorithm(self, row: int) -> str:
        """Algorithm at a snapshot, in words."""
        count, n_modes = self.n_components[row], self.learned.shape[1]
        if count is None:
            return f"no step on components (off-diagonal part {self.off_diagonal[row]:.0%} of E y²)"
        text = f"principal component regression on {count} of {n_modes} components"
        if count == 0:
            text = f"predicts almost 0: none of {n_modes} components learned"
        if count == n_modes:
            text = f"a gradient step preconditioned on all {n_modes} components"
        low, high = UNDER_WAY
        going = [
            f"{mode + 1} at {part:.0%}"
            for mode, part in enumerate(self.learned[row])
            if low < part < high
        ]
        return f"{text} (component {', '.join(going)})" if going else text

    def sentences(self) -> list[str]:
        """Algorithm at the end, and the predicted jumps."""
        return [f"{len(self.step)} saved steps; at the end {self.algorithm(-1)}.", self.forecast]

    def tables(self) -> dict[str, Table]:
        """Table of all components and heads at every saved step."""
        return {"components": Table(self.to_frame(), "Components at the saved steps", brief=False)}

    def figures(self) -> dict[str, go.Figure]:
        """Loss, learned parts and heads, with a shared slider."""
        return {
            "component_loss": self.plot(),
            "component_learned": self.plot_learned(),
            "component_heads": self.plot_heads(),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per snapshot, head and direction."""
        row, head, mode = np.indices(self.held.shape).reshape(3, -1)
        columns = {"step": self.step[row], "eval_loss": self.eval_loss[row]}
        columns["algorithm"] = np.array([self.algorithm(at) for at in range(len(self.step))])[row]
        columns |= {"head": head, "component": mode + 1, "value": self.value[row, head]}
        for name in ("key", "query"):
            vectors = getattr(self, name)
            if vectors is not None:
                columns[name] = vectors.ravel()
        columns |= {"held": self.held.ravel(), "learned": self.learned[row, mode]}
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Loss with its levels (dotted), the predicted jumps (dashed), and the algorithm at the
        step of the slider."""
        titles = [
            f"Step {step:,}: loss {self.eval_loss[row]:.4f}, {self.algorithm(row)}"
            for row, step in enumerate(self.step)
        ]
        return dashed(self._loss_slider(titles, levels=self.levels), self.jumps)

    def plot_learned(self) -> go.Figure:
        """Learned part of each direction by head, at the step of the slider."""
        return self._plot(
            self.held, "Contribution of each head to the learned part of each component"
        )

    def plot_heads(self) -> go.Figure:
        """Value, key and query of each head in the eigenbasis, at the step of the slider."""
        if self.key is None or self.query is None:
            return self._plot(self.value[:, :, None], "Value weight of each head", names=["v"])
        vectors = np.concatenate([self.value[:, :, None], self.key, self.query], 2)
        numbers = range(1, self.learned.shape[1] + 1)
        form = "{}·e{}" if self.rank == 1 else "|{}·e{}|"
        names = ["v", *(form.format(kind, number) for kind in "kq" for number in numbers)]
        return self._plot(vectors, "Value, key and query of each head", names=names)

    def _plot(self, values: np.ndarray, title: str, *, names: list[str] | None = None) -> go.Figure:
        columns = names or [
            f"e{number + 1} (λ {value:.3g})" for number, value in enumerate(self.eigenvalues)
        ]
        rows = [f"head {head}" for head in range(values.shape[1])]
        limit = float(np.abs(values).max()) or 1.0
        figure = heatmaps.heatmap(values[-1], title=title, rows=rows, columns=columns, limit=limit)
        return self._heatmaps(figure, values[:, None], title)


def linear_snapshots(source: Source) -> LinearSnapshots:
    """Principal components in the heads of a linear-attention checkpoint at its saved steps.

    Dotted: the loss with 0, 1, ... principal components learned, in closed form. Dashed: jumps
        predicted from the initial weights. With M = Σ v K^T Q over heads, the learned part of a
        component e of the covariance is f = e^T M e divided by its value at the optimum. A
        component counts as learned above one half. A head contributes v (K e)^T (Q e). For heads of
        rank two and more the norms of K e and Q e are shown.

    Raises:
        ValueError: If the checkpoint has no snapshots, another score, or several responses or supports.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (19), (20) and (22).
    See also:
        `plateaus`, `training_snapshots`.
    Example:
        >>> from mechinterp import load
        >>> linear_snapshots(load("checkpoints/linear-separate-s2"))
        LinearSnapshots(101; at the end principal component regression on 3 of 4 components)
    """
    checkpoint = snapshots_of(source, "linear_snapshots")
    config, model = checkpoint.config, checkpoint.config.model
    if model.score != "linear/L" or not model.one_attention:
        got = why_no_circuits(model) or f"score {model.score}"
        raise ValueError(f"linear_snapshots needs one layer of linear attention, got {got}.")
    directions, steps = modes(task_moments(config.task)), kept_steps(checkpoint)
    turned = [_in_eigenbasis(checkpoint.snapshots[step], directions) for step in steps]
    value, U, key, query = (np.array(parts) for parts in zip(*turned, strict=True))
    M = np.einsum("sh,shij->sij", value, U)
    used = [components(directions.vectors @ each @ directions.vectors.T, config.task) for each in M]
    covariance = covariance_matrix(config.task.covariance, config.task.d_x)
    jumps, forecast = _forecast(checkpoint)
    merged = config.model.merged_qk
    return LinearSnapshots(
        learned=np.einsum("sdd->sd", M) / directions.targets,
        held=np.einsum("sh,shdd->shd", value, U) / directions.targets,
        value=value,
        key=None if merged else key,
        query=None if merged else query,
        rank=config.task.d_x if merged else config.d_head,
        n_components=tuple(each.n_components for each in used),
        off_diagonal=np.array([each.off_diagonal for each in used]),
        eigenvalues=np.einsum("id,ij,jd->d", directions.vectors, covariance, directions.vectors),
        levels=directions.levels,
        jumps=jumps,
        forecast=forecast,
        step=np.array(steps),
        curve=loss_curve(checkpoint),
    )


def _in_eigenbasis(
    named: Weights, directions: Modes
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """v, U, K and Q of every head, with the vectors of U, K and Q in the eigenbasis."""
    weights, d_x, basis = named.circuits.to(torch.float64), named.d_x, directions.vectors
    factor = weights.scale * weights.score_slope
    key = basis.T @ weights.W_K[:, :d_x].numpy(force=True)  # [head, mode, rank]
    query = factor * basis.T @ weights.W_Q[:, :d_x].numpy(force=True)
    return weights.mu[:, 0].numpy(force=True), key @ query.swapaxes(1, 2), _flat(key), _flat(query)


def _flat(vectors: Float[np.ndarray, "head mode rank"]) -> Float[np.ndarray, "head mode"]:
    """Vectors of a head of rank one; norms for higher ranks, whose rows are defined up to a
    rotation only."""
    return vectors[:, :, 0] if vectors.shape[2] == 1 else np.linalg.norm(vectors, axis=2)


def _forecast(checkpoint: Checkpoint) -> tuple[Float[np.ndarray, " jump"], str]:
    try:
        forecast = jump_forecast(checkpoint.config)
    except ValueError as error:
        return np.zeros(0), f"No jumps are predicted. {error}"
    parts = [
        f"component {jump.direction + 1} at step {jump.step:,.0f} (head {jump.head})"
        for jump in forecast.to_frame().itertuples()
    ]
    return forecast.step, f"Predicted from the initial weights alone: {', '.join(parts)}."
