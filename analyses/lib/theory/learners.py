"""Learners that only the analyses use: functions from prompts to predictions [batch, d_y], unit y."""

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from sklearn.linear_model import Lasso
from torch import Tensor

from analyses.lib.theory.linear import fixed_point
from mechinterp.icl.prompts import Prompts
from mechinterp.theory.linear import modes, population_moments


def joint_debiased_gd(
    prompts: Prompts, *, theta: Float[np.ndarray, "d_y source d_x"]
) -> Float[Tensor, "batch d_y"]:
    """One step for several responses: y_hat_n = sum_mi theta_nmi g_mi x_query_i, g = (1/L) sum_l y_l (x_l - mean(x))^T.

    Args:
        theta: Weight of response m on coordinate i in prediction n; eta for n = m and 0 elsewhere is `debiased_gd`.
    Source:
        Derived here; `analyses.lib.theory.several_tasks` gives the best theta.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> from mechinterp.icl.predictors import debiased_gd
        >>> step = joint_debiased_gd(prompts, theta=np.full((1, 1, 5), 0.88))
        >>> torch.allclose(step, debiased_gd(prompts, eta=0.88), atol=1e-5)
        True
    """
    centred = prompts.x - prompts.x.mean(1, keepdim=True)
    seen = einsum(prompts.y, centred, "batch context source, batch context d_x -> batch source d_x")
    step = torch.as_tensor(theta / prompts.x.shape[1], dtype=seen.dtype, device=seen.device)
    parts = "batch source d_x, d_y source d_x, batch d_x -> batch d_y"
    return einsum(seen, step, prompts.x_query, parts)


def pcr(
    prompts: Prompts, *, components: int, covariance: Float[np.ndarray, "d_x d_x"] | None = None
) -> Float[Tensor, "batch d_y"]:
    """Principal component regression: least squares on the largest principal components of x.

    Args:
        components: Number m of components, from 0 to d_x.
        covariance: Covariance of x, whose eigenvectors are the components; None means X^T X of each
            prompt's context.
    Raises:
        ValueError: If components is not in 0 to d_x.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, section 4.4, where N is large.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> from mechinterp.icl.predictors import ridge
        >>> everything = pcr(prompts, components=5)
        >>> torch.allclose(everything, ridge(prompts, penalty=0.0), atol=1e-4)
        True
    """
    _check_components(prompts, components)
    if covariance is None:
        basis = torch.linalg.eigh(prompts.x.mT @ prompts.x).eigenvectors.flip(-1)[..., :components]
    else:
        vectors = np.linalg.eigh(covariance)[1][:, ::-1][:, :components].copy()
        basis = torch.from_numpy(vectors).to(prompts.x)
    scores = torch.linalg.pinv(prompts.x @ basis) @ prompts.y
    return einsum(basis @ scores, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


def one_step_pcr(
    prompts: Prompts, *, components: int, covariance: Float[np.ndarray, "d_x d_x"]
) -> Float[Tensor, "batch d_y"]:
    """Function that linear attention computes on its plateaus: b^T sum_{d <= m} m_d e_d e_d^T
    x_query.

    b = (1/L) sum_l y_l x_l and m_d = 1 / (lambda_d a_d), for noiseless tasks with beta ~ N(0, I). For long contexts it
    approaches `pcr` with this covariance.

    Args:
        components: Number m of components, from 0 to d_x.
        covariance: Covariance of x.
    Raises:
        ValueError: If components is not in 0 to d_x, or covariance is not symmetric and positive.
    Source:
        Zhang et al. 2025, arXiv 2501.16265, eq. (22).
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> everything = one_step_pcr(prompts, components=5, covariance=np.eye(5))
        >>> torch.allclose(everything, vanilla_gd(prompts, eta=1 / (1 + 6 / 40)))
        True
    """
    _check_components(prompts, components)
    length = prompts.x.shape[1]
    M = fixed_point(modes(population_moments(covariance, context_length=length)), range(components))
    weight = prompts.x_query @ torch.from_numpy(M).to(prompts.x).mT
    similarity = einsum(prompts.x, weight, "batch context d_x, batch d_x -> batch context")
    weighted = "batch context d_y, batch context -> batch d_y"
    return einsum(prompts.y, similarity, weighted) / length


def _check_components(prompts: Prompts, components: int) -> None:
    d_x = prompts.x.shape[2]
    if not 0 <= components <= d_x:
        raise ValueError(f"components must lie between 0 and d_x = {d_x}, got {components}.")


def lasso(prompts: Prompts, *, alpha: float) -> Float[Tensor, "batch d_y"]:
    """Lasso without intercept, by scikit-learn: minimises (1/2L) sum_l (y_l - <u, x_l>)^2 + alpha
    |u|_1.

    Args:
        alpha: Penalty; unit x y.
    Raises:
        ValueError: If alpha is not positive.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be > 0, got {alpha}.")
    x, y = (tensor.detach().cpu().double().numpy() for tensor in (prompts.x, prompts.y))
    beta = np.zeros((len(x), x.shape[2], y.shape[2]))
    learner = Lasso(alpha=alpha, fit_intercept=False, max_iter=100_000)
    for prompt, response in np.ndindex(len(x), y.shape[2]):
        beta[prompt, :, response] = learner.fit(x[prompt], y[prompt, :, response]).coef_
    task_vectors = torch.from_numpy(beta).to(prompts.x)
    return einsum(task_vectors, prompts.x_query, "batch d_x d_y, batch d_x -> batch d_y")


def nearest_neighbours(prompts: Prompts, *, count: int) -> Float[Tensor, "batch d_y"]:
    """Mean response of the `count` pairs whose x is nearest to the query, or of all pairs if there are fewer.

    Raises:
        ValueError: If count is below 1.
    Source:
        Garg et al. 2022, arXiv 2208.01066; their baseline has count = 3.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> torch.allclose(nearest_neighbours(prompts, count=40), prompts.y.mean(1))
        True
    """
    if count < 1:
        raise ValueError(f"count must be >= 1, got {count}.")
    distance = (prompts.x - prompts.x_query[:, None]).square().sum(-1)
    nearest = distance.topk(min(count, prompts.x.shape[1]), largest=False).indices
    return prompts.y.take_along_dim(nearest[..., None], dim=1).mean(1)
