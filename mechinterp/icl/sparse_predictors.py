"""Closed-form and iterative learners of sparse linear regression, the baselines of the models.

Each takes prompts with one or several responses and gives predictions [batch, d_y]; learners with steps give
[step, batch, d_y], step 0 first. Learners with a tuning value take it as an argument.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import Prompts


def excess_risk(
    predictions: Float[Tensor, "*axes batch d_y"], prompts: Prompts
) -> Float[Tensor, "*axes batch"]:
    """Squared distance of each prediction from the noise-free target, mean over responses; unit y^2."""
    return (predictions - prompts.y_query_clean).square().mean(-1)


def ols(prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """Least squares; the solution of minimal norm if there are fewer pairs than coordinates.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> task = TaskConfig(noise_var=0.0)
        >>> prompts = draw_prompts(task, 8, generator=generator_for(0, "eval", 0), dtype=torch.float64)
        >>> torch.allclose(ols(prompts), prompts.y_query_clean)
        True
    """
    return ridge(prompts, penalty=0.0)


def gradient_descent(
    prompts: Prompts, *, steps: int, eta: float | None = None
) -> Float[Tensor, "step batch d_y"]:
    """Predictions of gradient descent from zero on (1/2L) sum_l (y_l - <u, x_l>)^2 after 0, 1, ..., steps steps.

    Args:
        eta: Step size, unit 1/x^2; None: 1/lambda_max(X^T X / L) of each prompt.
    Raises:
        ValueError: If steps is negative or eta not positive.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.predictors import vanilla_gd
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> prompts = draw_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> torch.allclose(gradient_descent(prompts, steps=1, eta=0.8)[1], vanilla_gd(prompts, eta=0.8))
        True
    """
    every = range(prompts.y.shape[2])
    features = prompts.x[..., None].expand(-1, -1, -1, len(every))
    query = prompts.x_query[..., None].expand(-1, -1, len(every))
    return descend(features, prompts.y, query, steps=steps, eta=eta)


def preprocess_then_optimise(
    prompts: Prompts, *, steps: int, eta: float | None = None
) -> Float[Tensor, "step batch d_y"]:
    """Gradient descent on covariates reweighted by their correlations with the response (Algorithm 1).

    r_j = (1/L) sum_l x_lj y_l,   x~ = r * x,   u <- u - eta grad (1/2L) sum_l (y_l - <u, x~_l>)^2

    Args:
        eta: Step size, unit 1/x~^2, the same for every prompt, as in a model with fixed weights; None:
            1/lambda_max(X~^T X~ / L) of each prompt.
    Raises:
        ValueError: If steps is negative or eta not positive.
    Source:
        Chen et al. 2024, arXiv 2408.04532, as described in its abstract; the exact form is our reading.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, draw_prompts
        >>> task = TaskConfig(d_x=16, sparsity=1, nonzeros="signs")
        >>> prompts = draw_prompts(task, 256, generator=generator_for(0, "eval", 0))
        >>> few = preprocess_then_optimise(prompts, steps=3)[3]
        >>> excess_risk(few, prompts).mean() < excess_risk(ols(prompts), prompts).mean()
        tensor(True)
    """
    r = _correlations(prompts)
    features = prompts.x[..., None] * r[:, None]
    return descend(features, prompts.y, prompts.x_query[..., None] * r, steps=steps, eta=eta)


def descend(
    features: Float[Tensor, "batch context feature d_y"],
    y: Float[Tensor, "batch context d_y"],
    query: Float[Tensor, "batch feature d_y"],
    *,
    steps: int,
    eta: float | None = None,
) -> Float[Tensor, "step batch d_y"]:
    """Predictions <u_t, query> of gradient descent from zero, each response on its own features.

    With more features than pairs u_t is a combination of the pairs' features, and its coefficients descend instead.

    Args:
        eta: Step size; None: 1/lambda_max of each prompt's (1/L) features^T features, or 0 if all features are 0.
    Raises:
        ValueError: If steps is negative or eta not positive.
    """
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}.")
    if eta is not None and eta <= 0:
        raise ValueError(f"eta must be > 0, got {eta}.")
    length = features.shape[1]
    columns = features.permute(0, 3, 1, 2)  # [batch, d_y, context, feature]
    at, responses = query.mT, y.mT
    if features.shape[2] <= length:
        gram = columns.mT @ columns / length
        moment = (responses[..., None, :] @ columns)[..., 0, :] / length
    else:
        # u = columns^T c: (1/L) columns columns^T has the same largest eigenvalue.
        gram, moment = columns @ columns.mT / length, responses / length
        at = (columns @ at[..., None])[..., 0]
    if eta is None:
        largest = torch.linalg.eigvalsh(gram)[..., -1:].clamp(min=0)
        rate = largest.reciprocal().nan_to_num(posinf=0)  # no step if all features are 0
    else:
        rate = torch.full_like(moment[..., :1], eta)
    u = torch.zeros_like(moment)
    predictions = [(u * at).sum(-1)]
    for _ in range(steps):
        u = u - rate * ((gram @ u[..., None])[..., 0] - moment)
        predictions.append((u * at).sum(-1))
    return torch.stack(predictions)


def _correlations(prompts: Prompts) -> Float[Tensor, "batch d_x d_y"]:
    """r = (1/L) sum_l x_l y_l."""
    return prompts.x.mT @ prompts.y / prompts.x.shape[1]
