"""One layer of linear attention on one pair, whose heads add known numbers on prompts about either coordinate."""

from dataclasses import replace

import numpy as np
import torch

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.constructions.one_layer import diagonal_heads
from mechinterp.models.hooked.transformer import ICLTransformer

ONE_PAIR = TaskConfig(d_x=2, context_length=1)
HALF = 13
"""Prompts of each kind. Odd: no half of the prompts has as many of one kind as of the other."""
GAMMA, RHO = 0.5, 1.0
KEPT_A, KEPT_B = np.array([2.25, 2.25]), np.array([6.25, 0.25])
"""Errors on prompts of the first and of the second kind with the first, or the second, head alone."""


def layer_of(omega: list[list[float]]) -> ICLTransformer:
    """One layer of linear attention on one pair with y = 1, whose heads add these on prompts about either coordinate."""
    weights = diagonal_heads(omega, [1.0] * len(omega), d_x=2).with_model(score="linear")
    return ICLTransformer.from_weights(weights, task=ONE_PAIR)


def three_heads(*, second: float = 1.0, third: float = GAMMA) -> ICLTransformer:
    """On prompts about the first coordinate head 0 adds 1 to the prediction and head 2 `third`; on those about the
    second coordinate head 1 adds `second`, and head 2 takes `third` away."""
    return layer_of([[1.0, 0.0], [0.0, second], [third, -third]])


def prompts_of(
    model: ICLTransformer, about: list[int], above: float | torch.Tensor = RHO
) -> Prompts:
    """Prompts about these coordinates, whose targets lie so far above what the model predicts.

    No two of at most 198 about one coordinate are equal: each has its own factor on x, plus or minus a power of 2, and the
    inverse on y, so that the products are the same.
    """
    x = torch.eye(2, dtype=torch.float64)[about]
    number = torch.tensor([about[:i].count(each) for i, each in enumerate(about)]).double()
    factor = ((1 - 2 * (number % 2)) * 2.0 ** (number // 2 - 49))[:, None, None]
    zero = torch.zeros(len(x), 1).double()
    prompts = Prompts(
        factor * x[:, None], 1 / factor, x, zero, zero, torch.zeros(len(x), 2, 1).double()
    )
    target = model.predict(prompts) + above
    return replace(prompts, y_query=target, y_query_clean=target)
