"""Learners beside a model in its response: the Bayes learner of the task, ridge regression, and descent."""

import math
from functools import lru_cache, partial
from itertools import combinations, product

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.response.projection import PromptArrays
from mechinterp.config import TaskConfig
from mechinterp.icl.predictors import adaptive_ridge, dmmse, kalman, ridge
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner

MOST_VECTORS = 40_000
"""Largest number of task vectors of a sparse task whose exact posterior mean is computed."""
POSTERIOR_CHUNK = 32
"""Number of prompts whose posterior over the sparse vectors is in memory at once; for 30,000 vectors they fit into the cache."""


def bayes_of(task: TaskConfig) -> Learner | None:
    """Posterior mean of a task: Gaussian (fixed, drifting, or of several noise levels), with a pool, or sparse with signs; None for any other task.

    Example:
        >>> bayes_of(TaskConfig(d_x=40, sparsity=4)) is None
        True
    """
    if task.n_tasks is not None:
        return partial(dmmse, pool=task.pool(), noise_var=task.noise_variance)
    if task.drift != 1:
        return partial(kalman, task=task)
    if task.supports is not None:
        return None
    several = len(task.noise_levels) > 1
    if task.sparsity is None and several:
        return partial(adaptive_ridge, levels=task.noise_levels, beta_var=task.beta_variance)
    if task.sparsity is None:
        return partial(_exact_ridge, penalty=task.posterior_penalty)
    n_vectors = math.comb(task.d_x, task.sparsity) * 2**task.sparsity
    signs = task.nonzeros == "signs" and task.d_y == 1 and task.noise_variance > 0
    signs = signs and not several
    return partial(sparse_posterior, task=task) if signs and n_vectors <= MOST_VECTORS else None


def _exact_ridge(prompts: Prompts, *, penalty: float) -> Float[Tensor, "batch d_y"]:
    return ridge(prompts.to(torch.float64), penalty=penalty)


def sparse_posterior(prompts: Prompts, *, task: TaskConfig) -> Float[Tensor, "batch 1"]:
    """Posterior mean over all vectors with `sparsity` entries of +-sqrt(beta_var) and zeros elsewhere.

    The residual of a vector b is |y|^2 - 2 b . X^T y + b^T X^T X b, so that all vectors share the
    second moments of a prompt, and b and -b the last term. `dmmse` on the same vectors gives the same
    numbers and takes many times as long.
    """
    size = task.beta_variance**0.5
    vectors, products = sign_vectors(task.d_x, task.sparsity), _products(task.d_x, task.sparsity)
    half = size * vectors[len(vectors) // 2 :]
    rows, columns = torch.triu_indices(task.d_x, task.d_x)
    parts = []
    for start in range(0, len(prompts), POSTERIOR_CHUNK):
        part = prompts[start : start + POSTERIOR_CHUNK].to(torch.float64)
        moment = (part.x.mT @ part.y)[..., 0]
        square = (part.x.mT @ part.x)[:, rows, columns]
        along = moment @ half.mT / task.noise_variance
        across = square @ products.mT * (size**2 / (2 * task.noise_variance))
        minus, plus = torch.cat([-along - across, along - across], 1).softmax(1).chunk(2, dim=1)
        parts.append((((plus - minus) @ half) * part.x_query).sum(1, keepdim=True))
    return torch.cat(parts)


@lru_cache(maxsize=2)
def _products(d_x: int, sparsity: int) -> Float[Tensor, "half pair"]:
    """Products of two entries of the second half of the sign vectors, [i, j] for i <= j; those of i < j twice."""
    vectors = sign_vectors(d_x, sparsity)
    half = vectors[len(vectors) // 2 :]
    rows, columns = torch.triu_indices(d_x, d_x)
    return half[:, rows] * half[:, columns] * (1 + (rows < columns).double())


@lru_cache(maxsize=4)
def sign_vectors(d_x: int, sparsity: int) -> Float[Tensor, "vector d_x"]:
    """All vectors with `sparsity` entries of 1 or -1 and zeros elsewhere, in float64; the first half is minus the second.

    Example:
        >>> sign_vectors(3, 2).shape
        torch.Size([12, 3])
    """
    every = list(product((-1.0, 1.0), repeat=sparsity))
    signs = torch.tensor(every[len(every) // 2 :], dtype=torch.float64)
    empty = torch.zeros(len(signs), d_x, dtype=torch.float64)
    places = combinations(range(d_x), sparsity)
    half = torch.cat([empty.index_copy(1, torch.tensor(at), signs) for at in places])
    return torch.cat([-half, half])


def _is_ridge(law: TaskConfig) -> bool:
    """True if ridge regression is the Bayes learner of the task."""
    gaussian = law.n_tasks is None and law.sparsity is None and law.supports is None
    return gaussian and law.drift == 1 and len(law.noise_levels) == 1


def learners_beside(
    sample: PromptArrays, knots: Float[np.ndarray, " knot"], law: TaskConfig | None, n_steps: int
) -> pd.DataFrame:
    """Filters at the knots of ridge regression at the task's penalty, unless it is the Bayes learner itself, and of the best
    descent of n steps.

    The descent is the polynomial of degree n - 1 in s that is nearest to the target <q, beta>.
    """
    rows = []
    if law is not None and not _is_ridge(law) and np.isfinite(law.posterior_penalty):
        c = law.posterior_penalty / sample.x.shape[1]
        rows.append(("ridge", 1 / (knots + c) if c else 1 / np.maximum(knots, 1e-12)))
    s = sample.modes.s
    largest = s.max()
    powers = np.arange(n_steps)
    target = np.square(sample.modes.query)  # E f_target along each mode, given x
    basis = (s / largest)[..., None] ** powers
    metric = sample.beta_var * s**2 + sample.noise_var * s / sample.x.shape[1]
    weight = target[..., None] * basis
    gram = np.einsum("nkb,nk,nkc->bc", weight, metric, basis, optimize=True)
    inner = np.einsum("nkb,nk->b", weight, sample.beta_var * s)
    steps = np.linalg.lstsq(gram, inner, rcond=None)[0]
    name = f"{n_steps} step{'s' if n_steps > 1 else ''} of descent"
    rows.append((name, (knots / largest)[:, None] ** powers @ steps))
    return pd.concat(
        [pd.DataFrame({"learner": name, "s": knots, "phi": phi}) for name, phi in rows],
        ignore_index=True,
    )
