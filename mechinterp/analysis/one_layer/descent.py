"""Directions in which the step of a layer of attention descends.

The prediction x_query^T G b of a step with matrix G, b = Sigma beta for long prompts, moves w from 0 along G Sigma beta. The
negative gradient of the risk at w = 0 is Sigma beta. The step descends for every task vector if beta^T Sigma G Sigma beta
is positive for all beta, relative to beta^T Sigma beta: if the symmetric part of G has positive eigenvalues in coordinates
in which x has the identity as its covariance.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import covariance_matrix

DESCENDS = 0.05
"""Smallest `descent` of a step that descends in every direction. A step with a `descent` below -0.05 ascends in some
direction; between both limits it leaves directions out."""
LEAST_VARIANCE = 1e-9
"""Directions of x with a variance below this fraction of the largest do not occur."""


def descent(step: Float[Tensor, "d_y d_x d_x"], task: TaskConfig) -> float:
    """Smallest eigenvalue of the symmetric part of each response's step, divided by the largest |eigenvalue|; the smallest
    over the responses.

    Coordinates are those in which x has the identity as its covariance. If the task states supports, the
    directions are those on the response's support. NaN if a step is 0.

    Source:
        Derived here.
    Example:
        >>> descent(torch.diag(torch.tensor([2.0, 1.0, -0.5]))[None], TaskConfig(d_x=3))
        -0.25
    """
    Sigma = torch.from_numpy(covariance_matrix(task.covariance, task.d_x))
    every = tuple(range(task.d_x))
    supports = task.supports or [every] * len(step)
    pairs = zip(step.to(torch.float64), supports, strict=True)
    return min((_of_response(G, Sigma, list(support)) for G, support in pairs), key=_nan_first)


def _of_response(G: Tensor, Sigma: Tensor, support: list[int]) -> float:
    variances, vectors = torch.linalg.eigh(Sigma[support][:, support])
    occur = variances > LEAST_VARIANCE * variances[-1]
    # Columns: Sigma beta for the beta of unit signal along each principal direction of the support.
    gradients = Sigma[:, support] @ (vectors[:, occur] / variances[occur].sqrt())
    values = torch.linalg.eigvalsh(gradients.mT @ (G + G.mT) @ gradients / 2)
    largest = values.abs().max()
    return float(values[0] / largest) if largest > 0 else float("nan")


def _nan_first(value: float) -> float:
    return -np.inf if np.isnan(value) else value
