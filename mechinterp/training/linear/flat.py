"""Weights of linear attention as one flat array: their product, loss and velocity without making heads."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import Moments
from mechinterp.theory.linear_heads import Heads, MergedHeads, SeparateHeads

Force = Callable[[np.ndarray], np.ndarray]  # [d_x, d_x] to [d_x, d_x]: M to G


def check_heads(heads: Heads, moments: Moments) -> None:
    """Refuse heads that do not fit the moments, or cannot move.

    Raises:
        ValueError: If sizes differ, all weights are zero, or the heads have a time axis.
    """
    if heads.v.ndim != 1:
        raise ValueError(f"heads must have no time axis, got v of shape {heads.v.shape}.")
    if heads.M.shape != moments.yz.shape:
        raise ValueError(
            f"heads must have d_x = {len(moments.yz)} as the moments have, got {len(heads.M)}."
        )
    if not flatten(heads).any():
        raise ValueError("heads must not be zero: zero weights never move.")


def flatten(heads: Heads) -> Float[np.ndarray, "*stack weight"]:
    """All weights of heads in one array, along its last axis."""
    stack = heads.v.shape[:-1]
    matrices = (heads.U,) if isinstance(heads, MergedHeads) else (heads.K, heads.Q)
    return np.concatenate([part.reshape(*stack, -1) for part in (heads.v, *matrices)], axis=-1)


def unflatten(heads: Heads, flat: Float[np.ndarray, "*stack weight"]) -> Heads:
    """Heads of the same sizes from flat weights."""
    n_heads, stack = heads.v.shape[-1], flat.shape[:-1]
    v, rest = flat[..., :n_heads], flat[..., n_heads:]
    if isinstance(heads, MergedHeads):
        return MergedHeads(v=v, U=rest.reshape(*stack, *heads.U.shape))
    K, Q = np.split(rest, 2, axis=-1)
    return SeparateHeads(
        v=v, K=K.reshape(*stack, *heads.K.shape), Q=Q.reshape(*stack, *heads.K.shape)
    )


def force_of(moments: Moments) -> Force:
    """G as a function of M."""
    yz, size = moments.yz, moments.yz.size
    zz = moments.zz.reshape(size, size)
    return lambda M: yz - (zz @ M.ravel()).reshape(yz.shape)


def velocity_of(heads: Heads) -> Callable[[np.ndarray, Force], np.ndarray]:
    """tau dW/dt of flat weights under a force: `heads.velocity` without making heads."""
    n_heads = heads.v.shape[-1]
    if isinstance(heads, MergedHeads):
        d_x = heads.U.shape[-1]

        def merged(flat: np.ndarray, force: Force) -> np.ndarray:
            v, U = flat[:n_heads], flat[n_heads:].reshape(n_heads, -1)
            G = force((v @ U).reshape(d_x, d_x)).ravel()
            return np.concatenate([U @ G, np.outer(v, G).ravel()])

        return merged

    rank, d_x = heads.K.shape[-2:]
    last = n_heads + heads.K.size

    def separate(flat: np.ndarray, force: Force) -> np.ndarray:
        K, Q = flat[n_heads:].reshape(2, n_heads * rank, d_x)
        v = np.repeat(flat[:n_heads], rank)[:, None]
        scaled = v * K
        G = force(scaled.T @ Q)
        key = Q @ G.T
        out = np.empty_like(flat)
        out[:n_heads] = (K * key).reshape(n_heads, -1).sum(1)
        out[n_heads:last] = (v * key).ravel()
        out[last:] = (scaled @ G).ravel()
        return out

    return separate


def loss_of(heads: Heads, moments: Moments) -> Callable[[np.ndarray], float]:
    """The loss of flat weights."""
    product, linear = _product(heads), 2 * moments.yz.ravel()
    zz = moments.zz.reshape(moments.yz.size, -1)

    def loss(flat: np.ndarray) -> float:
        M = product(flat).ravel()
        return float(moments.yy + M @ (zz @ M - linear))

    return loss


def _product(heads: Heads) -> Callable[[np.ndarray], np.ndarray]:
    """M of flat weights."""
    n_heads = heads.v.shape[-1]
    if isinstance(heads, MergedHeads):
        d_x = heads.U.shape[-1]
        return lambda flat: (flat[:n_heads] @ flat[n_heads:].reshape(n_heads, -1)).reshape(d_x, d_x)
    rank, d_x = heads.K.shape[-2:]

    def separate(flat: np.ndarray) -> np.ndarray:
        K, Q = flat[n_heads:].reshape(2, n_heads * rank, d_x)
        return (np.repeat(flat[:n_heads], rank)[:, None] * K).T @ Q

    return separate
