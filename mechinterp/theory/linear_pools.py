"""What one layer of linear attention, keys reading x and values reading y, can know of a pool of tasks: its second moment."""

import numpy as np
from jaxtyping import Float


def second_moment(pool: Float[np.ndarray, "task d_x"]) -> Float[np.ndarray, "d_x d_x"]:
    """Second moment of a pool, T = (1/M) sum_i beta_i beta_i^T.

    Example:
        >>> second_moment(np.array([[2.0, 0.0], [0.0, 0.0]])).tolist()
        [[2.0, 0.0], [0.0, 0.0]]
    """
    return pool.T @ pool / len(pool)
