"""Training of linear attention from a config, on moments and without minibatches, as in its paper.

Heads are drawn at random and follow the gradient flow or full-batch descent. The result is the weights of a layer, with
history and snapshots, as for any other model.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int

from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import covariance_matrix, task_pool
from mechinterp.memory import prompt_bytes
from mechinterp.models.constructions.one_layer import linear_attention
from mechinterp.models.weights import Weights
from mechinterp.theory.linear import Moments, modes, population_moments
from mechinterp.theory.linear_heads import (
    Heads,
    MergedHeads,
    SeparateHeads,
    merged_heads,
    separate_heads,
)
from mechinterp.training.linear.descent import (
    CHUNK,
    full_batch_descent,
    sample_moments,
    training_set,
)
from mechinterp.training.linear.flow import Flow, flatten, flow
from mechinterp.training.one_layer.step import initial_weights
from mechinterp.training.run import TrainedModel, history_of


def task_moments(task: TaskConfig) -> Moments:
    """Population moments of a task with one response, in the coordinates of its prompts.

    A pool of task vectors enters through its second moment alone.

    Raises:
        ValueError: If the task has several responses or supports.
    Example:
        >>> task_moments(TaskConfig(noise_var=0.0))
        Moments(d_x=5, yy=1)
    """
    if task.d_y != 1 or task.supports is not None:
        raise ValueError(
            f"Moments need one response on all coordinates, got d_y {task.d_y}, supports {task.supports}."
        )
    law = np.full(task.d_x, task.beta_variance)
    if task.n_tasks is not None:
        pool = task_pool(task)[..., 0].numpy()
        law = pool.T @ pool / len(pool)
    return population_moments(
        covariance_matrix(task.covariance, task.d_x),
        context_length=task.context_length,
        task_covariance=law,
        noise_var=task.noise_var,
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
        8 * flatten(initial_heads(config)).size + 4 * task.d_x**2 + 4 * layer
    )
    chunk = min(task.n_sequences or 0, CHUNK)
    return 8 * (floats + 4 * chunk * (prompt_bytes(task, width=1) + task.d_x**2))
