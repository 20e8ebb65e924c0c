"""Heads in their idealised form in place of the model's, and how much of the prediction they keep."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.stats import loss_and_r2
from mechinterp.models.constructions.one_layer import from_circuits
from mechinterp.models.weights import Weights


@dataclass(frozen=True)
class Faithfulness:
    """Agreement of a substitute's predictions with those of the model."""

    r2: float
    """1 - E|model - substitute|^2 / E|model|^2, over prompts and responses."""
    r2_sem: float
    rms: float
    """Root of the mean square of model - substitute, unit y."""
    rms_sem: float


def faithfulness(
    prediction: Float[Tensor, "batch d_y"], substitute: Float[Tensor, "batch d_y"]
) -> Faithfulness:
    """R^2 and error of a substitute's predictions, with standard errors over prompts.

    Example:
        >>> faithfulness(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]])).r2
        1.0
    """
    with np.errstate(over="ignore", invalid="ignore"):  # squares of huge predictions
        loss, sem, r2, r2_sem = loss_and_r2(substitute.numpy(), prediction.numpy())
    rms = loss**0.5
    return Faithfulness(r2, r2_sem, rms, sem / (2 * rms) if rms else 0.0)


def idealised(
    weights: Weights,
    x_blocks: Float[Tensor, "head d_x d_x"],
    mu: Float[Tensor, "head d_y"],
) -> Weights:
    """Heads that compare x with x by `x_blocks` and read y_n into prediction n by `mu`, and nothing
    else."""
    d_x, d_y = weights.d_x, weights.d_y
    return from_circuits(
        torch.nn.functional.pad(x_blocks, (0, d_y, 0, d_y)),
        torch.nn.functional.pad(torch.diag_embed(mu), (0, 0, d_x, 0)),
        score=weights.model.score,
        score_slope=weights.model.score_slope,
        attend_to_self=weights.model.attend_to_self,
    )
