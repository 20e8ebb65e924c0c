"""Time courses of merged linear-attention heads under gradient flow from small weights.

The flow is tau dW/dt = -(1/2) dL/dW; times have the unit of tau. The functions give tau in steps of
descent, the time of the one drop in loss, and the loss during it."""

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

from mechinterp.theory.linear import MergedHeads, Modes, require_positive


def learning_rate_time(
    learning_rate: float, *, n_factors: int, context_length: int | None = None
) -> tuple[float, float]:
    """tau in steps of gradient descent on L, and the factor from the weights of the paper's code to
    those of the flow.

    Args:
        n_factors: Number of weights multiplied in a head: 2 for merged heads, 3 for separate key
            and query.
        context_length: N if the model sums over the context without dividing by N; None if it
            divides.
    Raises:
        ValueError: If learning_rate is not positive.
    Source:
        Derived here: W = N^(1/n) W_code turns the sum into the mean, and tau = 1 / (2 eta N^(2/n)).
    Example:
        >>> [round(value, 4) for value in learning_rate_time(0.02, n_factors=3, context_length=31)]
        [2.5334, 3.1414]
    """
    require_positive(learning_rate=learning_rate)
    factor = float((context_length or 1) ** (1 / n_factors))
    return 1 / (2 * learning_rate * factor**2), factor


def effective_scale(heads: MergedHeads, directions: Modes) -> float:
    """w_eff = |W_1 e + w_2| / 2, the growing part of random small weights; e = vec(Lambda^2)
    normalised.

    w_2 contains the v_i, and the rows of W_1 are the vec(U_i).

    Source:
        Derived here: near zero (W_1 e)' = |Lambda^2| w_2 and w_2' = |Lambda^2| W_1 e, so the sum grows.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.ones(1), context_length=31))
        >>> effective_scale(MergedHeads(v=np.array([0.1]), U=np.array([[[0.1]]])), directions)
        0.1
    """
    force = (directions.vectors * directions.rates) @ directions.vectors.T
    along = np.einsum("hij,ij->h", heads.U, force / np.linalg.norm(directions.rates))
    return float(np.linalg.norm(along + heads.v) / 2)


def white_time_course(
    time: Float[np.ndarray, " time"], directions: Modes, *, scale: float, tau: float = 1.0
) -> tuple[Float[np.ndarray, " time"], Float[np.ndarray, " time"]]:
    """sigma(t), where M = sigma(t) I, and the loss of merged heads for x ~ N(0, c I).

    sigma = e^{At} / [c a (e^{At} - 1) + sqrt(D) / w^2], A = 2 c^2 sqrt(D) / tau. Exact for weights
    that start balanced and aligned, with norm w per layer.

    Args:
        scale: w, or `effective_scale` of random weights.
    Raises:
        ValueError: If the eigenvalues differ or scale or tau is not positive.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (10), which has c = 1.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.ones(4), context_length=31))
        >>> sigma, loss = white_time_course(np.array([0.0, 100.0]), directions, scale=1e-3)
        >>> loss.round(4).tolist()
        [4.0, 0.5556]
    """
    rate, initial = _white(directions, scale, tau)
    decay = np.exp(-rate * time)
    sigma = 1 / ((1 - decay) / directions.targets[0] + initial * decay)
    return sigma, directions.diagonal_loss(sigma[:, None] / directions.targets)


def white_half_time(directions: Modes, *, scale: float, tau: float = 1.0) -> float:
    """Time at which sigma(t) reaches half of its final value: (1/A) ln(sqrt(D) / (c a w^2) - 1).

    Raises:
        ValueError: If the eigenvalues differ, or scale or tau is not positive.
    Source:
        Derived here from Zhang et al. 2025, arXiv 2501.16265, eq. (10).
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.ones(4), context_length=31))
        >>> round(white_half_time(directions, scale=1e-3), 3)
        3.59
    """
    rate, initial = _white(directions, scale, tau)
    return float(np.log(initial * directions.targets[0] - 1) / rate)


def merged_time_course(
    time: Float[np.ndarray, " time"], directions: Modes, *, scale: float, tau: float = 1.0
) -> tuple[Float[np.ndarray, " time"], Float[np.ndarray, "time mode"], Float[np.ndarray, " time"]]:
    """v(t), u_d(t) and the loss of merged heads that grew together from small weights, for any
    covariance.

    tau v' = sum_d u_d (g_d - g_d v u_d / m_d), tau u_d' = v (g_d - g_d v u_d / m_d), M = v diag(u).

    Args:
        time: Increasing times, from 0 or later.
        scale: `effective_scale` of the weights.
    Raises:
        ValueError: If scale or tau is not positive.
    Source:
        Derived here: all heads share one direction, so that D + 1 numbers remain.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.array([0.3, 0.2]), context_length=31))
        >>> v, u, loss = merged_time_course(np.array([0.0, 3000.0]), directions, scale=1e-3)
        >>> np.allclose(loss, directions.levels[[0, -1]], atol=1e-5)
        True
    """
    require_positive(scale=scale, tau=tau)

    def velocity(_: float, state: np.ndarray) -> np.ndarray:
        v, u = state[0], state[1:]
        force = directions.rates * (1 - v * u / directions.targets) / tau
        return np.concatenate([[u @ force], v * force])

    start = scale * np.concatenate([[1.0], directions.rates / np.linalg.norm(directions.rates)])
    span, accuracy = (0.0, float(time[-1])), {"rtol": 1e-10, "atol": 1e-13}
    state = solve_ivp(velocity, span, start, "LSODA", t_eval=time, **accuracy).y.T
    v, u = state[:, 0], state[:, 1:]
    return v, u, directions.diagonal_loss(v[:, None] * u / directions.targets)


def _white(directions: Modes, scale: float, tau: float) -> tuple[float, float]:
    """A, and 1 / sigma(0)."""
    require_positive(scale=scale, tau=tau)
    if np.ptp(directions.rates) > 1e-9 * directions.rates[0]:
        raise ValueError(
            f"The covariance must be white, got growth rates {directions.rates.tolist()}."
        )
    root = float(len(directions.rates) ** 0.5)
    return float(2 * directions.rates[0] * root / tau), root / scale**2
