"""Exact gradient flow and full-batch gradient descent of linear attention on the moments of its prompts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.display import Result
from mechinterp.theory.linear import (
    Heads,
    MergedHeads,
    Modes,
    Moments,
    SeparateHeads,
    merged_motion,
    modes,
    require_counts,
    separate_motion,
)

if TYPE_CHECKING:
    from scipy.integrate import OdeSolver

LARGEST_IMPLICIT = 160
"""Up to this many weights the solver LSODA is used, which can take implicit steps; above it DOP853."""


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
    if not flat_heads(heads).any():
        raise ValueError("heads must not be zero: zero weights never move.")


def flat_heads(heads: Heads) -> Float[np.ndarray, "*stack weight"]:
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
        v = flat[:n_heads].repeat(rank)[:, None]
        read, K, Q = separate_motion(v, K, Q, moments.gradient)
        return np.concatenate([read.reshape(n_heads, rank).sum(1), K.ravel(), Q.ravel()])

    return separate


@dataclass(frozen=True, eq=False, repr=False)
class Flow(Result):
    """Training of linear attention: loss, heads and learned fractions over time."""

    time: Float[np.ndarray, " time"]
    """Time in units of tau; a step of gradient descent at rate eta takes 2 eta."""
    loss: Float[np.ndarray, " time"]
    """Squared error on the training moments, unit y^2."""
    descent: Float[np.ndarray, " time"]
    """-dL/dt of the flow, from the gradient (not from differences of the loss); unit y^2 / time."""
    heads: Heads
    """Weights, with time as the leading axis."""
    M: Float[np.ndarray, "time d_x d_x"]
    """Effective matrix: sum_i v_i U_i for merged heads, sum_i v_i K_i^T Q_i for separate heads."""
    learned: Float[np.ndarray, "time mode"]
    """Learned fraction f_d of every direction: 0 before it is learned, 1 after."""

    def __repr__(self) -> str:
        return (
            f"Flow({len(self.time)} times to {self.time[-1]:.4g}, loss {self.loss[0]:.4g} to "
            f"{self.loss[-1]:.4g}, {int((self.learned[-1] > 0.5).sum())} directions learned)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per time and direction."""
        row, mode = (axis.ravel() for axis in np.indices(self.learned.shape))
        columns = {name: getattr(self, name)[row] for name in ("time", "loss", "descent")}
        return pd.DataFrame(columns | {"mode": mode, "learned": self.learned.ravel()})

    def plot(self) -> go.Figure:
        """Loss over time."""
        return figures.lines(
            self.time,
            {"loss": self.loss},
            title="Loss of linear attention during training",
            x_title="time (tau)",
            y_title="loss (y²)",
        )

    def plot_learned(self) -> go.Figure:
        """Learned fraction of every direction over time."""
        return figures.lines(
            self.time,
            {f"direction {mode}": course for mode, course in enumerate(self.learned.T)},
            title="Part of each direction that is learned",
            x_title="time (tau)",
            y_title="learned fraction",
            zero_line=True,
        )


def flow(
    heads: Heads,
    moments: Moments,
    *,
    duration: float,
    tau: float = 1.0,
    until_loss: float = -math.inf,
    times: Float[np.ndarray, " time"] | None = None,
) -> Flow:
    """Gradient flow tau dW/dt = -(1/2) dL/dW on the loss of a population.

    Args:
        heads: Initial weights, without a time axis.
        moments: Population moments whose directions `modes` can separate.
        duration: Total time, in the unit of tau.
        until_loss: Loss at which to stop early; later `times` are then missing.
        times: Times to report, increasing; None: the solver's own steps, which are dense where weights change fast.
    Raises:
        ValueError: If duration or tau is not positive, all weights are zero, sizes differ, or times do not increase
            within [0, duration].
        RuntimeError: If the solver fails.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (8) and (14), with the expected loss in closed form.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear import separate_heads
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(separate_heads(3, 2, std=0.1, seed=0), moments, duration=1e4)
        >>> run.loss[[0, -1]].round(4).tolist(), run.learned[-1].round(4).tolist()
        ([0.6, 0.0527], [1.0, 1.0])
    """
    check_heads(heads, moments)
    if not (duration > 0 and tau > 0):
        raise ValueError(f"duration and tau must be > 0, got {duration} and {tau}.")
    if times is not None and not (
        times[0] >= 0 and times[-1] <= duration and np.all(np.diff(times) > 0)
    ):
        raise ValueError(f"times must rise from 0 or later to at most duration {duration}.")
    from scipy.integrate import DOP853, LSODA  # slow to import

    start, directions, velocity = flat_heads(heads), modes(moments), velocity_of(heads, moments)
    kind = LSODA if start.size <= LARGEST_IMPLICIT else DOP853
    solver = kind(lambda _, y: velocity(y), 0.0, start, duration / tau, rtol=1e-9, atol=1e-13)
    wanted = None if times is None else times / tau

    def loss_of(flat: np.ndarray) -> float:
        return float(moments.loss(unflatten(heads, flat).M))

    time, states = _follow(solver, loss_of, until_loss, wanted)
    return record(time * tau, states, heads, moments, directions, tau)


def record(
    time: np.ndarray,
    states: np.ndarray,
    heads: Heads,
    moments: Moments,
    directions: Modes,
    tau: float,
) -> Flow:
    """Flow from the flat weights at given times, with -dL/dt and the learned fractions."""
    path = unflatten(heads, states)
    M = path.M
    velocity = flat_heads(path.velocity(moments.gradient(M)))
    return Flow(
        time=time,
        loss=moments.loss(M),
        # Along the flow dL/dt = <dL/dW, dW/dt> = -(2 / tau) |tau dW/dt|^2.
        descent=2 / tau * np.square(velocity).sum(1),
        heads=path,
        M=M,
        learned=directions.learned(M),
    )


def _follow(
    solver: "OdeSolver",
    loss_of: Callable[[np.ndarray], float],
    until_loss: float,
    wanted: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Times and states of a solver, at its own steps or at the wanted times."""
    time, states = [np.zeros(1)], [solver.y[None].copy()]
    if wanted is not None and wanted[0] > 0:
        time, states = [], []
    while solver.status == "running":
        message = solver.step()
        loss = loss_of(solver.y)
        if solver.status == "failed" or not math.isfinite(loss):
            reason = message or "the weights overflow."
            raise RuntimeError(
                f"The flow cannot be followed past time {solver.t:.6g} tau: {reason}"
            )
        if wanted is None:
            time.append(np.array([solver.t]))
            states.append(solver.y[None].copy())
        else:
            inside = wanted[(wanted > solver.t_old) & (wanted <= solver.t)]
            if inside.size:
                time.append(inside)
                states.append(solver.dense_output()(inside).T)
        if loss <= until_loss:
            break
    return np.concatenate(time), np.concatenate(states)


def full_batch_descent(
    heads: Heads,
    moments: Moments,
    directions: Modes,
    *,
    learning_rate: float,
    steps: int,
    every: int = 1,
    at: Int[np.ndarray, " row"] | None = None,
) -> Flow:
    """Gradient descent on the moments of a training set; the cost of a step does not depend on the set's size.

    Args:
        heads: Initial weights in the basis of the moments.
        directions: Directions of the population in that basis, for the learned fractions.
        every: Number of steps between two rows of the result; the last step always has a row.
        at: Steps that have a row, increasing; replaces `every`.
    Raises:
        ValueError: If learning_rate, steps or every is not positive, all weights are zero, sizes differ, or `at`
            does not increase to `steps`.
        FloatingPointError: If the weights diverge.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 3.1; its figures use full-batch descent.
    Example:
        >>> from mechinterp.theory.linear import modes, population_moments
        >>> from mechinterp.theory.linear import merged_heads
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> heads = merged_heads(3, 2, std=0.1, seed=0)
        >>> full_batch_descent(heads, moments, modes(moments), learning_rate=0.05, steps=4000, every=100)
        Flow(41 times to 400, loss 0.6007 to 0.05271, 2 directions learned)
    """
    require_counts(steps=steps, every=every)
    rows = np.array([*range(0, steps, every), steps]) if at is None else at
    if rows[0] < 0 or rows[-1] != steps or np.any(np.diff(rows) <= 0):
        raise ValueError(f"at must rise from 0 or later to steps = {steps}, got {rows.tolist()}.")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}.")
    check_heads(heads, moments)
    states = _states(heads, moments, learning_rate, rows)
    return record(2 * learning_rate * rows, states, heads, moments, directions, 1.0)


def _states(
    heads: Heads, moments: Moments, learning_rate: float, rows: Int[np.ndarray, " row"]
) -> Float[np.ndarray, "row weight"]:
    """Flat weights at the given steps of gradient descent on the moments."""
    velocity = velocity_of(heads, moments)
    state, rate = flat_heads(heads), 2 * learning_rate
    states = []
    for n_steps, row in zip(np.diff(rows, prepend=0).tolist(), rows.tolist(), strict=True):
        # Overflow within these steps is noticed after them.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for _ in range(n_steps):
                state = state + rate * velocity(state)
        if not np.abs(state).max() < 1e6:
            raise FloatingPointError(
                f"Weights diverged by step {row} at learning_rate {learning_rate}."
            )
        states.append(state)
    return np.stack(states)
