"""Number of principal components that a step of linear attention uses, from its matrix.

The step y_hat = b^T M x_query with M = sum_d f_d m_d e_d e_d^T over the eigenvectors e_d of the
covariance is principal component regression in context on the directions with f_d = 1."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.one_layer.thresholds import Thresholds
from mechinterp.config import TaskConfig
from mechinterp.theory.linear import Modes, modes
from mechinterp.training.linear.trainer import task_moments

REPEATED = 1e-6  # growth rates closer than this, relative to the largest, share an eigenspace
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
    M: Float[np.ndarray, "d_x d_x"], task: TaskConfig, *, limit: float = Thresholds().equal
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
    aligned = _aligned(modes(moments), M)
    learned = aligned.learned(M)
    along = (aligned.vectors * learned * aligned.targets) @ aligned.vectors.T
    off = float(moments.squared_norm(M - along)) / moments.yy
    count = int((learned > LEARNED).sum()) if off <= limit else None
    return Components(learned=learned, off_diagonal=off, n_components=count)


def _aligned(given: Modes, M: np.ndarray) -> Modes:
    """Modes whose eigenvectors diagonalise the symmetric part of M within each eigenspace."""
    vectors = given.vectors.copy()
    gaps = -np.diff(given.rates) > REPEATED * given.rates[0]
    for space in np.split(np.arange(len(given.rates)), 1 + np.flatnonzero(gaps)):
        basis = vectors[:, space]
        block = basis.T @ M @ basis
        vectors[:, space] = basis @ np.linalg.eigh((block + block.T) / 2)[1][:, ::-1]
    return Modes(given.variance, given.rates, given.targets, vectors)
