"""QK and OV circuits of every head of a model of several layers, in coordinates of tokens if the
stream allows it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float

from mechinterp import figures, heatmaps
from mechinterp.analysis.number_format import digits
from mechinterp.display import Result
from mechinterp.memory import require_memory
from mechinterp.models.weights import Weights

CLEAR_PART = 0.99
"""The colour scale ends at this quantile of abs(entry), for circuits of the stream; 1.0 is the
maximum. In some models a few entries are many times larger than all others."""


@dataclass(frozen=True, eq=False, repr=False)
class LayeredCircuits(Result):
    """QK and OV circuits of all heads; the scale of the scores is included.

    In token coordinates they are direct paths: how a query's token attends to a key's, and what a
    head copies from the key's token to the prediction, without other layers in between.
    `composition_scores` shows which heads read others.
    """

    QK: Float[np.ndarray, "layer head query key"]
    """scale * W_in W_Q W_K^T W_in^T, or without W_in if circuits are of the weights alone."""
    OV: Float[np.ndarray, "layer head token out"]
    """W_in W_V W_O W_U, [token coordinate, response], or W_V W_O, [stream, stream]."""
    OV_read: Float[np.ndarray, "layer head"]
    """Frobenius norm of W_V W_O W_U over that of W_V W_O: the part of a head's output that is read
    out directly."""
    omega: Float[np.ndarray, "layer head d_x"]
    """Diagonal of QK's x block, unit 1/x^2; NaN in coordinates of the stream."""
    mu: Float[np.ndarray, "layer head d_y"]
    """Diagonal of OV's y block; NaN in coordinates of the stream."""
    coordinates: tuple[str, ...]
    """Names of the coordinates that the circuits read."""
    of_weights_alone: str
    """Reason why the circuits are of the weights alone, in coordinates of the stream; empty for
    token coordinates."""
    COLUMNS: ClassVar = {
        "ov_rank": "Effective number of directions that a head writes: participation ratio of OV's singular values squared.",
        "ov_read": "Norm of the directly read-out part of OV, divided by the norm of OV.",
        "qk_rank": "Effective number of directions that a head compares: participation ratio of QK's singular values squared.",
        "qk_norm": "Frobenius norm of the head's QK, scale included.",
        "ov_norm": "Frobenius norm of the head's OV.",
        "omega_mean": "Mean of omega over coordinates, unit 1/x^2.",
    }

    def __repr__(self) -> str:
        n_layers, n_heads = self.QK.shape[:2]
        if self.of_weights_alone:
            how = f"of the weights alone, because the model has {self.of_weights_alone}"
        else:
            layer, head = np.unravel_index(np.abs(self.mu).mean(2).argmax(), (n_layers, n_heads))
            omega, mu = self.omega[layer, head].mean(), self.mu[layer, head].mean()
            how = f"direct paths; largest |mu| L{layer}H{head} omega {omega:+.3f} mu {mu:+.3f}"
        return f"LayeredCircuits({n_layers} layers of {n_heads} heads, {how})"

    def sentences(self) -> list[str]:
        """Explanation of what these circuits describe."""
        if self.of_weights_alone:
            return [
                f"The model has {self.of_weights_alone}, so the circuits are of the weights alone, in coordinates of "
                "the stream: QK = W_Q W_K^T times the scale of the scores, OV = W_V W_O."
            ]
        return [
            "These are direct paths: how a query's token attends to a key's, and what a head copies from it to the "
            "prediction. QK = W_in W_Q W_K^T W_inᵀ times the scale of the scores, OV = W_in W_V W_O W_U. Effects of other "
            "layers in between are left out."
        ]

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        layer, head = np.indices(self.QK.shape[:2])
        columns = {
            "layer": layer,
            "head": head,
            "qk_norm": np.linalg.norm(self.QK, axis=(2, 3)),
            "qk_rank": _rank(self.QK),
            "ov_norm": np.linalg.norm(self.OV, axis=(2, 3)),
            "ov_rank": _rank(self.OV),
            "ov_read": self.OV_read,
        }
        if not self.of_weights_alone:
            columns["omega_mean"] = self.omega.mean(2)
            columns |= {f"mu_{n}": self.mu[..., n] for n in range(self.mu.shape[2])}
        return pd.DataFrame({name: values.ravel() for name, values in columns.items()})

    def plot(self) -> go.Figure:
        """QK and OV circuits of a layer's heads, with a slider over the layers."""
        return self._by_layer("QK and OV", self._qk, self._ov)

    def plot_qk(self) -> go.Figure:
        """QK circuits of a layer's heads side by side, with a slider over the layers."""
        return self._by_layer("QK", self._qk)

    def plot_ov(self) -> go.Figure:
        """OV circuits of a layer's heads, with a slider over the layers; rows are the written
        coordinates."""
        return self._by_layer("OV", self._ov)

    def _qk(self, layer: int) -> heatmaps.Matrices:
        unit, part = ("", CLEAR_PART) if self.of_weights_alone else ("1/x²", 1.0)
        names = self.coordinates
        return heatmaps.Matrices(
            self.QK[layer], names, names, "query", "key", unit=unit, kind="QK", part=part
        )

    def _ov(self, layer: int) -> heatmaps.Matrices:
        OV, alone = self.OV[layer].swapaxes(1, 2), bool(self.of_weights_alone)
        rows, part = (self.coordinates, CLEAR_PART) if alone else (responses(self.OV.shape[3]), 1.0)
        return heatmaps.Matrices(
            OV, rows, self.coordinates, "written", "read", kind="OV", strips=not alone, part=part
        )

    def _by_layer(self, what: str, *kinds: Callable[[int], heatmaps.Matrices]) -> go.Figure:
        """Figure with one colour scale per layer; the title names its ends."""
        layers = [[kind(layer) for kind in kinds] for layer in range(len(self.QK))]
        frames = {
            str(layer): [change for each in drawn for change in each.changing]
            for layer, drawn in enumerate(layers)
        }
        titles = [
            f"{what} circuits of layer {layer}, colours to "
            + " and ".join(f"±{digits(each.limit)}" for each in drawn)
            for layer, drawn in enumerate(layers)
        ]
        figure = heatmaps.head_heatmaps(*layers[0], title="")
        return figures.with_slider(figure, frames, label="layer", titles=titles)


def layered_circuits(weights: Weights) -> LayeredCircuits:
    """Circuits of all heads of a model of several layers.

    If only sums lie between tokens, heads and read-out, the read-in and read-out matrices are
    multiplied in.
    """
    weights = weights.to("cpu").to(torch.float64)
    reason, tensors = why_not_in_tokens(weights), weights.tensors
    d_x, d_y = weights.d_x, weights.d_y
    width = weights.model.stream_width(d_x, d_y)
    n_matrices = 4 * weights.n_layers * weights.n_heads
    require_memory(8 * n_matrices * width**2, f"circuits of {n_matrices // 4} heads, width {width}")
    W_U = tensors.get(
        "unembed.W_U", torch.eye(d_x + d_y, dtype=torch.float64, device="cpu")[:, d_x:]
    )
    QK, OV = weights.scale * weights.W_Q @ weights.W_K.mT, weights.W_V @ weights.W_O
    norm = torch.linalg.matrix_norm
    read = norm(OV @ W_U) / norm(OV).clamp_min(torch.finfo(torch.float64).tiny)
    if not reason:
        if "W_in" in tensors:
            QK = tensors["W_in"] @ QK @ tensors["W_in"].mT
            OV = tensors["W_in"] @ OV
        OV = OV @ W_U
        omega = QK[..., :d_x, :d_x].diagonal(dim1=2, dim2=3)
        mu = OV[..., d_x:, :].diagonal(dim1=2, dim2=3)
    else:
        omega, mu = (QK.new_full((*QK.shape[:2], n), torch.nan) for n in (d_x, d_y))
    return LayeredCircuits(
        QK=QK.numpy(),
        OV=OV.numpy(),
        OV_read=read.numpy(),
        omega=omega.numpy(),
        mu=mu.numpy(),
        coordinates=tuple(map(str, range(QK.shape[-1]))) if reason else coordinates(d_x, d_y),
        of_weights_alone=reason,
    )


def why_not_in_tokens(weights: Weights) -> str:
    """Reason why circuits cannot be written in token coordinates; empty if they can.

    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> why_not_in_tokens(gradient_descent_model([0.5, 0.5], d_x=4))
        ''
    """
    model = weights.model
    reasons = {
        "layer norms": model.norm is not None or model.final_norm,
        "a read-in that is not linear": model.d_read_in is not None,
        "x and y in turn": model.layout == "in_turn",
        "rotary positions, which turn queries and keys": model.rotary_dim is not None,
    }
    return next((reason for reason, there in reasons.items() if there), "")


def coordinates(d_x: int, d_y: int) -> tuple[str, ...]:
    """Names of a token's coordinates: x0, x1, ... and y."""
    return (*(f"x{i}" for i in range(d_x)), *(f"y{n}" if d_y > 1 else "y" for n in range(d_y)))


def responses(d_y: int) -> list[str]:
    """Names of the predicted responses."""
    return [f"ŷ{n}" if d_y > 1 else "ŷ" for n in range(d_y)]


def _rank(matrices: Float[np.ndarray, "layer head row column"]) -> Float[np.ndarray, "layer head"]:
    """Participation ratio of the squared singular values, (sum s^2)^2 / sum s^4; NaN for a zero
    matrix."""
    squares = np.square(np.linalg.svd(matrices, compute_uv=False))
    with np.errstate(invalid="ignore"):
        return np.square(squares.sum(-1)) / np.square(squares).sum(-1)
