"""Growth of separate linear-attention heads one after another, the times of their jumps, and exceptions to this theory.

The flow is tau dW/dt = -(1/2) dL/dW; times are in units of tau. This module gives the growth of a head along its
eigenvector, the head that learns each direction and when, and the resulting loss.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from mechinterp.theory.linear import (
    REPEATED,
    Modes,
    SeparateHeads,
    require_counts,
    require_eigenvalues,
    require_positive,
)

# v / v_inf in the middle of a drop in loss, where (1 - (v / v_inf)^3)^2 = 1/2.
MIDPOINT = (1 - 0.5**0.5) ** (1 / 3)


def growth_time(
    v: Float[np.ndarray, "*stack"], *, rate: float, target: float, tau: float = 1.0
) -> Float[np.ndarray, "*stack"]:
    """Time at which a separate head has reached v, up to a constant; use differences.

    tau F(v) / g, where F(v) = -1/v + s [-ln(1-u)/3 + ln(1+u+u^2)/6 - arctan((2u+1)/sqrt 3)/sqrt 3],
    u = s v and s = m^(-1/3), solves tau v' = g v^2 - (g/m) v^5.

    Args:
        v: Value weights, strictly between 0 and m^(1/3).
        rate: g of the direction, lambda^2.
        target: m of the direction, 1 / (lambda a).
    Raises:
        ValueError: If v is outside that range; growth from 0 takes infinitely long.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (21); its solution is derived here by partial fractions.
    Example:
        >>> start, end = growth_time(np.array([0.01, 0.02]), rate=0.16, target=2.25)
        >>> round(float(end - start), 2)
        312.5
    """
    require_positive(rate=rate, target=target, tau=tau)
    u = np.asarray(v) / target ** (1 / 3)
    if np.any((u <= 0) | (u >= 1)):
        raise ValueError(
            f"v must lie strictly between 0 and {target ** (1 / 3):.6g}, got {np.asarray(v).tolist()}."
        )
    return np.asarray(_clock(u, np.log1p(-u)) * tau / (rate * target ** (1 / 3)))


def growth_value(
    time: Float[np.ndarray, "*stack"], start: float, *, rate: float, target: float, tau: float = 1.0
) -> Float[np.ndarray, "*stack"]:
    """Value weight v of a separate head, at times relative to the moment at which v = start.

    Args:
        start: Value between 0 and m^(1/3).
    Raises:
        ValueError: If start is outside that range.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (21), solved by bisection of its implicit solution.
    Example:
        >>> growth_value(np.array([0.0, 312.5, 1e4]), 0.01, rate=0.16, target=2.25).round(3).tolist()
        [0.01, 0.02, 1.31]
    """
    origin = growth_time(np.array(start), rate=rate, target=target, tau=tau)
    goal = (np.asarray(time) + origin) * rate * target ** (1 / 3) / tau
    # In terms of x, with u = 1 / (1 + e^-x), both ends of growth keep full precision.
    low, high = np.full(goal.shape, -700.0), np.full(goal.shape, 700.0)
    for _ in range(64):
        middle = (low + high) / 2
        late = _clock(1 / (1 + np.exp(-middle)), -np.logaddexp(0, middle)) > goal
        low, high = np.where(late, low, middle), np.where(late, middle, high)
    return target ** (1 / 3) / (1 + np.exp(-(low + high) / 2))


@dataclass(frozen=True, eq=False, repr=False)
class Jumps:
    """Predicted jumps: time, direction and head."""

    time: Float[np.ndarray, " jump"]
    """Time of the middle of the drop in loss, in units of tau."""
    mode: Int[np.ndarray, " jump"]
    """Direction that is learned; 0 grows fastest."""
    head: Int[np.ndarray, " jump"]

    def __repr__(self) -> str:
        jumps = zip(self.mode, self.time, strict=True)
        return f"Jumps({', '.join(f'{mode}@{time:.4g}' for mode, time in jumps)})"


def predict_jumps(heads: SeparateHeads, directions: Modes) -> Jumps:
    """Times, directions and heads of all jumps of rank-one heads, from their initial weights alone.

    Every head moves, independently of the others, under the force of the directions not yet learned. The first head whose
    |v| reaches `free_threshold`, relative to v_inf = m^(1/3) of its direction, learns the direction in which it is largest;
    head and direction are then removed.

    Raises:
        ValueError: If the rank is not 1, or all heads are zero.
    Source:
        Derived here; the order and the ansatz are of Zhang et al. 2025, arXiv 2501.16265, eq. (20).
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> from mechinterp.theory.linear import separate_heads
        >>> directions = modes(population_moments(np.array([0.4, 0.2]), context_length=31))
        >>> jumps = predict_jumps(separate_heads(3, 2, std=1e-2, seed=0), directions)
        >>> jumps.mode.tolist()
        [0, 1]
    """
    if heads.K.shape[1] != 1:
        raise ValueError(f"heads must have rank 1, got {heads.K.shape[1]}.")
    along = (rows[:, 0] @ directions.vectors for rows in (heads.K, heads.Q))
    state = np.column_stack([heads.v, *along])
    alive, rates = np.arange(len(state)), directions.rates.copy()
    now, rows = 0.0, []
    for _ in range(min(len(state), len(rates))):
        wait, state, row, mode = _next_jump(state, rates, directions.targets, free_threshold())
        now += wait
        rows.append((now, mode, alive[row]))
        state, alive = np.delete(state, row, axis=0), np.delete(alive, row)
        rates[mode] = 0
    times, learned, chosen = zip(*rows, strict=True)
    return Jumps(time=np.array(times), mode=np.array(learned), head=np.array(chosen))


def predicted_loss(
    time: Float[np.ndarray, " time"], jumps: Jumps, directions: Modes
) -> Float[np.ndarray, " time"]:
    """Loss over time, unit y^2, if each direction grows alone and is in the middle of its drop at its jump.

    L = E y^2 - sum_d gain_d (1 - (1 - u_d^3)^2), u_d = v_d / m_d^(1/3) with v_d from growth_value.

    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (20) and (21), with the times of predict_jumps.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> directions = modes(population_moments(np.array([0.4, 0.2]), context_length=31))
        >>> jumps = Jumps(time=np.array([1e3, 1e4]), mode=np.array([0, 1]), head=np.array([1, 0]))
        >>> predicted_loss(np.array([0.0, 5e3, 1e6]), jumps, directions).round(3).tolist()
        [0.6, 0.23, 0.053]
    """
    learned = np.zeros((len(time), len(directions.rates)))
    for moment, mode in zip(jumps.time, jumps.mode, strict=True):
        rate, target = float(directions.rates[mode]), float(directions.targets[mode])
        start = MIDPOINT * target ** (1 / 3)
        v = growth_value(time - moment, start, rate=rate, target=target)
        learned[:, mode] = v**3 / target
    return directions.diagonal_loss(learned)


def free_threshold() -> float:
    """|v| / v_inf of a head growing as tau v' = g v^2, at the time of the middle of the true drop in loss.

    Source:
        Derived here: F(v) of growth_time tends to -1/v - s arctan(1 / sqrt 3) / sqrt 3 at small v.
    Example:
        >>> round(free_threshold(), 4)
        0.7978
    """
    u = np.float64(MIDPOINT)
    return float(-1 / (_clock(u, np.log1p(-u)) + np.pi / (6 * 3**0.5)))


def _next_jump(
    state: np.ndarray, rates: np.ndarray, targets: np.ndarray, threshold: float
) -> tuple[float, np.ndarray, int, int]:
    """Time to the next jump, state at that time, and row and direction of the head that jumps."""
    n_modes = len(rates)
    live = np.flatnonzero(rates)

    def modes_of(values: np.ndarray) -> np.ndarray:
        pull = values[:, 1 + live] * values[:, 1 + n_modes + live] * rates[live]
        return live[np.abs(pull).argmax(1)]

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        values = flat.reshape(state.shape)
        v, key, query = values[:, :1], values[:, 1 : 1 + n_modes], values[:, 1 + n_modes :]
        force = key * rates
        grown = (force * query).sum(1, keepdims=True)
        return np.hstack([grown, v * query * rates, v * force]).ravel()

    def distance(_: float, flat: np.ndarray) -> float:
        values = flat.reshape(state.shape)
        goal = threshold * targets[modes_of(values)] ** (1 / 3)
        return float((np.abs(values[:, 0]) / goal).max() - 1)

    distance.terminal = True  # type: ignore[attr-defined]
    wait, squares = 0.0, (state**2).sum(1).max()
    require_positive(weights=float(squares))
    if distance(0.0, state.ravel()) < 0:
        horizon = 1e6 / (rates.max() * squares**0.5)
        accuracy = {"rtol": 1e-9, "atol": 1e-13, "events": distance}
        from scipy.integrate import solve_ivp  # slow import

        with np.errstate(under="ignore"):  # the solver asks for the number next to time 0
            solution = solve_ivp(velocity, (0.0, horizon), state.ravel(), "DOP853", **accuracy)
        if not solution.t_events[0].size:
            raise ValueError(
                f"heads must grow along a direction; none does within {horizon:.3g} tau."
            )
        wait, state = float(solution.t_events[0][0]), solution.y_events[0][0].reshape(state.shape)
    chosen = modes_of(state)
    row = int((np.abs(state[:, 0]) / targets[chosen] ** (1 / 3)).argmax())
    return wait, state, row, int(chosen[row])


def _clock(u: np.ndarray | np.floating, log_rest: np.ndarray | np.floating) -> np.ndarray:
    """F of growth_time divided by s, given u and ln(1 - u)."""
    arc = np.arctan((2 * u + 1) / 3**0.5) / 3**0.5
    return np.asarray(-1 / u - log_rest / 3 + np.log1p(u + u**2) / 6 - arc)


def claims_not_applying(
    eigenvalues: Float[np.ndarray, " mode"], *, rank: int, n_heads: int
) -> tuple[str, ...]:
    """Sentences on claims of the theory that fail for these eigenvalues or heads.

    Args:
        rank: Rank R of a head's key and query.
    Raises:
        ValueError: If an eigenvalue is not positive, or rank or n_heads is below 1.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.2 (R H >= D); repeated eigenvalues derived here.
    Example:
        >>> claims_not_applying(np.array([0.4, 0.3]), rank=1, n_heads=1)
        ('1 head(s) of rank 1 learn at most 1 of 2 directions: training ends at the level of 1.',)
    """
    values = np.sort(require_eigenvalues(eigenvalues))[::-1]
    require_counts(rank=rank, n_heads=n_heads)
    sentences = []
    if np.any(values[:-1] - values[1:] < REPEATED * values[:-1]):
        sentences.append(
            "Eigenvalues repeat: fixed points form a continuum instead of 2^D functions, and which direction "
            "of a shared eigenspace is learned first is not determined; the levels of the loss still hold."
        )
    if n_heads * rank < len(values):
        reach = n_heads * rank
        sentences.append(
            f"{n_heads} head(s) of rank {rank} learn at most {reach} of {len(values)} directions: "
            f"training ends at the level of {reach}."
        )
    if rank > 1:
        sentences.append(
            f"Heads have rank {rank}: only levels whose number of learned directions divides by {rank} last "
            "longer in proportion to 1/init; the others are short, and the one-head equation does not hold."
        )
    return tuple(sentences)
