"""Bounds and levels for separate linear-attention heads that grow one after another (Zhang et al.
2025, section 5).

The flow is tau dW/dt = -(1/2) dL/dW; times have the unit of tau."""

import numpy as np
from jaxtyping import Float

from mechinterp.theory.linear import Modes, SeparateHeads, require_positive


def first_jump_bound(heads: SeparateHeads, directions: Modes, *, tau: float = 1.0) -> float:
    """Lower bound on the time at which the first head grows: tau sqrt(3) / (g_1 max_i |theta_i|).

    theta_i = (v_i, K_i, Q_i) holds the initial weights of a head.

    Raises:
        ValueError: If all weights are zero or tau is not positive.
    Source:
        Derived here: v sum_r k_r^T G q_r <= g_1 |theta|^3 / (3 sqrt 3), as for alternating gradient
        flows.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.ones(1), context_length=31))
        >>> head = SeparateHeads(v=np.full(1, 0.1), K=np.full((1, 1, 1), 0.1), Q=np.full((1, 1, 1), 0.1))
        >>> round(first_jump_bound(head, directions), 6)
        10.0
    """
    squares = heads.v**2 + np.square(heads.K).sum((1, 2)) + np.square(heads.Q).sum((1, 2))
    require_positive(tau=tau, weights=float(squares.max()))
    return float(tau * 3**0.5 / (directions.rates[0] * np.sqrt(squares.max())))


def settled_head(
    targets: Float[np.ndarray, " learned"],
) -> tuple[float, Float[np.ndarray, " learned"]]:
    """|v| = (sum_d m_d)^(1/3) and |k_r| = |q_r| = sqrt(m_d / |v|) of a head that has learned the
    directions d.

    Raises:
        ValueError: If a target is not positive.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (20) for one direction; derived here for several.
    Example:
        >>> v, norms = settled_head(np.array([8.0]))
        >>> round(v, 9), norms.round(9).tolist()
        (2.0, [2.0])
    """
    require_positive(targets=float(np.min(targets)))
    v = float(np.sum(targets) ** (1 / 3))
    return v, np.sqrt(targets / v)


def long_levels(directions: Modes, *, rank: int) -> list[int]:
    """Numbers of learned directions at the long plateaus of heads with a given rank: 0, R, 2R, ...
    and D.

    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 5.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> long_levels(modes(population_moments(np.arange(1.0, 6), context_length=31)), rank=2)
        [0, 2, 4, 5]
    """
    n_modes = len(directions.rates)
    return [*range(0, n_modes, rank), n_modes]


def residence_in_head(
    directions: Modes, first: int, second: int, *, scale: float, tau: float = 1.0
) -> float:
    """Time between two directions learned by one head of rank 2 or more, up to a constant.

    tau (1 - g_2 / g_1) ln(1 / scale) / (v g_2) with v = m_1^(1/3). The constant drops out when two
    scales are compared.

    Raises:
        ValueError: If scale or tau is not positive.
    Source:
        Derived here: at fixed v the next pair grows at rate v g_2, from scale^(1 - g_2 / g_1).
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31))
        >>> waits = [residence_in_head(directions, 0, 1, scale=scale) for scale in (1e-3, 1e-2)]
        >>> round(waits[0] - waits[1], 2)
        8.55
    """
    require_positive(scale=scale, tau=tau)
    slow, fast = directions.rates[second], directions.rates[first]
    v = directions.targets[first] ** (1 / 3)
    return float(tau * (1 - slow / fast) * np.log(1 / scale) / (v * slow))
