"""Training of linear attention on its moments: exact gradient flow, full-batch descent, minibatch descent.

The squared error depends on the prompts through a few moments only, so that a step costs the same for
any number of training sequences, and with the moments of the population there is no sampling at all.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from scipy.integrate import DOP853, LSODA

from mechinterp import figures
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.theory.linear import Modes, Moments, modes
from mechinterp.theory.linear_heads import Heads, MergedHeads, SeparateHeads

Force = Callable[[np.ndarray], np.ndarray]  # [d_x, d_x] to [d_x, d_x]: M to G
LARGEST_IMPLICIT = (
    160  # weights up to which an implicit step, with its Jacobian by differences, pays
)


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """Heads of linear attention while they train."""

    time: Float[np.ndarray, " time"]
    """Unit of tau; a step of descent at rate eta is 2 eta of it."""
    loss: Float[np.ndarray, " time"]
    """Squared error on the moments trained on, unit y^2."""
    descent: Float[np.ndarray, " time"]
    """-dL/dt of the flow, from the gradient and not from differences; unit y^2 / time."""
    heads: Heads
    """Weights, with time as the leading axis."""
    M: Float[np.ndarray, "time d_x d_x"]
    """sum_i v_i U_i or sum_i v_i K_i^T Q_i."""
    learned: Float[np.ndarray, "time mode"]
    """f_d, the part of every direction that is learned: 0 before, 1 after."""

    def __repr__(self) -> str:
        return (
            f"Flow({len(self.time)} times to {self.time[-1]:.4g}, loss {self.loss[0]:.4g} to "
            f"{self.loss[-1]:.4g}, {int((self.learned[-1] > 0.5).sum())} directions learned)"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per time and direction."""
        n_times, n_modes = self.learned.shape
        columns = {
            name: np.repeat(getattr(self, name), n_modes) for name in ("time", "loss", "descent")
        }
        columns["mode"] = np.tile(np.arange(n_modes), n_times)
        return pd.DataFrame(columns | {"learned": self.learned.ravel()})

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
            {f"direction {mode}": self.learned[:, mode] for mode in range(self.learned.shape[1])},
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
        moments: Of a population, whose directions `modes` can tell apart.
        duration: Length in the unit of tau.
        until_loss: Loss at which to stop earlier, leaving out later `times`.
        times: Times to report, rising; None stands for the solver's own steps, dense where weights move.
    Raises:
        ValueError: If duration or tau is not positive, all weights are zero, sizes differ or times do not rise
            from 0 to at most duration.
        RuntimeError: If the solver cannot go on.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (8) and (14), with the expected loss in closed form.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import separate_heads
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> run = flow(separate_heads(3, 2, std=0.1, seed=0), moments, duration=1e4)
        >>> run.loss[[0, -1]].round(4).tolist(), run.learned[-1].round(4).tolist()
        ([0.6, 0.0527], [1.0, 1.0])
    """
    _check_heads(heads, moments)
    if not (duration > 0 and tau > 0):
        raise ValueError(f"duration and tau must be > 0, got {duration} and {tau}.")
    if times is not None and not (
        times[0] >= 0 and times[-1] <= duration and np.all(np.diff(times) > 0)
    ):
        raise ValueError(f"times must rise from 0 or later to at most duration {duration}.")
    start, found = _flatten(heads), modes(moments)
    solver_class = LSODA if start.size <= LARGEST_IMPLICIT else DOP853
    velocity, force = _velocity(heads), _force(moments)
    solver = solver_class(
        lambda _, y: velocity(y, force), 0.0, start, duration / tau, rtol=1e-9, atol=1e-13
    )
    wanted = None if times is None else times / tau
    time, states = _follow(solver, _loss(heads, moments), until_loss, wanted)
    return _record(time * tau, states, heads, moments, found, tau)


def sample_moments(batches: Iterable[Prompts], *, basis: Float[np.ndarray, "d_x d_x"]) -> Moments:
    """Moments of a training set, accumulated batch by batch, in float64.

    Args:
        basis: Eigenvectors as columns, `modes(...).vectors`; the moments are in their coordinates.
    Raises:
        ValueError: If there is no prompt, or prompts have more than one response.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 3.1 (z = vec(b x_query^T)).
    Example:
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(d_x=2), 64, generator=generator_for(0, "train", 0))
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
    task: TaskConfig, n_sequences: int, *, seed: int, chunk: int = 8192
) -> Iterable[Prompts]:
    """A training set in chunks, a pure function of its size and seed.

    Raises:
        ValueError: If n_sequences or chunk is below 1.
    Example:
        >>> [len(prompts) for prompts in training_set(TaskConfig(), 10, seed=0, chunk=4)]
        [4, 4, 2]
    """
    for name, value in (("n_sequences", n_sequences), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    for index, first in enumerate(range(0, n_sequences, chunk)):
        generator = generator_for(seed, "train", index)
        yield sample_prompts(
            task, min(chunk, n_sequences - first), generator=generator, dtype=torch.float64
        )


def full_batch_descent(
    heads: Heads,
    moments: Moments,
    found: Modes,
    *,
    learning_rate: float,
    steps: int,
    every: int = 1,
) -> Flow:
    """Gradient descent on the moments of a training set; each step costs the same for any size of the set.

    Args:
        heads: Initial weights in the basis of the moments.
        found: Directions of the population, in that basis, for the learned fractions.
        every: Steps between two rows of the result; the last step is one too.
    Raises:
        ValueError: If learning_rate, steps or every is not positive, all weights are zero or sizes differ.
        FloatingPointError: If the weights diverge.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 3.1; its figures use full-batch descent.
    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import merged_heads
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> heads = merged_heads(3, 2, std=0.1, seed=0)
        >>> full_batch_descent(heads, moments, modes(moments), learning_rate=0.05, steps=4000, every=100)
        Flow(41 times to 400, loss 0.6007 to 0.05271, 2 directions learned)
    """
    force = _force(moments)
    return _descend(heads, moments, found, lambda _: force, (learning_rate, steps, every))


def minibatch_descent(
    heads: Heads,
    task: TaskConfig,
    moments: Moments,
    *,
    learning_rate: float,
    steps: int,
    batch_size: int,
    seed: int,
    every: int = 1,
) -> Flow:
    """Stochastic gradient descent on fresh prompts; loss and learned fractions are those of the population.

    Args:
        heads: Initial weights in the eigenbasis of the population.
        task: Law of the prompts, d_y = 1.
        moments: Of the population in the coordinates of the prompts.
        every: Steps between two rows of the result; the last step is one too.
    Raises:
        ValueError: If a number is not positive, all weights are zero, sizes differ or d_y is not 1.
        FloatingPointError: If the weights diverge.
    Example:
        >>> from mechinterp.config import CovarianceConfig
        >>> from mechinterp.theory.linear import population_moments
        >>> from mechinterp.theory.linear_heads import merged_heads
        >>> law = CovarianceConfig(kind="eigenvalues", eigenvalues=(0.4, 0.2))
        >>> task = TaskConfig(d_x=2, context_length=31, covariance=law, beta_var=1.0, noise_var=0.0)
        >>> moments = population_moments(np.array([0.4, 0.2]), context_length=31)
        >>> options = {"learning_rate": 0.05, "steps": 500, "batch_size": 64, "seed": 0, "every": 100}
        >>> run = minibatch_descent(merged_heads(3, 2, std=0.1, seed=0), task, moments, **options)
        >>> bool(run.loss[-1] < 0.2)
        True
    """
    found = modes(moments)
    basis, d_x = found.vectors, len(found.rates)

    def force_at(step: int) -> Force:
        prompts = sample_prompts(
            task, batch_size, generator=generator_for(seed, "train", step), dtype=torch.float64
        )
        y, z = _regressors(prompts, basis)
        return lambda M: ((y - z @ M.ravel()) @ z / len(y)).reshape(d_x, d_x)

    rotated = rotate(moments, basis)
    return _descend(heads, rotated, modes(rotated), force_at, (learning_rate, steps, every))


def rotate(moments: Moments, basis: Float[np.ndarray, "d_x d_x"]) -> Moments:
    """The same moments in the coordinates of a basis, its vectors as columns.

    Example:
        >>> from mechinterp.theory.linear import population_moments
        >>> moments = population_moments(np.array([[2.0, 1.0], [1.0, 2.0]]), context_length=31)
        >>> rotate(moments, modes(moments).vectors).yz.round(9).tolist()
        [[9.0, 0.0], [0.0, 1.0]]
    """
    zz = np.einsum("ijkl,ia,jb,kc,ld->abcd", moments.zz, *[basis] * 4, optimize=True)
    return Moments(yy=moments.yy, yz=basis.T @ moments.yz @ basis, zz=zz)


def _follow(
    solver: LSODA | DOP853,
    loss_of: Callable[[np.ndarray], float],
    until_loss: float,
    wanted: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Times and states along a solver's way, at its own steps or at the wanted times."""
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


def _descend(
    heads: Heads,
    moments: Moments,
    found: Modes,
    force_at: Callable[[int], Force],
    schedule: tuple[float, int, int],
) -> Flow:
    """Descent under forces; loss and -dL/dt on the moments."""
    learning_rate, steps, every = schedule
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}.")
    for name, value in (("steps", steps), ("every", every)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
    _check_heads(heads, moments)
    velocity, state, rate = _velocity(heads), _flatten(heads), 2 * learning_rate
    rows, states = [0], [state]
    for step in range(1, steps + 1):
        state = state + rate * velocity(state, force_at(step - 1))
        if step % every == 0 or step == steps:
            if not np.abs(state).max() < 1e6:
                raise FloatingPointError(
                    f"Weights diverged by step {step} at learning_rate {learning_rate}."
                )
            rows.append(step)
            states.append(state)
    return _record(rate * np.array(rows), np.stack(states), heads, moments, found, 1.0)


def _regressors(
    prompts: Prompts, basis: Float[np.ndarray, "d_x d_x"]
) -> tuple[Float[np.ndarray, " batch"], Float[np.ndarray, "batch feature"]]:
    """y_query and z = vec(b x_query^T), b = (1/N) sum y x."""
    if prompts.y.shape[2] != 1:
        raise ValueError(f"prompts must have one response, got d_y = {prompts.y.shape[2]}.")
    x, y, x_query, y_query = (
        getattr(prompts, name).double().cpu().numpy() for name in ("x", "y", "x_query", "y_query")
    )
    b = np.einsum("bnd,bn->bd", x, y[..., 0]) / x.shape[1] @ basis
    return y_query[:, 0], np.einsum("bi,bj->bij", b, x_query @ basis).reshape(len(b), -1)


def _force(moments: Moments) -> Force:
    yz, size = moments.yz, moments.yz.size
    zz = moments.zz.reshape(size, size)
    return lambda M: yz - (zz @ M.ravel()).reshape(yz.shape)


def _velocity(heads: Heads) -> Callable[[np.ndarray, Force], np.ndarray]:
    """tau dW/dt of flat weights under a force: `heads.velocity` without making heads."""
    n_heads = heads.v.shape[-1]
    if isinstance(heads, MergedHeads):
        d_x = heads.U.shape[-1]

        def merged(flat: np.ndarray, force: Force) -> np.ndarray:
            v, U = flat[:n_heads], flat[n_heads:].reshape(n_heads, -1)
            G = force((v @ U).reshape(d_x, d_x)).ravel()
            return np.concatenate([U @ G, np.outer(v, G).ravel()])

        return merged

    rank, d_x = heads.K.shape[-2:]
    last = n_heads + heads.K.size

    def separate(flat: np.ndarray, force: Force) -> np.ndarray:
        K, Q = flat[n_heads:].reshape(2, n_heads * rank, d_x)
        v = np.repeat(flat[:n_heads], rank)[:, None]
        scaled = v * K
        G = force(scaled.T @ Q)
        key = Q @ G.T
        out = np.empty_like(flat)
        out[:n_heads] = (K * key).reshape(n_heads, -1).sum(1)
        out[n_heads:last] = (v * key).ravel()
        out[last:] = (scaled @ G).ravel()
        return out

    return separate


def _loss(heads: Heads, moments: Moments) -> Callable[[np.ndarray], float]:
    """The loss of flat weights."""
    product, linear = _product(heads), 2 * moments.yz.ravel()
    zz = moments.zz.reshape(moments.yz.size, -1)

    def loss(flat: np.ndarray) -> float:
        M = product(flat).ravel()
        return float(moments.yy + M @ (zz @ M - linear))

    return loss


def _product(heads: Heads) -> Callable[[np.ndarray], np.ndarray]:
    """M of flat weights."""
    n_heads = heads.v.shape[-1]
    if isinstance(heads, MergedHeads):
        d_x = heads.U.shape[-1]
        return lambda flat: (flat[:n_heads] @ flat[n_heads:].reshape(n_heads, -1)).reshape(d_x, d_x)
    rank, d_x = heads.K.shape[-2:]

    def separate(flat: np.ndarray) -> np.ndarray:
        K, Q = flat[n_heads:].reshape(2, n_heads * rank, d_x)
        return (np.repeat(flat[:n_heads], rank)[:, None] * K).T @ Q

    return separate


def _check_heads(heads: Heads, moments: Moments) -> None:
    if heads.v.ndim != 1:
        raise ValueError(f"heads must have no time axis, got v of shape {heads.v.shape}.")
    if heads.M.shape != moments.yz.shape:
        raise ValueError(
            f"heads must have d_x = {len(moments.yz)} as the moments have, got {len(heads.M)}."
        )
    if not _flatten(heads).any():
        raise ValueError("heads must not be zero: zero weights never move.")


def _flatten(heads: Heads) -> np.ndarray:
    matrices = (heads.U,) if isinstance(heads, MergedHeads) else (heads.K, heads.Q)
    return np.concatenate([part.ravel() for part in (heads.v, *matrices)])


def _unflatten(heads: Heads, flat: np.ndarray) -> Heads:
    n_heads, stack = heads.v.shape[-1], flat.shape[:-1]
    v, rest = flat[..., :n_heads], flat[..., n_heads:]
    if isinstance(heads, MergedHeads):
        return MergedHeads(v=v, U=rest.reshape(*stack, *heads.U.shape))
    K, Q = np.split(rest, 2, axis=-1)
    return SeparateHeads(
        v=v, K=K.reshape(*stack, *heads.K.shape), Q=Q.reshape(*stack, *heads.K.shape)
    )


def _record(
    time: np.ndarray, states: np.ndarray, heads: Heads, moments: Moments, found: Modes, tau: float
) -> Flow:
    path = _unflatten(heads, states)
    M = path.M
    # Along the flow dL/dt = <dL/dW, dW/dt> = -(2 / tau) |tau dW/dt|^2.
    velocity = _flatten_path(path.velocity(moments.gradient(M)))
    return Flow(
        time=time,
        loss=moments.loss(M),
        descent=2 / tau * np.square(velocity).sum(1),
        heads=path,
        M=M,
        learned=found.learned(M),
    )


def _flatten_path(path: Heads) -> np.ndarray:
    matrices = (path.U,) if isinstance(path, MergedHeads) else (path.K, path.Q)
    n_times = len(path.v)
    return np.concatenate([part.reshape(n_times, -1) for part in (path.v, *matrices)], axis=1)
