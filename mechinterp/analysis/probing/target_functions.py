"""Values that linear probes are fitted to: functions of the prompts."""

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

TargetValues = Float[Tensor, "batch pos target"]


def responses(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Response at each position: with noise to fit to, and without noise (if known) to score
    against."""
    noisy = torch.cat([prompts.y, prompts.y_query[:, None]], dim=1)
    known = prompts.knows_task_vectors
    context = prompts.y_without_noise("a probe of y") if known else prompts.y
    clean = torch.cat([context, prompts.y_query_clean[:, None]], dim=1)
    return noisy, clean


def reweighted(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Covariates of each position times the context's correlations, r_j x_j with r = (1/L) sum_l
    y_l x_l.

    With several responses, y is their mean. A preprocessing first layer (Algorithm 1) writes this.
    """
    correlations = (prompts.x.mT @ prompts.y / prompts.x.shape[1]).mean(2)
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    return x * correlations[:, None], x * correlations[:, None]


def preconditioned(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """(S - 1) x at each position, with the context's covariance S = (1/L) sum_l x_l x_l^T.

    A first layer that preconditions the descent of later layers without using y writes this.
    """
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    target = x @ (prompts.x.mT @ prompts.x / prompts.x.shape[1]) - x
    return target, target


def vectors_of_prompts(prompts: Prompts) -> TargetValues:
    """Task vector beta, all d_x d_y entries; the same at each position unless the task drifts.

    Raises:
        ValueError: If the prompts come without task vectors.
    """
    return prompts.task_vectors_at_every_x("a probe of beta").flatten(2)
