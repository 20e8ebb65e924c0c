"""Numbers of the heads of one layer, from their circuits and outputs; heads with equal QK circuits count as one head."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp.analysis.circuits import Circuits
from mechinterp.models.heads import share_of
from mechinterp.models.weights import part_of


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Statistics of the heads of one layer, or of its groups of equal heads."""

    names: tuple[str, ...]
    """Numbers of the heads; a group joins its numbers by "+"."""
    blocks: Float[Tensor, "head d_x d_x"]
    """QK x blocks."""
    mu: Float[np.ndarray, "head d_y"]
    qk_diagonal: Float[np.ndarray, " head"]
    ov_last_entry: Float[np.ndarray, " head"]
    share: Float[np.ndarray, " head"]
    """Standard deviation of a head's output over prompts, divided by the sum of these over heads.
    """

    @property
    def task_leak(self) -> Float[np.ndarray, " head"]:
        """Second largest |mu_n| of each head divided by the largest; 0 for one response."""
        if self.mu.shape[1] == 1:
            return np.zeros(len(self.mu))
        second, first = np.sort(np.abs(self.mu), axis=1)[:, -2:].T
        return second / np.where(first == 0, 1, first)

    def where(self, mask: np.ndarray) -> "HeadStatistics":
        """The heads that the mask selects."""
        arrays = ("mu", "qk_diagonal", "ov_last_entry", "share")
        return HeadStatistics(
            names=tuple(name for name, chosen in zip(self.names, mask, strict=True) if chosen),
            blocks=self.blocks[torch.from_numpy(mask)],
            **{name: getattr(self, name)[mask] for name in arrays},
        )


def equal_heads(
    QK: Float[Tensor, "head d_x d_model"], *, tolerance: float
) -> Int[np.ndarray, " head"]:
    """Number of each head's group, from 0; heads of a group have equal QK circuits.

    Such heads attend with one pattern, so their outputs add up or cancel as in a single head.

    Args:
        QK: The active rows, those of the query's x.
        tolerance: Largest distance between two circuits of a group, relative to the larger norm.
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
    from scipy.sparse.csgraph import connected_components  # slow import

    _, groups = connected_components(near, directed=False)
    return groups.astype(np.int64)


def read_heads(
    heads: Circuits, outputs: Float[Tensor, "batch head d_y"], *, tolerance: float | None = None
) -> HeadStatistics:
    """Statistics of every head, or of the groups of heads that are equal within a tolerance; OV
    circuits and outputs are summed within a group."""
    d_x, d_y = heads.omega.shape[2], heads.mu.shape[2]
    QK, each_OV = torch.from_numpy(heads.QK[0])[:, :d_x], torch.from_numpy(heads.OV[0])
    groups = np.arange(len(QK)) if tolerance is None else equal_heads(QK, tolerance=tolerance)
    member = torch.from_numpy(groups[None] == np.unique(groups)[:, None]).to(torch.float64)
    size = each_OV.flatten(1).norm(dim=1).clamp_min(1e-300)
    average = member * size / (member @ size)[:, None]
    OV = torch.einsum("gh,hmn->gmn", member, each_OV)
    mu = OV[:, -d_y:].diagonal(dim1=1, dim2=2)
    blocks = torch.einsum("gh,hij->gij", average, QK[:, :, :d_x])
    return HeadStatistics(
        names=tuple("+".join(map(str, np.flatnonzero(row))) for row in member.numpy()),
        blocks=blocks,
        mu=mu.numpy(),
        qk_diagonal=part_of(blocks.diagonal(dim1=1, dim2=2), blocks).numpy(),
        ov_last_entry=part_of(mu, OV).numpy(),
        share=share_of(torch.einsum("gh,bhn->bgn", member, outputs)).numpy(),
    )
