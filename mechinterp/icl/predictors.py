"""Closed-form predictors: ridge regression, dMMSE on a pool of tasks, the Kalman filter, and a
hidden noise level."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK_BYTES, chunks

POOL_BYTES = 2**26
"""Upper bound on the residuals (prompts by tasks) that are in memory at once, in bytes."""
_RANK_ROUNDING = 64
"""Tolerance for tasks that fit best without noise, in units of the prompts' rounding error."""


def zero_prediction(prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Constant prediction 0, the best prediction without a context.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> zero_prediction(prompts).any()
        tensor(False)
    """
    return torch.zeros_like(prompts.y_query)


def vanilla_gd(prompts: Prompts, *, eta: float) -> Float[Tensor, "batch d_y"]:
    """One step of gradient descent from zero: (eta/L) sum_l y_l <x_l, x_query>.

    Args:
        eta: Step size on the loss (1/2L) sum_l (y_l - <beta, x_l>)^2; unit 1/x^2.
    Source:
        He et al. 2025, arXiv 2503.12734, (D.28).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(vanilla_gd(prompts, eta=0.86).shape)
        (8, 1)
    """
    similarity = einsum(prompts.x, prompts.x_query, "batch context d_x, batch d_x -> batch context")
    return _read(prompts, similarity) * (eta / prompts.x.shape[1])


def debiased_gd(prompts: Prompts, *, eta: float) -> Float[Tensor, "batch d_y"]:
    """One gradient step on centred covariates: (eta/L) sum_l y_l <x_l - mean(x), x_query>.

    Args:
        eta: Step size; unit 1/x^2.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.11), factor 1/L.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(debiased_gd(prompts, eta=0.88).shape)
        (8, 1)
    """
    return vanilla_gd(replace(prompts, x=prompts.x - prompts.x.mean(1, keepdim=True)), eta=eta)


def ridge(prompts: Prompts, *, penalty: float) -> Float[Tensor, "batch d_y"]:
    """Ridge regression <(X X^T + penalty I)^-1 X y, x_query>.

    With penalty = noise_var / beta_var it is the Bayes predictor of a Gaussian task, for any covariance of x.

    Args:
        penalty: Number added to the diagonal of X X^T; unit x^2. With 0 it is least squares of minimal norm.
    Raises:
        ValueError: If penalty is negative.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> error = ridge(prompts, penalty=0.1 / 0.2) - prompts.y_query_clean
        >>> error.square().mean().item() < 0.1
        True
    """
    if penalty < 0:
        raise ValueError(f"penalty must be >= 0, got {penalty}.")
    if penalty == 0:
        # pinv makes about six arrays of the size of x.
        size = 6 * prompts.x[0].numel() * prompts.x.element_size()
        parts = chunks(len(prompts), max(1, CHUNK_BYTES // max(1, size)))
        beta = torch.cat([_least_norm(prompts.x[r], prompts.y[r]) for r in parts])
    else:
        gram = prompts.x.mT @ prompts.x
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        beta = torch.linalg.solve(gram + penalty * identity, prompts.x.mT @ prompts.y)
    return einsum(beta, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


def _least_norm(
    x: Float[Tensor, "batch context d_x"], y: Float[Tensor, "batch context d_y"]
) -> Float[Tensor, "batch d_x d_y"]:
    """Least squares of minimal norm: by QR where the rank is clearly full, else by singular values, which take several times as long."""
    wide = x.shape[1] < x.shape[2]
    q, r = torch.linalg.qr(x.mT if wide else x)
    with torch.no_grad():
        identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
        inverse = torch.linalg.solve_triangular(r, identity.expand_as(r), upper=True)
        condition = torch.linalg.matrix_norm(r) * torch.linalg.matrix_norm(inverse)
        full = condition < torch.finfo(x.dtype).eps ** -0.5  # False for NaN, too
    q, r, y_full = q[full], r[full], y[full]
    by_qr = (
        q @ torch.linalg.solve_triangular(r.mT, y_full, upper=False)
        if wide
        else torch.linalg.solve_triangular(r, q.mT @ y_full, upper=True)
    )
    if full.all():
        return by_qr
    beta = by_qr.new_empty(len(x), *by_qr.shape[1:])
    beta[full], beta[~full] = by_qr, torch.linalg.pinv(x[~full]) @ y[~full]
    return beta


def ridge_path(prompts: Prompts, penalties: Sequence[float]) -> Float[Tensor, "penalty batch d_y"]:
    """Predictions of `ridge` at several penalties, from one decomposition of each prompt.

    X X^T is decomposed if there are at least as many pairs as coordinates, else the Gram matrix of
    the pairs: X^T (X X^T + penalty I)^-1 y is the same vector. Computed in float64.

    Args:
        penalties: Numbers >= 0; unit x^2.
    Raises:
        ValueError: If a penalty is negative.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, dtype=torch.float64)
        >>> found = ridge_path(prompts, [0.0, 0.5])
        >>> torch.allclose(found[1], ridge(prompts, penalty=0.5), rtol=1e-10)
        True
    """
    if min(penalties) < 0:
        raise ValueError(f"penalty must be >= 0, got {min(penalties)}.")
    x, y = prompts.x.double(), prompts.y.double()
    query = prompts.x_query.double()[..., None]
    if x.shape[1] < x.shape[2]:
        values, vectors = torch.linalg.eigh(x @ x.mT)
        product = (vectors.mT @ y) * (vectors.mT @ (x @ query))
    else:
        values, vectors = torch.linalg.eigh(x.mT @ x)
        product = (vectors.mT @ (x.mT @ y)) * (vectors.mT @ query)
    paths = [
        ridge(prompts, penalty=0.0)
        if penalty == 0
        else (product / (values[..., None] + penalty)).sum(1).to(prompts.x)
        for penalty in penalties
    ]
    return torch.stack(paths)


def nadaraya_watson(
    prompts: Prompts, *, omega: float | Float[Tensor, " d_x"], mu: float | Float[Tensor, " d_y"]
) -> Float[Tensor, "batch d_y"]:
    """Kernel smoother: mu sum_l p_l y_l with p = softmax_l(<omega x_l, x_query>).

    Args:
        omega: Scale of the exponent, a number or one number per coordinate; unit 1/x^2.
        mu: Factor on the average, a number or one number per response.
    Source:
        He et al. 2025, arXiv 2503.12734, eq. (4.12).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> mean = nadaraya_watson(prompts, omega=0.0, mu=1.0)
        >>> torch.allclose(mean, prompts.y.mean(1))
        True
    """
    scores = einsum(
        prompts.x, prompts.x_query * omega, "batch context d_x, batch d_x -> batch context"
    )
    return mu * _read(prompts, torch.softmax(scores, dim=1))


def _read(prompts: Prompts, weight: Tensor) -> Tensor:
    return einsum(prompts.y, weight, "batch context d_y, batch context -> batch d_y")


def adaptive_ridge(
    prompts: Prompts, *, levels: Sequence[tuple[float, float]], beta_var: float
) -> Float[Tensor, "batch d_y"]:
    """Posterior mean for a hidden noise level: ridge regressions mixed by the evidence of their levels.

    sum_k p_k ridge(s_k / beta_var), p_k ~ weight_k N(y; 0, beta_var X X^T + s_k I), by Cholesky decompositions in
    float64. All responses of a prompt share its level. One level gives ridge regression.

    Args:
        levels: Variances s_k > 0 of the noise with their weights, such as `TaskConfig.noise_levels`; unit y^2.
        beta_var: Variance of an entry of the task vector.
    Raises:
        ValueError: If there is no level, or a variance, a weight or beta_var is not positive.
    See also:
        `ridge`, `TaskConfig.noise_var`.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(noise_var=[[0.01, 0.5], [1, 0.5]])
        >>> prompts = draw_prompts(task, 512, dtype=torch.float64)
        >>> losses = [(f - prompts.y_query_clean).square().mean() for f in (
        ...     adaptive_ridge(prompts, levels=task.noise_levels, beta_var=task.beta_variance),
        ...     ridge(prompts, penalty=task.posterior_penalty))]
        >>> bool(losses[0] < losses[1])
        True
    """
    numbers = [beta_var, *(number for level in levels for number in level)]
    if not levels or min(numbers) <= 0:
        raise ValueError(
            f"levels must be pairs of a variance and a weight above 0, and beta_var above 0, got {levels} and {beta_var}."
        )
    given = prompts.to(torch.float64)
    size = max(1, CHUNK_BYTES // (8 * len(levels) * max(1, prompts.x.shape[1]) ** 2))
    parts = [_mixed(given[rows], levels, beta_var) for rows in chunks(len(prompts), size)]
    return torch.cat(parts).to(prompts.y.dtype)


def _mixed(
    prompts: Prompts, levels: Sequence[tuple[float, float]], beta_var: float
) -> Float[Tensor, "batch d_y"]:
    x, y = prompts.x, prompts.y
    variances = x.new_tensor([variance for variance, _ in levels])[:, None, None, None]
    identity = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    root = torch.linalg.cholesky(beta_var * (x @ x.mT) + variances * identity)
    solved = torch.cholesky_solve(y.expand(len(levels), -1, -1, -1), root)
    logdet = 2 * root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    weights = x.new_tensor([weight for _, weight in levels])[:, None]
    log_p = weights.log() - ((y * solved).sum((2, 3)) + y.shape[2] * logdet) / 2
    predictions = beta_var * (prompts.x_query[:, None] @ x.mT @ solved)[..., 0, :]
    return (torch.softmax(log_p, dim=0)[..., None] * predictions).sum(0)


def kalman(prompts: Prompts, *, task: TaskConfig) -> Float[Tensor, "batch d_y"]:
    """Kalman filter, the posterior mean of a task that drifts; the query comes right after the last pair.

    The task vector has a Gaussian posterior N(m, P) after each pair, which moves to N(rho m, rho^2 P + (1 - rho^2)
    beta_var I) before the next. Without drift it is ridge regression at the task's penalty. Computed in float64.

    Args:
        task: Law of the prompts: `drift` (rho), `beta_var` and `noise_var`.
    Raises:
        ValueError: If the task vectors are not Gaussian in all coordinates (supports, a sparsity or a pool), or d_x or
            d_y is not that of the prompts.
    Source:
        Kalman 1960, A new approach to linear filtering and prediction problems.
    See also:
        `ridge`, `TaskConfig.drift`.
    Example:
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(drift=0.9)
        >>> prompts = draw_prompts(task, 512, dtype=torch.float64)
        >>> losses = [(f - prompts.y_query_clean).square().mean() for f in (
        ...     kalman(prompts, task=task), ridge(prompts, penalty=task.posterior_penalty))]
        >>> bool(losses[0] < losses[1])
        True
    """
    for name in ("supports", "sparsity", "n_tasks"):
        if getattr(task, name) is not None:
            raise ValueError(f"task.{name} must be null for kalman, got {getattr(task, name)}.")
    if not isinstance(task.noise_var, float):
        raise ValueError(f"task.noise_var must be a number for kalman, got {task.noise_var}.")
    prompts.require_sizes(d_x=task.d_x, d_y=task.d_y)
    given = prompts.to(torch.float64)
    if task.drift == 1:
        return ridge(given, penalty=task.posterior_penalty).to(prompts.y.dtype)
    prior = task.beta_variance * torch.eye(task.d_x, dtype=torch.float64, device=given.x.device)
    m = given.x.new_zeros(len(given), task.d_x, task.d_y)
    P = prior.expand(len(given), -1, -1)
    for x, y in zip(given.x.unbind(1), given.y.unbind(1), strict=True):
        Px = (P @ x[..., None])[..., 0]
        gain = Px / ((Px * x).sum(1, keepdim=True) + task.noise_var)
        m = m + gain[..., None] * (y - (x[:, None] @ m)[:, 0])[:, None]
        P = P - gain[..., None] * Px[:, None]
        m = task.drift * m
        P = task.drift**2 * P + (1 - task.drift**2) * prior
    return einsum(m, given.x_query, "batch d_x d_y, batch d_x -> batch d_y").to(prompts.y.dtype)


Pool = Float[Tensor, "task d_x d_y"]


def dmmse(prompts: Prompts, *, pool: Pool, noise_var: float) -> Float[Tensor, "batch d_y"]:
    """Posterior mean under a pool: sum_i p_i beta_i^T x_query, p_i ~ exp(-sum_l |y_l - beta_i^T x_l|^2 / (2 noise_var)).

    Computed in float64 by log-sum-exp, in parts for a large pool. Without noise the p_i are their limit: uniform over the
    tasks that fit best, up to rounding.

    Args:
        pool: Task vectors, all equally likely a priori; `TaskConfig.pool` gives the pool of a task.
        noise_var: Variance of the responses' noise, unit y^2.
    Raises:
        ValueError: If noise_var is negative, or the pool is empty, not finite or has another d_x or d_y.
    Source:
        Raventos et al. 2023, arXiv 2306.15063 (discrete minimum mean squared error estimator).
    See also:
        `TaskConfig.pool`, `compare_priors`.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(n_tasks=1)
        >>> prompts = draw_prompts(task, 8, dtype=torch.float64)
        >>> predictions = dmmse(prompts, pool=task.pool(), noise_var=0.1)
        >>> torch.allclose(predictions, prompts.y_query_clean)
        True
    """
    pool = _checked(prompts, pool, noise_var)
    given = prompts.to(torch.float64)
    length, d_y = max(1, prompts.x.shape[1]), prompts.y.shape[2]
    size = max(1, POOL_BYTES // (8 * length * d_y * min(len(pool), 1024)))
    tolerance = _RANK_ROUNDING * torch.finfo(prompts.y.dtype).eps
    means = [
        _posterior_mean(given[start : start + size], pool, noise_var, tolerance)
        for start in range(0, len(prompts), size)
    ]
    mean = torch.cat(means)
    return einsum(mean, given.x_query, "batch d_x d_y, batch d_x -> batch d_y").to(prompts.y.dtype)


def log_posterior(prompts: Prompts, *, pool: Pool, noise_var: float) -> Float[Tensor, "batch task"]:
    """log p_i of every task of a pool, given the pairs of each prompt; in float64.

    Raises:
        ValueError: If noise_var is not positive, or the pool is empty, not finite or has another d_x or d_y.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import draw_prompts
        >>> task = TaskConfig(n_tasks=4)
        >>> log_p = log_posterior(draw_prompts(task, 8), pool=task.pool(), noise_var=0.1)
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


def _squares(prompts: Prompts, pool: Tensor) -> Float[Tensor, "batch task"]:
    """sum_l |y_l - beta_i^T x_l|^2, from residuals, because the expanded square loses digits for small noise."""
    fitted = einsum(prompts.x, pool, "batch context d_x, task d_x d_y -> batch context task d_y")
    return (prompts.y[:, :, None] - fitted).square().sum(3).sum(1)


def _parts(prompts: Prompts, pool: Tensor) -> tuple[Tensor, ...]:
    """The pool in parts whose residuals fit into POOL_BYTES."""
    numbers = len(prompts) * max(1, prompts.x.shape[1]) * prompts.y.shape[2]
    return pool.split(max(1, POOL_BYTES // (8 * numbers)))


def _posterior_mean(
    prompts: Prompts, pool: Tensor, noise_var: float, tolerance: float
) -> Float[Tensor, "batch d_x d_y"]:
    """Posterior mean of the task vector after all pairs."""
    if noise_var == 0:
        return _best_fit(prompts, pool, tolerance)
    largest = pool.new_full((len(prompts), 1), -torch.inf)
    total, weighted = torch.zeros_like(largest), pool.new_zeros(len(prompts), pool[0].numel())
    for part in _parts(prompts, pool):
        log_weights = -_squares(prompts, part) / (2 * noise_var)
        new = torch.maximum(largest, log_weights.amax(-1, keepdim=True))
        shrink, weights = (largest - new).exp(), (log_weights - new).exp()
        total = shrink * total + weights.sum(-1, keepdim=True)
        weighted = shrink * weighted + weights @ part.flatten(1)
        largest = new
    return (weighted / total).unflatten(-1, pool.shape[1:])


def _best_fit(prompts: Prompts, pool: Tensor, tolerance: float) -> Float[Tensor, "batch d_x d_y"]:
    """Mean of the tasks with the smallest residual, up to rounding."""
    parts = _parts(prompts, pool)
    least = torch.stack([_squares(prompts, part).amin(-1) for part in parts]).amin(0)
    # The rounding error of a fitted response is eps times its size, which is at most that of x times that of beta.
    x_size, y_size = (each.square().sum(2).sum(1) for each in (prompts.x, prompts.y))
    scale = x_size * pool.square().sum((1, 2)).amax() + y_size
    bound = (least.sqrt() + tolerance * scale.sqrt())[..., None]
    total: Tensor | float = 0.0
    weighted: Tensor | float = 0.0
    for part in parts:
        fits = (_squares(prompts, part).sqrt() <= bound).to(pool.dtype)
        total, weighted = total + fits.sum(-1, keepdim=True), weighted + fits @ part.flatten(1)
    return (weighted / total).unflatten(-1, pool.shape[1:])  # type: ignore[union-attr]
