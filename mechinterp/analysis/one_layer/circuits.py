"""QK and OV circuits of each head, and their deviation from diagonal form."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import heatmaps
from mechinterp.analysis.multi_layer.head_circuits import (
    LayeredCircuits,
    coordinates,
    layered_circuits,
    responses,
)
from mechinterp.display import Result
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights

NUMBERS = ("qk_diagonal", "qk_off_diagonal", "qk_y_leak", "ov_last_entry", "ov_x_leak")


@dataclass(frozen=True, eq=False, repr=False)
class Circuits(Result):
    """QK and OV circuits of a one-layer model; the QK scale is included."""

    QK: Float[np.ndarray, "head d_model d_model"]
    """scale * W_Q W_K^T, [query coordinate, key coordinate]. Rows of the query's y slot have no
    effect: the slot is 0."""
    OV: Float[np.ndarray, "head d_model d_y"]
    """W_V W_O, [token coordinate, response]."""
    omega: Float[np.ndarray, "head d_x"]
    """Diagonal of QK's x block, unit 1/x^2."""
    mu: Float[np.ndarray, "head d_y"]
    """Diagonal of OV's y block."""
    qk_diagonal: Float[np.ndarray, " head"]
    """Norm of the diagonal of the QK x block over the norm of the block; 1 for a diagonal block."""
    qk_off_diagonal: Float[np.ndarray, " head"]
    """Largest |entry| of the QK x block off the diagonal, unit 1/x^2."""
    qk_y_leak: Float[np.ndarray, " head"]
    """Largest |entry| between the query's x and a key's y (last row of KQ in the papers), unit 1/(x
    y)."""
    ov_last_entry: Float[np.ndarray, " head"]
    """Norm of mu over the norm of the OV circuit; 1 if only y is read."""
    ov_x_leak: Float[np.ndarray, " head"]
    """Largest |entry| of OV that reads from x, unit y/x."""

    @property
    def omega_mean(self) -> Float[np.ndarray, " head"]:
        """Mean of omega over coordinates, unit 1/x^2."""
        return self.omega.mean(1)

    def __repr__(self) -> str:
        pairs = enumerate(zip(self.omega_mean, self.mu.mean(1), strict=True))
        heads = "; ".join(f"H{head} omega {o:+.3f} mu {m:+.3f}" for head, (o, m) in pairs)
        return f"Circuits({heads})"

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        columns = {"head": np.arange(len(self.QK)), "omega_mean": self.omega_mean}
        columns |= {f"omega_{i}": self.omega[:, i] for i in range(self.omega.shape[1])}
        columns |= {f"mu_{n}": self.mu[:, n] for n in range(self.mu.shape[1])}
        return pd.DataFrame(columns | {name: getattr(self, name) for name in NUMBERS})

    def plot(self) -> go.Figure:
        """The active part of every QK circuit, with the OV circuits below."""
        return heatmaps.head_heatmaps(self._qk, self._ov, title="QK and OV circuits")

    def plot_qk(self) -> go.Figure:
        """The active part of every QK circuit: rows are the query's x, columns a key's x and y."""
        return heatmaps.head_heatmaps(self._qk, title="QK circuits")

    def plot_ov(self) -> go.Figure:
        """Every OV circuit as a strip: rows are the predicted responses, columns a token's coordinates."""
        return heatmaps.head_heatmaps(self._ov, title="OV circuits")

    @property
    def _qk(self) -> heatmaps.Matrices:
        columns = coordinates(*self._sizes)
        rows = columns[: self._sizes[0]]
        QK = self.QK[:, : len(rows)]
        return heatmaps.Matrices(QK, rows, columns, "query", "key", unit="1/x²", kind="QK")

    @property
    def _ov(self) -> heatmaps.Matrices:
        rows, columns = responses(self._sizes[1]), coordinates(*self._sizes)
        OV = self.OV.swapaxes(1, 2)
        return heatmaps.Matrices(OV, rows, columns, "", "token", kind="OV", strips=True)

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.omega.shape[1], self.mu.shape[1]


def circuits(source: Source) -> Circuits | LayeredCircuits:
    """QK and OV circuits of all heads of weights, a checkpoint or a hooked model, in float64.

    QK is how strongly the query's x attends to a key's x and y: W_Q W_K^T times the scale of the
    scores. OV is what the head reads from the tokens that it attends to: W_V W_O. In the published
    pattern QK is omega times the identity on x, and OV is mu on y. Rows of QK that belong to the
    query's empty y slot have no effect and are not drawn. With several layers, or MLPs and norms,
    circuits are in token coordinates only if nothing but sums lies between tokens, heads and
    read-out. Otherwise they are those of the weights alone, and the result says why.

    Raises:
        ValueError: If the model has no weights of this package.

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (3.1); the papers' KQ is the transpose of QK.
    See also:
        `classify`, `classify_circuits`, `composition_scores`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import diagonal_heads
        >>> circuits(diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=5))
        Circuits(H0 omega +0.100 mu +3.000; H1 omega -0.100 mu -3.000)
    """
    predictor = predictor_of(source)
    if predictor.weights is not None and not predictor.is_one_attention:
        return layered_circuits(predictor.weights)
    return circuits_of(weights_of(source, "circuits"))


def circuits_of(weights: Weights) -> Circuits:
    """QK and OV circuits of these heads."""
    d_x = weights.d_x
    QK, OV = weights.QK.numpy(force=True), weights.OV.numpy(force=True)
    # `where` and not a product: 0 times an infinite entry is NaN.
    off_diagonal = np.where(np.eye(d_x, dtype=bool), 0, np.abs(QK[:, :d_x, :d_x]))
    return Circuits(
        QK=QK,
        OV=OV,
        omega=weights.omega.numpy(force=True),
        mu=weights.mu.numpy(force=True),
        qk_diagonal=weights.qk_diagonal.numpy(force=True),
        qk_off_diagonal=off_diagonal.max((1, 2)),
        qk_y_leak=np.abs(QK[:, :d_x, d_x:]).max((1, 2)),
        ov_last_entry=weights.ov_last_entry.numpy(force=True),
        ov_x_leak=np.abs(OV[:, :d_x]).max((1, 2)),
    )


def weights_of(source: Source, analysis: str) -> Weights:
    """Heads of a model that is one attention layer, in float64 on the CPU.

    Args:
        analysis: Name of the calling analysis, for the error message.
    Raises:
        ValueError: If the model is of another kind.
    """
    try:
        return predictor_of(source).one_layer.to("cpu").to(torch.float64)
    except ValueError as error:
        raise ValueError(f"{analysis} {error}") from None
