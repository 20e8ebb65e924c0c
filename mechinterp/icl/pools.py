"""Posterior mean under a finite pool of tasks: the prediction of a model that has memorised the pool."""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

POOL_BYTES = 2**26
"""Upper bound on the residuals (prompts by tasks) that are in memory at once, in bytes."""
ROUNDING = 64
"""Tolerance for tasks that fit best without noise, in units of the prompts' rounding error."""

Pool = Float[Tensor, "task d_x d_y"]


def dmmse(prompts: Prompts, *, pool: Pool, noise_var: float) -> Float[Tensor, "batch d_y"]:
    """Posterior mean under a pool: sum_i p_i beta_i^T x_query, p_i ~ exp(-sum_l |y_l - beta_i^T x_l|^2 / (2 noise_var)).

    Computed in float64 by log-sum-exp, in parts for a large pool. Without noise the p_i are their limit: uniform over the
    tasks that fit best, up to rounding.

    Args:
        pool: Task vectors, all equally likely a priori; `task_pool` gives the pool of a task.
        noise_var: Variance of the responses' noise, unit y^2.
    Raises:
        ValueError: If noise_var is negative, or the pool is empty, not finite or has another d_x or d_y.
    Source:
        Raventos et al. 2023, arXiv 2306.15063 (discrete minimum mean squared error estimator).
    See also:
        `task_pool`, `compare_priors`.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts, task_pool
        >>> task = TaskConfig(n_tasks=1)
        >>> prompts = sample_prompts(task, 8, dtype=torch.float64)
        >>> predictions = dmmse(prompts, pool=task_pool(task), noise_var=0.1)
        >>> torch.allclose(predictions, prompts.y_query_clean)
        True
    """
    means = _posterior_means(prompts, pool, noise_var, every=False)
    query = prompts.x_query.to(torch.float64)
    return einsum(means, query, "batch d_x d_y, batch d_x -> batch d_y").to(prompts.y.dtype)


def dmmse_at_every(
    prompts: Prompts, *, pool: Pool, noise_var: float
) -> Float[Tensor, "batch n_pairs d_y"]:
    """`dmmse` for every x of a prompt, from the 0 to L pairs before it.

    Squared residuals are computed once; their cumulative sums give every posterior.

    Raises:
        ValueError: As in `dmmse`.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts, task_pool
        >>> task = TaskConfig(n_tasks=4)
        >>> prompts, pool = sample_prompts(task, 8, dtype=torch.float64), task_pool(task)
        >>> every = dmmse_at_every(prompts, pool=pool, noise_var=0.1)
        >>> torch.allclose(every[:, 7], dmmse(prompts.prefix(7), pool=pool, noise_var=0.1))
        True
    """
    means = _posterior_means(prompts, pool, noise_var, every=True)
    x = prompts.every_x.to(torch.float64)
    return einsum(means, x, "batch n d_x d_y, batch n d_x -> batch n d_y").to(prompts.y.dtype)


def _posterior_means(
    prompts: Prompts, pool: Tensor, noise_var: float, *, every: bool
) -> Float[Tensor, "batch *n_pairs d_x d_y"]:
    """Posterior means of the task vector after all pairs, or after every number of pairs."""
    pool = _checked(prompts, pool, noise_var)
    given = prompts.to(torch.float64)
    length, d_y = max(1, prompts.x.shape[1]), prompts.y.shape[2]
    size = max(1, POOL_BYTES // (8 * length * d_y * min(len(pool), 1024)))
    tolerance = ROUNDING * torch.finfo(prompts.y.dtype).eps
    means = [
        _posterior_mean(given[start : start + size], pool, noise_var, tolerance, every)
        for start in range(0, len(prompts), size)
    ]
    return torch.cat(means)


def log_posterior(prompts: Prompts, *, pool: Pool, noise_var: float) -> Float[Tensor, "batch task"]:
    """log p_i of every task of a pool, given the pairs of each prompt; in float64.

    Raises:
        ValueError: If noise_var is not positive, or the pool is empty, not finite or has another d_x or d_y.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import sample_prompts, task_pool
        >>> task = TaskConfig(n_tasks=4)
        >>> log_p = log_posterior(sample_prompts(task, 8), pool=task_pool(task), noise_var=0.1)
        >>> torch.allclose(log_p.exp().sum(1), torch.ones(8, dtype=torch.float64))
        True
    """
    pool = _checked(prompts, pool, noise_var)
    if noise_var == 0:
        raise ValueError("noise_var must be > 0 for log_posterior, got 0.")
    given = prompts.to(torch.float64)
    return torch.log_softmax(-_squares(given, pool) / (2 * noise_var), dim=1)


def require_pool(pool: Tensor, d_x: int, d_y: int) -> None:
    """Refuse a tensor that is not a pool of such tasks.

    Raises:
        ValueError: If the pool is empty, not finite or has another d_x or d_y.
    """
    if not len(pool) or tuple(pool.shape[1:]) != (d_x, d_y):
        raise ValueError(
            f"pool must be of shape [M, d_x, d_y] = [M, {d_x}, {d_y}], got {list(pool.shape)}."
        )
    if not pool.isfinite().all():
        raise ValueError("pool must be finite, got a number that is not.")


def _checked(prompts: Prompts, pool: Tensor, noise_var: float) -> Tensor:
    """The pool in float64, on the device of the prompts."""
    if noise_var < 0:
        raise ValueError(f"noise_var must be >= 0, got {noise_var}.")
    require_pool(pool, prompts.x.shape[2], prompts.y.shape[2])
    return pool.to(prompts.x.device, torch.float64)


def _squares(
    prompts: Prompts, pool: Tensor, every: bool = False
) -> Float[Tensor, "batch *n_pairs task"]:
    """sum_l |y_l - beta_i^T x_l|^2, from residuals, because the expanded square loses digits for small noise."""
    fitted = einsum(prompts.x, pool, "batch context d_x, task d_x d_y -> batch context task d_y")
    residual = (prompts.y[:, :, None] - fitted).square().sum(3)
    return _sums(residual, every)


def _sums(values: Float[Tensor, "batch context *axes"], every: bool) -> Tensor:
    """Sum over all pairs, or over the first 0 to L."""
    if not every:
        return values.sum(1)
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1).cumsum(1)


def _parts(prompts: Prompts, pool: Tensor) -> tuple[Tensor, ...]:
    """The pool in parts whose residuals fit into POOL_BYTES."""
    numbers = len(prompts) * max(1, prompts.x.shape[1]) * prompts.y.shape[2]
    return pool.split(max(1, POOL_BYTES // (8 * numbers)))


def _posterior_mean(
    prompts: Prompts, pool: Tensor, noise_var: float, tolerance: float, every: bool
) -> Float[Tensor, "batch *n_pairs d_x d_y"]:
    if noise_var == 0:
        return _best_fit(prompts, pool, tolerance, every)
    lengths = (len(prompts), *([prompts.x.shape[1] + 1] if every else []))
    largest = pool.new_full((*lengths, 1), -torch.inf)
    total, weighted = pool.new_zeros(*lengths, 1), pool.new_zeros(*lengths, pool[0].numel())
    for part in _parts(prompts, pool):
        log_weights = -_squares(prompts, part, every) / (2 * noise_var)
        new = torch.maximum(largest, log_weights.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (log_weights - new).exp()
        total = shrink * total + weights.sum(-1, keepdim=True)
        weighted = shrink * weighted + weights @ part.flatten(1)
        largest = new
    return (weighted / total).unflatten(-1, pool.shape[1:])


def _best_fit(
    prompts: Prompts, pool: Tensor, tolerance: float, every: bool
) -> Float[Tensor, "batch *n_pairs d_x d_y"]:
    """Mean of the tasks with the smallest residual, up to rounding."""
    parts = _parts(prompts, pool)
    least = torch.stack([_squares(prompts, part, every).amin(-1) for part in parts]).amin(0)
    # The rounding error of a fitted response is eps times its size, which is at most that of x times that of beta.
    x_size, y_size = (_sums(each.square().sum(2), every) for each in (prompts.x, prompts.y))
    scale = x_size * pool.square().sum((1, 2)).amax() + y_size
    bound = (least.sqrt() + tolerance * scale.sqrt())[..., None]
    total: Tensor | float = 0.0
    weighted: Tensor | float = 0.0
    for part in parts:
        fits = (_squares(prompts, part, every).sqrt() <= bound).to(pool.dtype)
        total, weighted = total + fits.sum(-1, keepdim=True), weighted + fits @ part.flatten(1)
    return (weighted / total).unflatten(-1, pool.shape[1:])  # type: ignore[union-attr]
