"""Gradient descent of linear attention on a training set, through its moments.

The training set enters only through a few moments, so a step costs the same for any number of sequences.
"""

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float, Int

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.theory.linear import Modes, Moments, require_counts
from mechinterp.theory.linear_heads import Heads
from mechinterp.training.linear.flow import Flow, check_heads, flatten, record, velocity_of

CHUNK = 8192
"""Number of training sequences that are drawn at once."""


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
    task: TaskConfig, n_sequences: int, *, seed: int, chunk: int = CHUNK
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
        yield sample_prompts(
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
        >>> from mechinterp.theory.linear_heads import merged_heads
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
    state, rate = flatten(heads), 2 * learning_rate
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
