"""Structure that the heads of one layer share: equal heads as one, and a common matrix of their QK circuits."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

SPREAD = 0.25
"""Most that the singular values of a multiple of a rotation may differ, max/min - 1."""
SYMMETRIC = 0.95
"""Least norm of the symmetric part of a metric, relative to its norm."""


@dataclass(frozen=True, eq=False)
class CommonMatrix:
    """The matrix Omega nearest to all QK x blocks of a model, up to a factor per head."""

    matrix: Float[Tensor, "*models d_x d_x"]
    """Of Frobenius norm sqrt(d_x) and trace >= 0, so that it is I where all blocks are multiples of I."""
    scale: Float[Tensor, "*models head"]
    """Factor omega_h of each head, unit 1/x^2."""
    alignment: Float[Tensor, "*models head"]
    """|cosine| between a head's block and Omega; 0 for a block of zeros."""

    @property
    def isotropy(self) -> Float[Tensor, "*models"]:
        """Cosine between Omega and I, 1 for multiples of I."""
        return self.matrix.diagonal(dim1=-2, dim2=-1).mean(-1)


def common_matrix(
    blocks: Float[Tensor, "*models head d_x d_x"], weight: Float[Tensor, "*models head"]
) -> CommonMatrix:
    """The first principal component of the heads' blocks, each of unit norm times its weight.

    Example:
        >>> found = common_matrix(torch.stack([torch.eye(2), -3 * torch.eye(2)]), torch.ones(2))
        >>> found.scale.round(decimals=4).tolist(), round(found.isotropy.item(), 4)
        ([1.0, -3.0], 1.0)
    """
    d_x = blocks.shape[-1]
    flat = blocks.flatten(-2)
    norms = flat.norm(dim=-1)
    unit = flat / norms.masked_fill(norms == 0, 1)[..., None]
    # Few heads, many entries: the component from the heads' small Gram matrix.
    weighted = unit * weight[..., None]
    _, vectors = torch.linalg.eigh(weighted @ weighted.mT)
    component = (vectors[..., None, :, -1] @ weighted).squeeze(-2)
    component = component * (d_x**0.5 / component.norm(dim=-1, keepdim=True).clamp_min(1e-300))
    matrix = component.unflatten(-1, (d_x, d_x))
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
    matrix = torch.where(trace < 0, -1.0, 1.0)[..., None, None] * matrix
    inner = (flat * matrix.flatten(-2)[..., None, :]).sum(-1)
    alignment = inner.abs() / (norms * d_x**0.5).masked_fill(norms == 0, 1)
    return CommonMatrix(matrix, inner / d_x, alignment)


def spread_over_heads(
    sizes: Float[Tensor, "*models head"], mu: Float[Tensor, "*models head d_y"], *, serving: float
) -> Float[Tensor, "*models"]:
    """max/min of sizes minus 1 over the heads that serve a response, the largest over responses.

    Args:
        serving: A head serves response n where |mu_n| is above this part of its largest.
    Example:
        >>> sizes, mu = torch.tensor([1.0, 1.5, 9.0]), torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]])
        >>> spread_over_heads(sizes, mu, serving=0.25).item()
        0.5
    """
    serves = mu.abs() > serving * mu.abs().amax(-1, keepdim=True)
    wide = sizes[..., None].expand_as(mu)
    largest = wide.masked_fill(~serves, 0).amax(-2)
    smallest = wide.masked_fill(~serves, torch.inf).amin(-2)
    return (largest / smallest - 1).amax(-1)


def equal_heads(
    QK: Float[Tensor, "head d_x d_model"], *, tolerance: float
) -> Int[np.ndarray, " head"]:
    """Which heads have one QK circuit, as the number of each head's group, from 0.

    Such heads read with one pattern: what they write adds up, or cancels, as in a single head.

    Args:
        QK: The rows that act, those of the query's x.
        tolerance: Largest distance of two circuits in one group, relative to the larger norm.
    Example:
        >>> equal_heads(torch.tensor([[[1.0]], [[2.0]], [[1.0]]]), tolerance=0.05).tolist()
        [0, 1, 0]
    """
    flat = QK.flatten(1)
    norms = flat.norm(dim=1)
    distance = torch.cdist(flat[None], flat[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
    near = (distance <= tolerance * torch.maximum(norms[:, None], norms)).numpy()
    if near.sum() == len(near):
        return np.arange(len(near))
    from scipy.sparse.csgraph import connected_components  # takes a good part of a start-up

    _, groups = connected_components(near, directed=False)
    return groups.astype(np.int64)


def rotation_angle(matrix: Float[np.ndarray, "d_x d_x"]) -> float:
    """Largest angle in degrees of a multiple of a rotation, NaN for any other matrix, a reflection too.

    Example:
        >>> round(rotation_angle(np.array([[0.0, -2.0], [2.0, 0.0]])))
        90
    """
    left, sizes, right = np.linalg.svd(matrix)
    if sizes[0] > (1 + SPREAD) * sizes[-1] or np.linalg.det(left @ right) < 0:
        return float("nan")
    return float(np.degrees(np.abs(np.angle(np.linalg.eigvals(left @ right))).max()))


def is_definite(matrix: Float[Tensor, "d_x d_x"]) -> bool:
    """Whether a matrix is (nearly) symmetric, with eigenvalues of one sign, as a metric has.

    Example:
        >>> is_definite(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        True
    """
    part = (matrix + matrix.T) / 2
    eigenvalues = torch.linalg.eigvalsh(part)
    return bool(part.norm() >= SYMMETRIC * matrix.norm() and eigenvalues[0] * eigenvalues[-1] > 0)
