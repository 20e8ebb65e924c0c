"""Fixed points of one layer of linear attention, the levels of its loss, and what gradient flow conserves."""

from collections.abc import Collection

import numpy as np
from jaxtyping import Float

from mechinterp.theory.learning_coefficient import learning_coefficient
from mechinterp.theory.linear import Heads, MergedHeads, Modes, Moments, require_eigenvalues


def moment_ratio(
    eigenvalues: Float[np.ndarray, " mode"], *, context_length: int
) -> Float[np.ndarray, " mode"]:
    """a_d = 1 + (1 + tr(Lambda) / lambda_d) / N: E[Lhat^2] has the eigenvalues lambda_d^2 a_d.

    Raises:
        ValueError: If an eigenvalue is not positive or context_length is below 1.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (15).
    Example:
        >>> moment_ratio(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31).round(6).tolist()
        [1.112903, 1.139785, 1.193548, 1.354839]
    """
    values = require_eigenvalues(eigenvalues)
    if context_length < 1:
        raise ValueError(f"context_length must be >= 1, got {context_length}.")
    return 1 + (1 + values.sum() / values) / context_length


def fixed_point(directions: Modes, subset: Collection[int]) -> Float[np.ndarray, "d_x d_x"]:
    """M(S) = sum_{d in S} m_d e_d e_d^T, at which the gradient on every head is zero.

    Raises:
        ValueError: If a member of the subset is not a direction or occurs twice.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.2; all D directions give M* of eq. (11).
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.array([0.3, 0.2]), context_length=31))
        >>> np.diag(fixed_point(directions, [1])).round(3).tolist()
        [0.0, 4.493]
    """
    rows = _subset(directions, subset)
    vectors = directions.vectors[:, rows]
    return (vectors * directions.targets[rows]) @ vectors.T


def fixed_point_loss(directions: Modes, subset: Collection[int]) -> float:
    """L(M(S)) = E y^2 - sum_{d in S} lambda_d / a_d, unit y^2.

    Raises:
        ValueError: If a member of the subset is not a direction or occurs twice.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (19) for the first m directions; for any subset derived here.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.array([0.3, 0.2]), context_length=31))
        >>> round(fixed_point_loss(directions, [0, 1]), 4) == round(float(directions.levels[-1]), 4)
        True
    """
    return float(directions.variance - directions.gains[_subset(directions, subset)].sum())


def _subset(directions: Modes, subset: Collection[int]) -> list[int]:
    rows, n_modes = sorted(subset), len(directions.rates)
    if len(set(rows)) < len(rows) or not set(rows) <= set(range(n_modes)):
        raise ValueError(
            f"subset must hold directions from 0 to {n_modes - 1}, each once, got {rows}."
        )
    return rows


def level_coefficients(moments: Moments) -> Float[np.ndarray, " level"]:
    """lambda at the minimum over matrices of rank <= m, for m = 0 ... d: the staircase of the linear paper.

    Raises:
        ValueError: As in `learning_coefficient`.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> level_coefficients(population_moments(np.ones(3), context_length=31)).tolist()
        [0.0, 1.5, 3.0, 4.5]
    """
    counts = range(1, len(moments.yz) + 1)
    coefficients = [learning_coefficient(moments, n_heads=count, rank=1) for count in counts]
    return np.array([0.0, *coefficients])


def conserved(heads: Heads) -> tuple[np.ndarray, ...]:
    """Quantities that gradient flow leaves constant, with the leading axes of the heads.

    Merged heads: v_i v_j - tr(U_i^T U_j), [head, head]. Separate heads: K_i K_i^T - Q_i Q_i^T, [head, rank, rank], and
    v_i^2 - tr(K_i K_i^T), [head].

    Source:
        Zhang et al. 2025, arXiv 2501.16265, appendix E.8, names their consequence; derived here.
    """
    if isinstance(heads, MergedHeads):
        outer = heads.v[..., :, None] * heads.v[..., None, :]
        return (outer - np.einsum("...aij,...bij->...ab", heads.U, heads.U),)
    difference = np.einsum("...ri,...si->...rs", heads.K, heads.K)
    difference -= np.einsum("...ri,...si->...rs", heads.Q, heads.Q)
    return difference, heads.v**2 - np.square(heads.K).sum((-2, -1))
