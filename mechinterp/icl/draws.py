"""Covariates, task vectors and responses of a task, made of random numbers."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.config.vectors import task_vectors


@dataclass(frozen=True, eq=False)
class Data:
    """Data of a batch of prompts; the query is the last pair."""

    x: Float[Tensor, "batch n_pairs d_x"]
    y: Float[Tensor, "batch n_pairs d_y"]
    clean: Float[Tensor, "batch n_pairs d_y"]
    """Responses without noise."""
    beta: Float[Tensor, "batch d_x d_y"] | None
    """Task vectors; None if they drift."""
    drifting: Float[Tensor, "batch n_pairs d_x d_y"] | None
    """Task vectors of each pair, if they drift."""


def number_sizes(task: TaskConfig, context_length: int) -> tuple[int, int, int]:
    """How many standard normal numbers a prompt takes for its covariates, its noise and its task vectors."""
    n_tokens, n_vectors = context_length + 1, 1 if task.shared_beta else task.d_y
    return n_tokens * task.d_x, n_tokens * task.d_y, task.d_x * n_vectors


def data_of(
    task: TaskConfig,
    normal: Float[Tensor, " number"],
    context_length: int,
    generator: torch.Generator,
    *,
    root: Float[np.ndarray, "d_x d_x"] | None,
    new_tasks: bool,
) -> Data:
    """Data made of standard normal numbers: covariates of all prompts, then noise, then task vectors.

    Args:
        generator: Random generator of what is drawn after these numbers: places in a pool, supports, levels of noise, drift.
        root: Cholesky factor of the covariance of the covariates; None: the identity.
    """
    sizes, n_tokens = number_sizes(task, context_length), context_length + 1
    n_prompts = len(normal) // sum(sizes)
    x_draw, noise_draw, beta_draw = normal.split([n_prompts * size for size in sizes])
    x_all = x_draw.view(n_prompts, n_tokens, task.d_x)
    if root is not None:
        x_all = x_all @ torch.as_tensor(root.T, dtype=normal.dtype, device=normal.device)
    if task.n_tasks is None or new_tasks:
        beta = task_vectors(task, beta_draw.view(n_prompts, task.d_x, -1), generator)
    else:
        # Drawn last: covariates and noise equal those with fresh task vectors.
        shape, device = (n_prompts,), normal.device
        rows = torch.randint(task.n_tasks, shape, generator=generator, device=device)
        beta = task.pool().to(normal)[rows]
    noise = noise_draw.view(n_prompts, n_tokens, task.d_y) * _noise_size(
        task, n_prompts, normal, generator
    )
    drifting = None
    if task.drift == 1:
        clean = x_all @ beta
    else:
        drifting = _drifting_vectors(task, beta, n_tokens, generator)
        clean = responses_of(x_all, drifting)
    return Data(x_all, clean + noise, clean, beta if drifting is None else None, drifting)


def responses_of(
    x: Float[Tensor, "batch n_pairs d_x"], beta: Float[Tensor, "batch n_pairs d_x d_y"]
) -> Float[Tensor, "batch n_pairs d_y"]:
    """Responses of task vectors that differ between pairs."""
    return (x[..., None, :] @ beta)[..., 0, :]


def _noise_size(
    task: TaskConfig, n_prompts: int, like: Tensor, generator: torch.Generator
) -> float | Float[Tensor, "batch 1 1"]:
    """Standard deviation of the noise, one for each prompt if there are several levels."""
    if isinstance(task.noise_var, float):
        return task.noise_var**0.5
    # Drawn last: covariates and task vectors equal those of a task with one noise level.
    place = torch.rand(n_prompts, generator=generator, device=like.device, dtype=torch.float64)
    variances = torch.tensor([v for v, _ in task.noise_var], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in task.noise_var], dtype=torch.float64)
    rows = torch.bucketize(place, weights.cumsum(0)[:-1].to(like.device), right=True)
    return variances.sqrt().to(like)[rows][:, None, None]


def _drifting_vectors(
    task: TaskConfig,
    first: Float[Tensor, "batch d_x d_y"],
    n_pairs: int,
    generator: torch.Generator,
) -> Float[Tensor, "batch n_pairs d_x d_y"]:
    """Task vectors of each pair: w_l = rho w_{l-1} + sqrt(1 - rho^2) xi_l, with xi_l of the law of the first."""
    # Drawn last: covariates, noise and first task vector equal those of the task without drift.
    fresh = torch.empty((n_pairs - 1, *first.shape), device=first.device, dtype=first.dtype)
    fresh.normal_(generator=generator)
    scale = (task.beta_variance * (1 - task.drift**2)) ** 0.5
    vectors = [first]
    for change in fresh:
        vectors.append(task.drift * vectors[-1] + scale * change)
    return torch.stack(vectors, dim=1)
