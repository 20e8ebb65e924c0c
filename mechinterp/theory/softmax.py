"""Closed forms for one-layer softmax attention, for the gradient steps it is compared with, and for the training of two
heads of opposite sign.

All functions take and return numbers. They assume x ~ N(0, I) and signal variance 1 (beta ~ N(0, I/d_x)); `noise_var` is
the noise variance in units of the signal variance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


def debiased_step_size(*, d_x: int, context_length: int, noise_var: float) -> float:
    """Risk-minimising step size of one debiased gradient step: 1 / (1 + (1 + s^2) d / L).

    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.3) and (4.11) with the factor 1/L.
    Example:
        >>> round(debiased_step_size(d_x=5, context_length=40, noise_var=0.1), 4)
        0.8791
    """
    return 1 / (1 + (1 + noise_var) * d_x / context_length)


Times = Float[np.ndarray, " time"]


@dataclass(frozen=True, eq=False)
class TwoHeadFlow:
    """omega, mu and half the approximate loss over time, of the heads (omega, mu) and (-omega, -mu).

    Time is that of the flow on half the loss. In phase I both numbers grow as alpha e^t. In phase II mu overtakes while
    omega reaches its peak. In phase III omega falls and mu rises along the solution manifold, as powers of time.
    """

    time: Times
    omega: Times
    """Scale of the positive head's QK circuit, unit 1/x^2."""
    mu: Times
    half_loss: Times
    """Half the approximate loss, unit y^2."""
    peak_time: float
    """Time of the largest omega; NaN if omega still grows at the end."""
    peak_omega: float


def two_head_flow(
    time: Times, *, start: float, d_x: int, context_length: int, noise_var: float
) -> TwoHeadFlow:
    """Flow from omega = mu = start at time 0, integrated with relative tolerance 1e-10.

    omega' = mu - 2 mu^2 omega (1 + c d cosh(d omega^2)),   mu' = omega - 2 omega^2 mu - 2 c mu sinh(d omega^2)

    Args:
        time: Increasing times >= 0.
    Raises:
        ValueError: If start is not positive: zero weights never move.
    Source:
        He et al. 2025, arXiv 2503.12734, (B.4), with c = (1 + s^2) / L.
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> flow = two_head_flow(np.array([0.0, 8.0, 12.0]), start=1e-3, **setting)
        >>> flow.omega.round(3).tolist(), round(flow.peak_time, 2)
        ([0.001, 0.574, 0.504], 7.69)
    """
    if start <= 0:
        raise ValueError(f"start must be > 0, got {start}.")
    c = (1 + noise_var) / context_length

    def velocity(_: float, state: Sequence[float] | np.ndarray) -> list[float]:
        omega, mu = state
        omega_rate = mu - 2 * mu**2 * omega * (1 + c * d_x * np.cosh(d_x * omega**2))
        mu_rate = omega - 2 * omega**2 * mu - 2 * c * mu * np.sinh(d_x * omega**2)
        return [omega_rate, mu_rate]

    def slope(at: float, state: Sequence[float] | np.ndarray) -> float:
        return velocity(at, state)[0]

    slope.direction = -1  # type: ignore[attr-defined]
    span, accuracy = (0.0, float(time[-1])), {"rtol": 1e-10, "atol": 1e-14}
    from scipy.integrate import solve_ivp  # slow import

    solution = solve_ivp(
        velocity, span, [start, start], "LSODA", t_eval=time, events=slope, **accuracy
    )
    omega, mu = solution.y
    gain = 2 * mu**2 * (omega**2 + c * np.sinh(d_x * omega**2))
    half_loss = (1 + noise_var) / 2 - 2 * mu * omega + gain
    peak_time = peak_omega = float("nan")
    if len(solution.t_events[0]) > 0:
        peak_time, peak_omega = solution.t_events[0][0], solution.y_events[0][0][0]
    return TwoHeadFlow(time, omega, mu, half_loss, float(peak_time), float(peak_omega))
