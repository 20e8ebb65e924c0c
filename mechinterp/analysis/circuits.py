"""QK and OV circuits of every head, and how far they are from diagonal form."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import figures, heatmaps
from mechinterp.analysis.number_format import digits
from mechinterp.analysis.result import HEAD_COLUMNS
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.checkpoints.modules.weights import by_weights, proof_of
from mechinterp.display import Result, counted, head_names
from mechinterp.memory import require_memory
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights, part_of

TOKEN_NUMBERS = ("qk_diagonal", "qk_off_diagonal", "qk_y_leak", "ov_last_entry", "ov_x_leak")
"""Numbers of a head whose circuits are in token coordinates."""
SIZE_NUMBERS = ("qk_norm", "qk_rank", "ov_norm", "ov_rank", "ov_read")
"""Numbers of a head in any coordinates."""
GATE_NUMBERS = ("gate", "beta")
"""Numbers of a recurrent head."""
CLEAR_PART = 0.99
"""The colour scale ends at this quantile of abs(entry), for circuits of the stream; 1.0 is the
maximum. In some models a few entries are many times larger than all others."""


@dataclass(frozen=True, eq=False, repr=False)
class Circuits(Result):
    """QK and OV circuits of all heads; the scale of the scores is included.

    In token coordinates they are direct paths: how a query's token attends to a key's, and what a
    head copies from the key's token to the prediction, without other layers in between.
    Otherwise they are of the weights alone, and numbers about x and y are NaN.
    """

    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "ov_read": "Frobenius norm of W_V W_O W_U over that of W_V W_O: the part of a head's output that is read out directly.",
        "omega": "Diagonal of QK's x block.",
        "omega_mean": "Mean of omega over coordinates.",
        "mu": "Diagonal of OV's y block.",
        "qk_diagonal": "Norm of the diagonal of the QK x block over the norm of the block; 1 for a diagonal block.",
        "qk_off_diagonal": "Largest |entry| of the QK x block off the diagonal.",
        "qk_y_leak": "Largest |entry| between the query's x and a key's y (last row of KQ in the papers).",
        "qk_norm": "Frobenius norm of the head's QK, scale included.",
        "qk_rank": "Effective number of directions that a head compares: participation ratio of QK's singular values squared.",
        "ov_last_entry": "Norm of mu over the norm of the OV circuit; 1 if only y is read.",
        "ov_x_leak": "Largest |entry| of OV that reads from x.",
        "ov_norm": "Frobenius norm of the head's OV.",
        "ov_rank": "Effective number of directions that a head writes: participation ratio of OV's singular values squared.",
        "gate": "Factor that is left of a recurrent head's state after each token; NaN if it differs from token to token or the head has none.",
        "beta": "Strength with which a recurrent head writes a token; NaN if it differs from token to token or the head has none.",
    }
    UNITS: ClassVar = {
        "1/x²": ("omega", "omega_mean", "qk_off_diagonal"),
        "1/(x y)": ("qk_y_leak",),
        "y/x": ("ov_x_leak",),
    }
    QK: Float[np.ndarray, "layer head query key"]
    """scale * W_in W_Q W_K^T W_in^T, or without W_in if circuits are of the weights alone. In the first layer, rows of
    the query's y slot have no effect: the slot is 0."""
    OV: Float[np.ndarray, "layer head token out"]
    """W_in W_V W_O W_U, [token coordinate, response], or W_V W_O, [stream, stream]."""
    omega: Float[np.ndarray, "layer head d_x"]
    mu: Float[np.ndarray, "layer head d_y"]
    qk_diagonal: Float[np.ndarray, "layer head"]
    qk_off_diagonal: Float[np.ndarray, "layer head"]
    qk_y_leak: Float[np.ndarray, "layer head"]
    qk_norm: Float[np.ndarray, "layer head"]
    qk_rank: Float[np.ndarray, "layer head"]
    ov_last_entry: Float[np.ndarray, "layer head"]
    ov_x_leak: Float[np.ndarray, "layer head"]
    ov_norm: Float[np.ndarray, "layer head"]
    ov_rank: Float[np.ndarray, "layer head"]
    ov_read: Float[np.ndarray, "layer head"]
    gate: Float[np.ndarray, "layer head"]
    beta: Float[np.ndarray, "layer head"]
    of_weights_alone: str
    """Reason why the circuits are of the weights alone, in coordinates of the stream; empty for
    token coordinates."""

    @property
    def omega_mean(self) -> Float[np.ndarray, "layer head"]:
        """Mean of omega over coordinates, unit 1/x^2."""
        return self.omega.mean(2)

    @property
    def coordinates(self) -> tuple[str, ...]:
        """Names of the coordinates that the circuits read: x0, x1, ... and y, or those of the stream."""
        if self.of_weights_alone:
            return tuple(map(str, range(self.QK.shape[3])))
        d_x, d_y = self.omega.shape[2], self.mu.shape[2]
        return (*(f"x{i}" for i in range(d_x)), *(f"y{n}" if d_y > 1 else "y" for n in range(d_y)))

    def __repr__(self) -> str:
        return f"Circuits({self._summary})"

    @property
    def _summary(self) -> str:
        """Heads of one layer, or the sizes and the head with the largest mu."""
        n_layers, n_heads = self.QK.shape[:2]
        shape = f"{counted(n_layers, 'layer')} of {counted(n_heads, 'head')}"
        if self.of_weights_alone:
            return f"{shape}, of the weights alone, because the model has {self.of_weights_alone}"
        omega, mu = self.omega_mean.ravel(), self.mu.mean(2).ravel()
        names = head_names((n_layers, n_heads))
        heads = [
            f"{n} omega {o:+.3f} mu {m:+.3f}" for n, o, m in zip(names, omega, mu, strict=True)
        ]
        if n_layers == 1:
            return "; ".join(heads)
        largest = heads[int(np.abs(self.mu).mean(2).argmax())]
        return f"{shape}, direct paths; largest |mu| {largest}"

    def sentences(self) -> list[str]:
        """Heads, and how the circuits are made of the weights."""
        how = (
            "QK = W_in W_Q W_K^T W_inᵀ times the scale of the scores, OV = W_in W_V W_O W_U. Effects of other "
            "layers in between are left out."
        )
        if self.of_weights_alone:
            how = (
                "In coordinates of the stream, QK = W_Q W_K^T times the scale of the scores, "
                "OV = W_V W_O."
            )
        gates = [
            f"{label} {', '.join(digits(each) for each in values.ravel())}"
            for label, values in {"gate": self.gate, "strength of writing": self.beta}.items()
            if not np.isnan(values).all()
        ]
        recurrent = f"Heads are recurrent: {'; '.join(gates)}." if gates else ""
        return [f"{self._summary}.", how, *filter(None, [recurrent])]

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        places = np.indices(self.QK.shape[:2])
        columns: dict[str, np.ndarray] = dict(zip(("layer", "head"), places, strict=True))
        if not self.of_weights_alone:
            columns |= {"omega_mean": self.omega_mean, "omega": self.omega, "mu": self.mu}
            columns |= {name: getattr(self, name) for name in TOKEN_NUMBERS}
        columns |= {name: getattr(self, name) for name in SIZE_NUMBERS}
        gates = {name: getattr(self, name) for name in GATE_NUMBERS}
        columns |= {name: values for name, values in gates.items() if not np.isnan(values).all()}
        by_head = {name: v.reshape(-1, *v.shape[2:]) for name, v in columns.items()}
        return pd.DataFrame(by_entry(by_head))

    def plot(self) -> go.Figure:
        """QK and OV circuits of a layer's heads, with a slider over the layers."""
        return self._plot("QK and OV")

    def plot_qk(self) -> go.Figure:
        """QK circuits of a layer's heads side by side, with a slider over the layers."""
        return self._plot("QK")

    def plot_ov(self) -> go.Figure:
        """OV circuits of a layer's heads, with a slider over the layers; rows are the written
        coordinates."""
        return self._plot("OV")

    def _matrices(self, kind: str, layer: int) -> heatmaps.Matrices:
        """Circuits of a layer's heads as they are drawn."""
        alone, names = bool(self.of_weights_alone), self.coordinates
        part = CLEAR_PART if alone else 1.0
        if kind == "QK":
            # The query's y slot is 0 before the first layer.
            rows = names[: self.omega.shape[2]] if len(self.QK) == 1 and not alone else names
            QK, unit = self.QK[layer, :, : len(rows)], "" if alone else "1/x²"
            return heatmaps.Matrices(
                QK, rows, names, "query", "key", unit=unit, kind=kind, part=part
            )
        n, OV = self.OV.shape[3], self.OV[layer].swapaxes(1, 2)
        rows = names if alone else tuple(f"ŷ{i}" if n > 1 else "ŷ" for i in range(n))
        return heatmaps.Matrices(
            OV, rows, names, "written", "read", kind=kind, strips=not alone, part=part
        )

    def _plot(self, what: str) -> go.Figure:
        """Figure with one colour scale per layer; the title names its ends."""
        kinds = what.split(" and ")
        layers = [[self._matrices(kind, n) for kind in kinds] for n in range(len(self.QK))]
        if len(layers) == 1:
            return heatmaps.head_heatmaps(*layers[0], title=f"{what} circuits")
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


def by_entry(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns of a table with a row per head; an array [head, entry] gives a column for each entry.

    Example:
        >>> list(by_entry({"omega": np.zeros((4, 2)), "share": np.zeros(4)}))
        ['omega_0', 'omega_1', 'share']
    """
    flat: dict[str, np.ndarray] = {}
    for name, values in columns.items():
        if values.ndim == 1:
            flat[name] = values
        else:
            flat |= {f"{name}_{n}": entry for n, entry in enumerate(values.T)}
    return flat


def circuits(source: Source) -> Circuits:
    """QK and OV circuits of all heads of weights, a checkpoint or a hooked model, in float64.

    QK is how strongly the query's token attends to a key's: W_Q W_K^T times the scale of the scores.
    OV is what the head reads from the tokens that it attends to: W_V W_O. A recurrent head has gates besides, and its exact
    attention pattern A, with output A v W_O, is that of `attention_patterns`. In the published pattern
    of one layer QK is omega times the identity on x, and OV is mu on y. If only sums lie between
    tokens, heads and read-out, the read-in and read-out matrices are multiplied in, and circuits are
    in token coordinates. Otherwise they are those of the weights alone, and the result says why.

    Raises:
        ValueError: If the model has no weights by name, and its state dict is not read as a model that
            predicts the same.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (3.1); the papers' KQ is the transpose of QK.
    See also:
        `classify`, `classify_circuits`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import diagonal_heads
        >>> circuits(diagonal_heads([0.1, -0.1], [3.0, -3.0], d_x=5))
        Circuits(L0H0 omega +0.100 mu +3.000; L0H1 omega -0.100 mu -3.000)
    """
    if (weights := predictor_of(by_weights(source)).weights) is None:
        why = f" ({proof_of(source).why})" if isinstance(source, HookedModule) else ""
        raise ValueError(
            f"circuits needs weights by name, and no reading of this module's state dict predicts as the module does{why}; "
            "ablate, attention_patterns and probe describe its heads."
        )
    weights = weights.to("cpu").to(torch.float64)
    alone, tensors, d_x = why_not_in_tokens(weights), weights.tensors, weights.d_x
    width = weights.model.stream_width(d_x, weights.d_y)
    n_matrices = 4 * weights.n_layers * weights.n_heads
    require_memory(8 * n_matrices * width**2, f"circuits of {n_matrices // 4} heads, width {width}")
    QK, OV = weights.scale * weights.W_Q @ weights.W_K.mT, weights.W_V @ weights.W_O
    read = OV @ tensors["unembed.W_U"] if "unembed.W_U" in tensors else OV[..., d_x:]
    ov_read = part_of(read, OV)
    if not alone:
        OV = read
        if "W_in" in tensors:
            QK, OV = tensors["W_in"] @ QK @ tensors["W_in"].mT, tensors["W_in"] @ OV
    sizes = d_x, weights.d_y
    about_tokens = _unknown(ov_read, *sizes) if alone else _in_tokens(QK, OV, *sizes)
    norm = torch.linalg.matrix_norm
    of_any = {"QK": QK, "OV": OV, "qk_norm": norm(QK), "ov_norm": norm(OV), "ov_read": ov_read}
    of_any |= {"qk_rank": effective_rank(QK), "ov_rank": effective_rank(OV)}
    of_any |= {name: _constant(weights, name, like=ov_read) for name in GATE_NUMBERS}
    arrays = {name: tensor.numpy() for name, tensor in (about_tokens | of_any).items()}
    return Circuits(**arrays, of_weights_alone=alone)


def _in_tokens(QK: Tensor, OV: Tensor, d_x: int, d_y: int) -> dict[str, Tensor]:
    """Numbers of circuits whose coordinates are those of tokens (x, y)."""
    block = QK[..., :d_x, :d_x]
    omega, mu = block.diagonal(dim1=2, dim2=3), OV[..., d_x:, :].diagonal(dim1=2, dim2=3)
    off = block.abs().masked_fill(torch.eye(d_x, dtype=torch.bool, device="cpu"), 0)
    return {
        "omega": omega,
        "mu": mu[..., :d_y],
        "qk_diagonal": part_of(omega, block),
        "qk_off_diagonal": off.amax((2, 3)),
        "qk_y_leak": QK[..., :d_x, d_x:].abs().amax((2, 3)),
        "ov_last_entry": part_of(mu, OV),
        "ov_x_leak": OV[..., :d_x, :].abs().amax((2, 3)),
    }


def _unknown(
    like: Float[Tensor, "layer head"], d_x: int, d_y: int
) -> dict[str, Float[Tensor, "layer head *entry"]]:
    """NaN in place of the numbers of circuits in token coordinates."""
    nan = torch.full_like(like, torch.nan)
    entries = {"omega": d_x, "mu": d_y}
    of_entries = {name: nan[..., None].expand(-1, -1, size) for name, size in entries.items()}
    return of_entries | dict.fromkeys(TOKEN_NUMBERS, nan)


def _constant(weights: Weights, name: str, *, like: Tensor) -> Float[Tensor, "layer head"]:
    """Gate or strength of writing of each head; NaN where the heads have none, or one per token."""
    b = weights.tensors.get(f"attn.b_{name}")
    if b is None or f"attn.W_{name}" in weights.tensors:
        return torch.full_like(like, torch.nan)
    return torch.sigmoid(b)


def effective_rank(matrices: Float[Tensor, "*heads row column"]) -> Float[Tensor, "*heads"]:
    """Participation ratio of the squared singular values, (sum s^2)^2 / sum s^4; NaN for a zero
    matrix.

    Example:
        >>> effective_rank(torch.diag(torch.tensor([2.0, 2.0, 0.0]))).item()
        2.0
    """
    squares = matrices.square().sum((-2, -1))
    return squares.square() / (matrices.mT @ matrices).square().sum((-2, -1))


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


def require_weights(source: Source, analysis: str) -> Weights:
    """Heads of a model that is one attention layer, in float64 on the CPU.

    Args:
        analysis: Name of the calling analysis, for the error message.
    Raises:
        ValueError: If the model is of another kind.
    """
    if (weights := predictor_of(source).weights) is None:
        raise ValueError(f"{analysis} needs weights of this package, got a model without them.")
    weights.require_one_layer(analysis)
    return weights.to("cpu").to(torch.float64)
