r"""Exact learning coefficient of one layer of linear attention.

The loss is a quadratic function of M = sum_h v_h U_h alone. Its minima over the weights are therefore the minima over the
matrices that heads can make. The coefficient counts the directions in which the loss rises around such a minimum.
"""

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import REPEATED, ROUNDING, Heads, MergedHeads, Moments, require_counts

RANK_TOLERANCE = 1e-5
"""A singular value of a Jacobian below this fraction of the largest counts as zero; weights are stored in float32."""


def learning_coefficient(moments: Moments, *, n_heads: int, rank: int) -> float:
    """lambda at the minimum over heads of rank R: m (2 d - m) / 2 with m = min(R H, d), reduced if singular values tie at m.

    Merged heads have rank d. The value holds over all v, keys and queries (or U) whose Jacobian has full rank on the
    matrices of rank m. Every minimum without heads that cancel each other is of this kind.

    Args:
        moments: Population moments with E z z^T = B (x) Lambda; any moments if m = d.
    Raises:
        ValueError: If n_heads or rank is below 1, E z z^T is singular, the rank of the best matrix is below m, or m < d
            and the moments are not population moments.
    Source:
        Derived here; for a quadratic minimum in D directions D / 2 is the textbook case.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> moments = population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31)
        >>> [learning_coefficient(moments, n_heads=n, rank=1) for n in (1, 2, 3, 4, 5)]
        [3.5, 6.0, 7.5, 8.0, 8.0]
    """
    require_counts(rank=rank, n_heads=n_heads)
    d = len(moments.yz)
    m = min(rank * n_heads, d)
    # Loss: L(M) = const + <M - M*, zz (M - M*)>. With zz = B (x) Lambda it is const + |X - T|^2 in the whitened
    # X = B^1/2 M Lambda^1/2 and T = B^1/2 M* Lambda^1/2, and X has the rank of M.
    # Reachable matrices: those of rank <= m. Around a matrix of rank m they form a manifold with the tangents
    # A M + M C, A and C of size d x d. Of the d^2 directions, the (d - m)^2 that map the null space to the null
    # space are missing, so its dimension is d^2 - (d - m)^2 = m (2 d - m).
    # Weights: if the derivative of weights -> M reaches all of these tangents (a submersion), the weights are locally
    # that manifold times flat directions, and lambda over the weights equals lambda over the manifold.
    # Rank one: a dq k^T + q dk^T spans the tangents if the m queries, and the m keys, are independent. A further head
    # (for example v = k = q = 0) adds flat directions only.
    # m = d: M is free and the quadratic has all d^2 directions: lambda = d^2 / 2.
    # m < d: the minimum is T cut to its m largest singular values (Eckart, Young). In the coordinates of T's singular
    # vectors the second derivative at the minimum is s_i^2 - s_j^2 for a rotation of direction i <= m into j > m (twice,
    # left and right, with the factors s_i +- s_j) and 1 for all others: positive if s_m > s_{m+1}. Each of these directions
    # counts 1/2. With a tie the choice of the m values is free: if r of g equal values are kept, every r-dimensional
    # subspace is equally good, and these r (g - r) rotations are flat, too. All d equal: m (2 d - m) - m (d - m) = m d.
    # QED
    if np.linalg.matrix_rank(moments.zz.reshape(d * d, -1), hermitian=True) < d * d:
        raise ValueError("E z z^T must not be singular: directions without loss would not count.")
    if m == d:
        return d * d / 2
    values = whitened_singular_values(moments)
    best_rank = int((values**2 > ROUNDING * values[0] ** 2).sum())
    if best_rank < m:
        raise ValueError(
            f"The best matrix must have rank {m} or more, as heads can make, got {best_rank}."
        )
    tied = np.abs(values - values[m - 1]) < REPEATED * values[m - 1]
    taken = int(tied[:m].sum())
    return (reachable_dimension(d, m) - taken * (int(tied.sum()) - taken)) / 2


def reachable_dimension(d_x: int, rank: int) -> int:
    """Dimension of the set of d x d matrices of rank <= m: m (2 d - m), or d^2 if m >= d.

    Example:
        >>> [reachable_dimension(4, rank) for rank in (1, 2, 3, 4, 5)]
        [7, 12, 15, 16, 16]
    """
    m = min(rank, d_x)
    return m * (2 * d_x - m)


def whitened_singular_values(moments: Moments) -> Float[np.ndarray, " mode"]:
    """Singular values of B^1/2 M* Lambda^1/2, descending, unit y; learning one lowers the loss by its square.

    Raises:
        ValueError: If E z z^T is not a product B (x) Lambda, as for the moments of a training set.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> moments = population_moments(np.array([0.4, 0.3]), context_length=31)
        >>> np.allclose(whitened_singular_values(moments) ** 2, modes(moments).gains)
        True
    """
    # The partial traces of B (x) Lambda are tr(Lambda) B and tr(B) Lambda.
    left, right = np.einsum("ijkj->ik", moments.zz), np.einsum("ijil->jl", moments.zz)
    left = left / np.trace(right)
    product = np.einsum("ik,jl->ijkl", left, right)
    off = np.abs(product - moments.zz).max() / np.abs(moments.zz).max()
    if off > ROUNDING:
        raise ValueError(
            f"E z z^T must be a product B (x) Lambda, got one that is off by {off:.2g}."
        )
    whitened = _root(left) @ moments.minimiser() @ _root(right)
    return np.linalg.svd(whitened, compute_uv=False)


def jacobian(heads: Heads) -> Float[np.ndarray, "entry weight"]:
    """dM/dw of heads without a time axis: one row per entry of M, weights in the order v, K, Q (or v, U)."""
    d = heads.M.shape[-1]
    eye = np.eye(d)
    if isinstance(heads, MergedHeads):
        by_v = heads.U
        rest = [np.einsum("h,ia,jb->habij", heads.v, eye, eye)]
    else:
        by_v = np.einsum("hri,hrj->hij", heads.K, heads.Q)
        rest = [
            np.einsum("h,ai,hrj->hraij", heads.v, eye, heads.Q),
            np.einsum("h,hri,aj->hraij", heads.v, heads.K, eye),
        ]
    return np.concatenate([part.reshape(-1, d * d) for part in (by_v, *rest)]).T


def map_rank(heads: Heads) -> int:
    """Numerical rank of dM/dw: the number of directions in which heads can move M.

    Example:
        >>> from mechinterp.theory.linear import separate_heads
        >>> [map_rank(separate_heads(n, 4, std=1.0, seed=0)) for n in (1, 2, 3, 4)]
        [7, 12, 15, 16]
    """
    values = np.linalg.svd(jacobian(heads), compute_uv=False)
    return int((values > RANK_TOLERANCE * values[0]).sum())


def _root(matrix: Float[np.ndarray, "row row"]) -> Float[np.ndarray, "row row"]:
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
