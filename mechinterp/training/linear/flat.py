"""Weights of linear attention as one flat array, for numerical solvers."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import Moments
from mechinterp.theory.linear_heads import (
    Heads,
    MergedHeads,
    SeparateHeads,
    merged_motion,
    separate_motion,
)


def check_heads(heads: Heads, moments: Moments) -> None:
    """Refuse heads that do not fit the moments, or that cannot move.

    Raises:
        ValueError: If sizes differ, all weights are zero, or the heads have a time axis.
    """
    if heads.v.ndim != 1:
        raise ValueError(f"heads must have no time axis, got v of shape {heads.v.shape}.")
    if heads.M.shape != moments.yz.shape:
        d_x, given = len(moments.yz), len(heads.M)
        raise ValueError(f"heads must have d_x = {d_x} as the moments have, got {given}.")
    if not flatten(heads).any():
        raise ValueError("heads must not be zero: zero weights never move.")


def flatten(heads: Heads) -> Float[np.ndarray, "*stack weight"]:
    """All weights of heads in one array, along its last axis."""
    stack = heads.v.shape[:-1]
    return np.concatenate([part.reshape(*stack, -1) for part in vars(heads).values()], axis=-1)


def unflatten(heads: Heads, flat: Float[np.ndarray, "*stack weight"]) -> Heads:
    """Heads with the sizes of `heads`, from flat weights."""
    n_heads, stack = heads.v.shape[-1], flat.shape[:-1]
    v, rest = flat[..., :n_heads], flat[..., n_heads:]
    if isinstance(heads, MergedHeads):
        return MergedHeads(v=v, U=rest.reshape(*stack, *heads.U.shape))
    both = rest.reshape(*stack, 2, *heads.K.shape)
    return SeparateHeads(v=v, K=both[..., 0, :, :, :], Q=both[..., 1, :, :, :])


def velocity_of(heads: Heads, moments: Moments) -> Callable[[np.ndarray], np.ndarray]:
    """Function that gives tau dW/dt for flat weights, under the loss of the moments."""
    n_heads, d_x = heads.v.shape[-1], len(moments.yz)
    if isinstance(heads, MergedHeads):

        def force(M: np.ndarray) -> np.ndarray:
            return moments.gradient(M.reshape(d_x, d_x)).ravel()

        def merged(flat: np.ndarray) -> np.ndarray:
            v, U = merged_motion(flat[:n_heads], flat[n_heads:].reshape(n_heads, -1), force)
            return np.concatenate([v, U.ravel()])

        return merged

    rank = heads.K.shape[-2]

    def separate(flat: np.ndarray) -> np.ndarray:
        K, Q = flat[n_heads:].reshape(2, n_heads * rank, d_x)
        v = np.repeat(flat[:n_heads], rank)[:, None]
        read, K, Q = separate_motion(v, K, Q, moments.gradient)
        return np.concatenate([read.reshape(n_heads, rank).sum(1), K.ravel(), Q.ravel()])

    return separate
