"""Training of linear attention on the moments of its prompts: exact gradient flow, gradient descent on a training set,
and runs from a config.

No minibatch is drawn. A training set enters only through a few moments, so a step costs the same for any number of
sequences.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int

from mechinterp import figures
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.display import Result
from mechinterp.icl.prompts import (
    Prompts,
    covariance_matrix,
    draw_prompts,
    generator_for,
)
from mechinterp.memory import prompt_bytes
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import (
    Heads,
    MergedHeads,
    Modes,
    Moments,
    SeparateHeads,
    merged_heads,
    merged_motion,
    modes,
    population_moments,
    require_counts,
    separate_heads,
    separate_motion,
)
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.run import TrainedModel, history_of

if TYPE_CHECKING:
    from scipy.integrate import OdeSolver

LARGEST_IMPLICIT = 160
"""Up to this many weights the solver LSODA is used, which can take implicit steps; above it DOP853."""
_CHUNK = 8192
"""Number of training sequences that are drawn at once."""


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


def sample_moments(batches: Iterable[Prompts], *, basis: Float[np.ndarray, "d_x d_x"]) -> Moments:
    """Moments of a training set, accumulated batch by batch, in float64.

    Args:
        basis: Eigenvectors as columns, `modes(...).vectors`; the moments are in their coordinates.
    Raises:
        ValueError: If there is no prompt, or prompts have more than one response.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 3.1 (z = vec(b x_query^T)).
    Example:
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(d_x=2), 64, generator=generator_for(0, "train", 0))
        >>> sample_moments([prompts[:40], prompts[40:]], basis=np.eye(2))
        Moments(d_x=2, yy=0.9606)
    """
    count, yy, yz, zz = 0, 0.0, 0.0, 0.0
    for prompts in batches:
        y, z = _regressors(prompts, basis)
        count, yy, yz, zz = count + len(y), yy + y @ y, yz + y @ z, zz + z.T @ z
    if count == 0:
        raise ValueError("batches must hold at least one prompt, got none.")
    d_x = len(basis)
    return Moments(
        yy=float(yy / count),
        yz=np.reshape(yz / count, (d_x, d_x)),
        zz=np.reshape(zz / count, (d_x, d_x, d_x, d_x)),
    )


def training_set(
    task: TaskConfig, n_sequences: int, *, seed: int, chunk: int = _CHUNK
) -> Iterable[Prompts]:
    """Training set in chunks, a function of its size and seed alone.

    Raises:
        ValueError: If n_sequences or chunk is below 1.
    Example:
        >>> [len(prompts) for prompts in training_set(TaskConfig(), 10, seed=0, chunk=4)]
        [4, 4, 2]
    """
    require_counts(n_sequences=n_sequences, chunk=chunk)
    for index, first in enumerate(range(0, n_sequences, chunk)):
        generator = generator_for(seed, "train", index)
        yield draw_prompts(
            task, min(chunk, n_sequences - first), generator=generator, dtype=torch.float64
        )


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


def _regressors(
    prompts: Prompts, basis: Float[np.ndarray, "d_x d_x"]
) -> tuple[Float[np.ndarray, " batch"], Float[np.ndarray, "batch feature"]]:
    """y_query and z = vec(b x_query^T), with b = (1/N) sum y x."""
    if prompts.y.shape[2] != 1:
        raise ValueError(f"prompts must have one response, got d_y = {prompts.y.shape[2]}.")
    x, y, x_query, y_query = (
        getattr(prompts, name).double().cpu().numpy() for name in ("x", "y", "x_query", "y_query")
    )
    b = np.einsum("bnd,bn->bd", x, y[..., 0]) / x.shape[1] @ basis
    return y_query[:, 0], np.einsum("bi,bj->bij", b, x_query @ basis).reshape(len(b), -1)


def task_moments(task: TaskConfig) -> Moments:
    """Population moments of a task with one response, in the coordinates of its prompts.

    A pool of task vectors enters through its second moment alone.

    Raises:
        ValueError: If the task has several responses or supports, or drifts.
    Example:
        >>> task_moments(TaskConfig(noise_var=0.0))
        Moments(d_x=5, yy=1)
    """
    if task.d_y != 1 or task.supports is not None:
        raise ValueError(
            f"Moments need one response on all coordinates, got d_y {task.d_y}, supports {task.supports}."
        )
    if task.drift != 1:
        raise ValueError(
            f"Moments need one task vector for all pairs, got task.drift {task.drift:.4g}."
        )
    law = np.full(task.d_x, task.beta_variance)
    if task.n_tasks is not None:
        pool = task.pool()[..., 0].numpy()
        law = pool.T @ pool / len(pool)
    return population_moments(
        covariance_matrix(task.covariance, task.d_x),
        context_length=task.context_length,
        task_covariance=law,
        noise_var=task.noise_variance,
    )


def initial_heads(config: ExperimentConfig) -> Heads:
    """Initial v, K and Q (or U) of a config's heads, a function of the config alone: entries from N(0, init_std^2).

    If init_std is null, they are computed from PyTorch's default initial weights.

    Raises:
        ValueError: If the config is not linear attention trained on moments.
    Example:
        >>> from mechinterp.presets import preset
        >>> initial_heads(preset("linear-separate"))
        SeparateHeads(n_heads=5, rank=1, d_x=4)
    """
    model, d_x = config.model, config.task.d_x
    if config.train.optimizer == "adam":
        raise ValueError(
            "train.optimizer must be gradient_descent or gradient_flow for heads of linear attention, got 'adam'."
        )
    std = config.train.init_std
    if std is None:
        return _default_heads(config)
    if model.merged_qk:
        return merged_heads(model.n_heads, d_x, std=std, seed=config.seed)
    return separate_heads(model.n_heads, d_x, std=std, seed=config.seed, rank=config.d_head)


def train_linear(config: ExperimentConfig) -> TrainedModel:
    """Model of linear attention, trained by gradient flow or full-batch descent; weights in float32.

    In its history `loss` is the loss on the training set (or population) at that step, and `eval_loss` the loss on the
    population; both are exact.

    Raises:
        ValueError: If the config is not linear attention trained on moments.
        FloatingPointError: If the weights diverge.
        RuntimeError: If the solver of the flow fails.
    Example:
        >>> from mechinterp.config import override
        >>> from mechinterp.presets import preset
        >>> trained = train_linear(override(preset("linear-merged"), "train.steps=1000"))
        >>> trained.step, list(trained.snapshots)
        (1000, [0, 500, 1000])
    """
    train, heads = config.train, initial_heads(config)
    kept = {0, train.steps, *range(0, train.steps, train.log_every)}
    steps = np.array(sorted(kept | set(train.snapshot_steps)))
    run = _run(config, heads, steps)
    snapshots = {
        int(step): _weights(config, run.heads, row)
        for row, step in enumerate(steps)
        if int(step) in train.snapshot_steps
    }
    last = _weights(config, run.heads, len(steps) - 1)
    logged = np.flatnonzero(np.isin(steps, sorted(kept)))
    history = _history(config, run, steps, logged)
    return TrainedModel(config, last, train.steps, history, snapshots)


def _weights(config: ExperimentConfig, path: Heads, row: int) -> Weights:
    """Weights at one row of a path, in float32."""
    layer = linear_attention(_at(path, row), score_slope=config.model.score_slope)
    return replace(layer.to(torch.float32), model=config.model)


def _default_heads(config: ExperimentConfig) -> Heads:
    weights, d_x = initial_weights(config).to(torch.float64), config.task.d_x
    v, slope = weights.mu[:, 0].numpy(), weights.scale * weights.model.score_slope
    queries, keys = (W[0, :, :d_x].mT.numpy() for W in (slope * weights.W_Q, weights.W_K))
    if config.model.merged_qk:
        return MergedHeads(v=v, U=np.einsum("hri,hrj->hij", keys, queries))
    return SeparateHeads(v=v, K=keys, Q=queries)


def _run(config: ExperimentConfig, heads: Heads, steps: Int[np.ndarray, " row"]) -> Flow:
    train, population = config.train, task_moments(config.task)
    if train.optimizer == "gradient_flow":
        # A step of gradient descent at rate eta takes a time of 2 eta tau.
        time = 2 * train.learning_rate * steps
        return flow(heads, population, duration=float(time[-1]), times=time)
    moments, n_sequences = population, config.task.n_sequences
    if n_sequences is not None:
        chunks = training_set(config.task, n_sequences, seed=train.data_seed)
        moments = sample_moments(chunks, basis=np.eye(config.task.d_x))
    directions, rate = modes(population), train.learning_rate
    return full_batch_descent(
        heads, moments, directions, learning_rate=rate, steps=train.steps, at=steps
    )


def _at(path: Heads, rows: int | np.ndarray) -> Heads:
    return type(path)(**{name: part[rows] for name, part in vars(path).items()})


def _history(
    config: ExperimentConfig, run: Flow, steps: np.ndarray, rows: np.ndarray
) -> pd.DataFrame:
    """One row per logged step and head."""
    weights = linear_attention(_at(run.heads, rows), score_slope=config.model.score_slope)
    measured = {"omega": weights.omega.mean(1), "mu": weights.mu.mean(1)}
    measured |= {name: getattr(weights, name) for name in ("qk_diagonal", "ov_last_entry")}
    losses = {"loss": run.loss[rows], "eval_loss": task_moments(config.task).loss(run.M[rows])}
    return history_of(
        torch.from_numpy(steps[rows]),
        {name: torch.from_numpy(values) for name, values in losses.items()},
        {name: values.float().view(len(rows), -1) for name, values in measured.items()},
    )


def moments_bytes(config: ExperimentConfig) -> int:
    """Upper bound on the memory that training on moments adds to a process, in bytes.

    Example:
        >>> from mechinterp.presets import preset
        >>> f"{moments_bytes(preset('linear-separate')) / 2**20:.1f} MiB"
        '5.6 MiB'
    """
    task, train = config.task, config.train
    n_rows = 2 + train.steps // train.log_every + len(train.snapshot_steps)
    # Fourth moments and arrays derived from them; per row weights, velocity and M, and the layer's weights.
    layer = config.model.n_heads * config.d_model * (4 * config.d_model)
    floats = 8 * task.d_x**4 + n_rows * (
        8 * flat_heads(initial_heads(config)).size + 4 * task.d_x**2 + 4 * layer
    )
    chunk = min(task.n_sequences or 0, _CHUNK)
    return 8 * (floats + 4 * chunk * (prompt_bytes(task, width=1) + task.d_x**2))
