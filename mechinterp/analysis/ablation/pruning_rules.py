"""Rules that choose the heads that a pruned model keeps."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float

from mechinterp.models.hooked.masks import Head

Rule = Callable[[np.ndarray], np.ndarray]
"""Function from the rises [layer, head] of the excess risk to a mask [layer, head], True for heads
that are kept."""


def best_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Keeps all heads of the first layer, and the head with the largest rise of each later layer.

    Example:
        >>> best_head_later(np.array([[1.0, 2.0], [1.0, 2.0], [0.0, -1.0]])).tolist()
        [[True, True], [False, True], [True, False]]
    """
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps all heads of the first layer, and the head with the smallest rise of each
    later layer."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps the head with the largest rise of the first layer, and all heads of the later
    layers."""
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[1:] = True
    return kept


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """Heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask of kept heads, checked.

    Raises:
        ValueError: If it is not a boolean array of this shape, or keeps no head.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must return a boolean array of shape {shape}, got {kept.dtype} of shape {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"A rule must keep at least one of {kept.size} heads, got none.")
    return kept
