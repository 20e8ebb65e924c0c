"""Best prediction of one linear attention layer for a pool of tasks: it depends on the pool by its second moment only."""

import numpy as np
from jaxtyping import Float


def second_moment(pool: Float[np.ndarray, "task d_x"]) -> Float[np.ndarray, "d_x d_x"]:
    """Second moment of a pool, T = (1/M) sum_i beta_i beta_i^T.

    Example:
        >>> second_moment(np.array([[2.0, 0.0], [0.0, 0.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    return pool.T @ pool / len(pool)
