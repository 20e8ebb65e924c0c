"""Idealised form of the QK circuits of one layer: multiples of I, or of one matrix that all heads share."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.one_layer.head_statistics import HeadStatistics
from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.models.layers import is_normalised


@dataclass(frozen=True, eq=False)
class QKForm:
    """Idealised form of the QK x blocks of a model; leading axes, such as several models, are allowed."""

    kind: str
    """"scalar": omega_h I; "common": omega_h Omega; "diagonal": diag(omega_h); "matrix": unchanged.
    """
    matrix: Float[Tensor, "... d_x d_x"]
    """Omega, with norm sqrt(d_x); I unless the kind is "common"."""
    isotropy: float = np.nan
    """Cosine between I and the matrix nearest to all active blocks."""
    shared: float = np.nan
    """Fraction of the active blocks' squared deviation from multiples of I that one matrix
    explains."""
    rotation: float = np.nan
    """Largest rotation angle in degrees if Omega is a multiple of a rotation other than I, else
    NaN."""

    def omega(
        self, blocks: Float[Tensor, "*models head d_x d_x"]
    ) -> Float[Tensor, "*models head d_x"]:
        """Factors of blocks, per coordinate."""
        if self.kind != "common":
            return blocks.diagonal(dim1=-2, dim2=-1)
        d_x = blocks.shape[-1]
        inner = (blocks * self.matrix).sum((-2, -1)) / d_x
        return inner[..., None].expand(*inner.shape, d_x)

    def fitted(
        self, blocks: Float[Tensor, "*models head d_x d_x"]
    ) -> Float[Tensor, "*models head d_x d_x"]:
        """The idealised blocks."""
        if self.kind == "matrix":
            return blocks
        omega = self.omega(blocks)
        if self.kind == "diagonal":
            return torch.diag_embed(omega)
        return omega.mean(-1)[..., None, None] * self.matrix

    def alignment(self, blocks: Float[Tensor, "head d_x d_x"]) -> Float[np.ndarray, " head"]:
        """|Cosine| between each block and its idealised block; 0 for a zero block."""
        whole, fitted = blocks.flatten(1).norm(dim=1), self.fitted(blocks).flatten(1).norm(dim=1)
        return (fitted / whole.masked_fill(whole == 0, 1)).numpy()


def common_matrix(
    blocks: Float[Tensor, "*models head d_x d_x"], weight: Float[Tensor, "*models head"]
) -> Float[Tensor, "*models d_x d_x"]:
    """Matrix nearest to all blocks up to a factor per head, with Frobenius norm sqrt(d_x) and trace >= 0.

    It is the first principal component of the blocks, each scaled to unit norm times its weight, and
    I if all blocks are multiples of I.

    Example:
        >>> common_matrix(torch.stack([torch.eye(2), -3 * torch.eye(2)]), torch.ones(2)).abs().round(decimals=4)
        tensor([[1., 0.],
                [0., 1.]])
    """
    d_x = blocks.shape[-1]
    flat = blocks.flatten(-2)
    norms = flat.norm(dim=-1)
    # Few heads, many entries: the small Gram matrix of the heads gives the component.
    weighted = flat / norms.masked_fill(norms == 0, 1)[..., None] * weight[..., None]
    _, vectors = torch.linalg.eigh(weighted @ weighted.mT)
    component = (vectors[..., None, :, -1] @ weighted).squeeze(-2)
    component = component * (d_x**0.5 / component.norm(dim=-1, keepdim=True).clamp_min(1e-300))
    matrix = component.unflatten(-1, (d_x, d_x))
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.where(trace < 0, -1.0, 1.0)[..., None, None] * matrix


def rotation_angle(matrix: Float[np.ndarray, "d_x d_x"], *, spread: float) -> float:
    """Largest rotation angle in degrees of a multiple of a rotation; NaN for any other matrix, also
    a reflection.

    Args:
        spread: Largest max/min - 1 of the singular values.
    Example:
        >>> round(rotation_angle(np.array([[0.0, -2.0], [2.0, 0.0]]), spread=0.25))
        90
    """
    left, sizes, right = np.linalg.svd(matrix)
    if sizes[0] > (1 + spread) * sizes[-1] or np.linalg.det(left @ right) < 0:
        return float("nan")
    return float(np.degrees(np.abs(np.angle(np.linalg.eigvals(left @ right))).max()))


def is_definite(matrix: Float[Tensor, "d_x d_x"], *, tolerance: float) -> bool:
    """True if a matrix is (nearly) symmetric with eigenvalues of one sign, as a metric is.

    Args:
        tolerance: Largest part of its norm that the symmetric part lacks.
    Example:
        >>> is_definite(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), tolerance=0.05)
        True
    """
    part = (matrix + matrix.T) / 2
    eigenvalues = torch.linalg.eigvalsh(part)
    return bool(
        part.norm() >= (1 - tolerance) * matrix.norm() and eigenvalues[0] * eigenvalues[-1] > 0
    )


def form_of(active: HeadStatistics, score: str, limits: Thresholds) -> QKForm:
    """QKForm of the active groups of equal heads."""
    blocks, d_y = active.blocks, active.mu.shape[1]
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device="cpu")
    if not blocks.any():
        return QKForm("scalar", identity)
    matrix = common_matrix(blocks, torch.from_numpy(active.share))
    isotropy = float(matrix.diagonal().mean())
    kinds = ("scalar", identity), ("common", matrix)
    off_identity, off_common = ((1 - QKForm(*kind).alignment(blocks) ** 2).sum() for kind in kinds)
    shared = float(1 - off_common / off_identity) if off_identity > 1e-12 else 0.0
    if not is_normalised(score) or d_y > 1:
        return QKForm("diagonal" if is_normalised(score) else "matrix", identity, isotropy, shared)
    metric = is_definite(matrix, tolerance=limits.equal)
    if not metric:
        # Unlike a metric, another matrix has no sign of its own: it is that of sum mu * omega.
        factors = QKForm("common", matrix).omega(blocks)[:, 0].numpy()
        matrix = -matrix if factors @ active.mu[:, 0] < 0 else matrix
    angle = np.nan if metric else rotation_angle(matrix.numpy(), spread=limits.omega_spread)
    alone = len(blocks) == 1 and (metric or not np.isnan(angle))
    if 1 - isotropy**2 > limits.equal and (
        alone or (len(blocks) > 1 and shared >= limits.qk_diagonal)
    ):
        return QKForm("common", matrix, isotropy, shared, angle)
    return QKForm("scalar", identity, isotropy, shared)
