"""Two heads of opposite sign under gradient flow on the approximate loss: growth, overshoot, slow drift.

The heads are (omega, mu) and (-omega, -mu); time is the time of the flow on half the loss. In phase I both grow as
alpha e^t. In phase II mu overtakes while omega reaches its peak. In phase III omega falls and mu rises along the
solution manifold, as powers of time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

from mechinterp.theory.softmax import manifold_mu

Times = Float[np.ndarray, " time"]


@dataclass(frozen=True, eq=False)
class TwoHeadFlow:
    """omega, mu and half the approximate loss over time."""

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


def early_half_loss(time: Times, *, start: float, noise_var: float) -> Float[np.ndarray, " time"]:
    """Half the loss in phase I, where omega = mu = start e^t: (1 + s^2)/2 - 2 start^2 (e^2t - 1).

    Source:
        He et al. 2025, arXiv 2503.12734, appendix B; the constant derived here.
    Example:
        >>> early_half_loss(np.array([4.0]), start=1e-3, noise_var=0.1).round(4).tolist()
        [0.544]
    """
    return (1 + noise_var) / 2 - 2 * start**2 * (np.exp(2 * time) - 1)


def overtaking_mu(
    time: Times, *, start: float, d_x: int, context_length: int, noise_var: float
) -> Float[np.ndarray, " time"]:
    """mu in phase II: (2 k + (start^-2 - 2 k) e^-2t)^(-1/2) with k = 1 + (1 + s^2) d / L.

    Source:
        He et al. 2025, arXiv 2503.12734, (B.13).
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> overtaking_mu(np.array([6.0]), start=1e-3, **setting).round(3).tolist()
        [0.345]
    """
    k = 1 + (1 + noise_var) * d_x / context_length
    return (2 * k + (start**-2 - 2 * k) * np.exp(-2 * time)) ** -0.5


def late_mu(
    time: Times, *, d_x: int, context_length: int, noise_var: float
) -> Float[np.ndarray, " time"]:
    """mu in phase III, (c d^3 t / (16 k^6))^(1/6), where omega follows mu quickly as 1 / (2 k mu).

    The paper argues for t^(1/2); its own equations, integrated numerically, give t^(1/6).

    Source:
        Derived here from He et al. 2025, arXiv 2503.12734, (B.4).
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> late_mu(np.array([1e4]), **setting).round(3).tolist()
        [3.158]
    """
    c = (1 + noise_var) / context_length
    k = 1 + c * d_x
    return (c * d_x**3 * time / (16 * k**6)) ** (1 / 6)


def manifold_gap(flow: TwoHeadFlow, *, d_x: int, context_length: int, noise_var: float) -> Times:
    """mu divided by the solution manifold's mu at the same omega, minus 1: the distance from the manifold.

    Source:
        He et al. 2025, arXiv 2503.12734, (B.17).
    Example:
        >>> setting = {"d_x": 5, "context_length": 40, "noise_var": 0.1}
        >>> flow = two_head_flow(np.array([0.0, 30.0]), start=1e-3, **setting)
        >>> round(float(manifold_gap(flow, **setting)[1]), 3)
        -0.023
    """
    settled = manifold_mu(flow.omega, d_x=d_x, context_length=context_length, noise_var=noise_var)
    return flow.mu / settled - 1
