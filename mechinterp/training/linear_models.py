"""Models of linear attention from a config, trained on the moments of a population or of a training set.

No minibatch is drawn. A training set enters only through a few moments, so a step costs the same for any number of
sequences.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int

from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts, generator_for
from mechinterp.memory import prompt_bytes
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import (
    Heads,
    MergedHeads,
    Moments,
    SeparateHeads,
    merged_heads,
    modes,
    population_moments,
    require_counts,
    separate_heads,
)
from mechinterp.training.linear import Flow, flat_heads, flow, full_batch_descent
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.trained import TrainedModel, history_of

_CHUNK = 8192
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
