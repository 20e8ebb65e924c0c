"""Weights of linear-attention heads, merged or separate, and the function that they compute together.

A head adds v_i b^T U_i x_query to the prediction; U_i is its own matrix or K_i^T Q_i of rank R. This module computes M
from the heads, and their motion under a force on M.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import require_counts

Force = Callable[[np.ndarray], np.ndarray]
"""Function from M to the force on it, G = -(1/2) dL/dM."""


@dataclass(frozen=True, eq=False, repr=False)
class MergedHeads:
    """Heads with one matrix for key and query; leading axes, such as time, are allowed."""

    v: Float[np.ndarray, "*stack head"]
    """Value weights."""
    U: Float[np.ndarray, "*stack head d_x d_x"]
    """Key-query matrices."""

    def __repr__(self) -> str:
        return f"MergedHeads(n_heads={self.v.shape[-1]}, d_x={self.U.shape[-1]})"

    @property
    def M(self) -> Float[np.ndarray, "*stack d_x d_x"]:
        """sum_i v_i U_i."""
        M = self.v[..., None, :] @ self.U.reshape(*self.v.shape, -1)
        return M.reshape(*self.v.shape[:-1], *self.U.shape[-2:])

    def velocity(self, force: Float[np.ndarray, "*stack d_x d_x"]) -> "MergedHeads":
        """tau d/dt of the weights under G: v_i' = tr(U_i^T G), U_i' = v_i G.

        Source:
            Zhang et al. 2025, arXiv 2501.16265, eq. (8), with G in place of its sums.
        """
        d_x, U = self.U.shape[-1], self.U.reshape(*self.v.shape, -1)
        v, U = merged_motion(self.v, U, lambda M: force.reshape(*self.v.shape[:-1], -1))
        return MergedHeads(v=v, U=U.reshape(*self.v.shape, d_x, d_x))


@dataclass(frozen=True, eq=False, repr=False)
class SeparateHeads:
    """Heads with keys and queries of rank R; leading axes, such as time, are allowed."""

    v: Float[np.ndarray, "*stack head"]
    """Value weights."""
    K: Float[np.ndarray, "*stack head rank d_x"]
    """Keys k_r as rows."""
    Q: Float[np.ndarray, "*stack head rank d_x"]
    """Queries q_r as rows."""

    def __repr__(self) -> str:
        n_heads, rank, d_x = self.K.shape[-3:]
        return f"SeparateHeads(n_heads={n_heads}, rank={rank}, d_x={d_x})"

    @property
    def M(self) -> Float[np.ndarray, "*stack d_x d_x"]:
        """sum_i v_i K_i^T Q_i."""
        pairs = (*self.v.shape[:-1], -1, self.K.shape[-1])
        weighted = (self.v[..., None, None] * self.K).reshape(pairs)
        return weighted.mT @ self.Q.reshape(pairs)

    def velocity(self, force: Float[np.ndarray, "*stack d_x d_x"]) -> "SeparateHeads":
        """tau d/dt of the weights under G: v_i' = sum_r k_r^T G q_r, k_r' = v_i G q_r, q_r' = v_i G^T k_r.

        Source:
            Zhang et al. 2025, arXiv 2501.16265, eq. (14) for rank one.
        """
        pairs = (*self.v.shape[:-1], -1, self.K.shape[-1])
        K, Q = (rows.reshape(pairs) for rows in (self.K, self.Q))
        v = np.repeat(self.v, self.K.shape[-2], axis=-1)[..., None]
        read, K, Q = separate_motion(v, K, Q, lambda M: force)
        by_head = self.K.shape[:-1]
        return SeparateHeads(
            v=read.reshape(by_head).sum(-1), K=K.reshape(self.K.shape), Q=Q.reshape(self.K.shape)
        )


Heads = MergedHeads | SeparateHeads


def merged_motion(
    v: Float[np.ndarray, "*stack head"], U: Float[np.ndarray, "*stack head entry"], force: Force
) -> tuple[np.ndarray, np.ndarray]:
    """`MergedHeads.velocity` for matrices as rows of entries: tau d/dt of v and U, with the force as a function of M."""
    G = force((v[..., None, :] @ U)[..., 0, :])
    return np.vecdot(U, G[..., None, :]), v[..., None] * G[..., None, :]


def separate_motion(
    v: Float[np.ndarray, "*stack pair 1"],
    K: Float[np.ndarray, "*stack pair d_x"],
    Q: Float[np.ndarray, "*stack pair d_x"],
    force: Force,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`SeparateHeads.velocity` for pairs k_r, q_r: k_r^T G q_r, and tau d/dt of k_r and q_r."""
    weighted = v * K
    G = force(weighted.mT @ Q)
    key = Q @ G.mT
    return np.vecdot(K, key), v * key, weighted @ G


def merged_heads(n_heads: int, d_x: int, *, std: float, seed: int) -> MergedHeads:
    """Random merged heads with entries from N(0, std^2).

    Raises:
        ValueError: If std is not positive: zero weights never move.
    Example:
        >>> merged_heads(2, 3, std=0.1, seed=0).U.shape
        (2, 3, 3)
    """
    v, U = _draw(n_heads, (d_x, d_x), 1, std, seed)
    return MergedHeads(v=v, U=U[0])


def separate_heads(
    n_heads: int, d_x: int, *, std: float, seed: int, rank: int = 1
) -> SeparateHeads:
    """Random heads of rank `rank` with entries from N(0, std^2).

    Raises:
        ValueError: If std is not positive: zero weights never move.
    Example:
        >>> separate_heads(2, 3, std=0.1, seed=0, rank=2).K.shape
        (2, 2, 3)
    """
    v, (K, Q) = _draw(n_heads, (rank, d_x), 2, std, seed)
    return SeparateHeads(v=v, K=K, Q=Q)


def _draw(
    n_heads: int, shape: tuple[int, int], copies: int, std: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    if std <= 0:
        raise ValueError(f"std must be > 0, got {std}: zero weights never move.")
    require_counts(n_heads=n_heads, **{"rank and d_x": min(shape)})
    rng = np.random.default_rng(seed)
    v = std * rng.standard_normal(n_heads)
    matrices = std * rng.standard_normal((copies, n_heads, *shape))
    return v, matrices
