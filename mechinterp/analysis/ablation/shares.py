"""Share of each head in the rises of its layer, and the effective number of heads."""

import numpy as np
from jaxtyping import Float


def layer_shares(
    rise: Float[np.ndarray, "*axes layer head"],
) -> Float[np.ndarray, "*axes layer head"]:
    """Each head's share of its layer's rises, negative rises counted as 0; all 0 if no head of the
    layer counts.

    Example:
        >>> layer_shares(np.array([[1.0, 3.0], [-1.0, 0.0]])).tolist()
        [[0.25, 0.75], [0.0, 0.0]]
    """
    positive = rise.clip(min=0)
    total = positive.sum(-1, keepdims=True)
    return positive / np.where(total == 0, 1, total)


def effective_number(
    rise: Float[np.ndarray, "*axes layer head"],
) -> Float[np.ndarray, "*axes layer"]:
    """exp of the entropy of the shares of the rises: 1 if one head counts, 0 if none does.

    Example:
        >>> effective_number(np.array([[1.0, 1.0], [2.0, -1.0], [0.0, 0.0]])).tolist()
        [2.0, 1.0, 0.0]
    """
    shares = layer_shares(rise)
    logs = np.log(np.where(shares > 0, shares, 1))
    return np.where(shares.any(-1), np.exp(-(shares * logs).sum(-1)), 0.0)
