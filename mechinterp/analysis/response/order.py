"""Effect of one pair on the weight of another: the order of the pairs."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.response.frames import Estimate
from mechinterp.analysis.response.measures import in_coordinates
from mechinterp.analysis.response.pair_weights import pair_weights
from mechinterp.analysis.response.projection import PromptArrays, jackknife, ratio
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Learner

MOST_SWAPS = 24
"""Largest number of positions whose pair is replaced."""
ORDER_COLUMNS = ("changed", "pair", "size", "size_sem", "slope", "slope_sem")


@dataclass(frozen=True, eq=False)
class Order:
    """Change of the weight of a pair when another pair is exchanged for a fresh one."""

    frame: pd.DataFrame
    later: Estimate
    """Mean of L^2 D for the effect of a later pair on an earlier one's weight."""
    earlier: Estimate
    """Mean of L^2 D for the effect of an earlier pair on a later one's weight."""
    eta: Estimate
    """Step size of an online learner with these effects, for x of unit variance."""


def order_of(
    function: Learner, prompts: Prompts, sample: PromptArrays, root: np.ndarray | None, output: int
) -> Order:
    """Effect of a fresh pair i, of the same task vector and noise, on the weight of each pair j.

    size is L^2 D_ij with D_ij = E (change of a_j)^2 / (2 E a^2). slope is that of the change of
    a_j on the change of <q, x_i> <x_i, x_j> / L^2. No expansion is cut off: a zero is exact.

    Args:
        sample: The same prompts, in x's own coordinates.
        root: Coordinates of the slopes, x -> root x; None: those of x.
    """
    context = sample.x.shape[1]
    beta = prompts.task_vectors_at_every_x("order")[..., output]
    moved = sample if root is None else in_coordinates(sample, root)
    u = moved.similarity
    positions = np.unique(np.linspace(0, context - 1, min(context, MOST_SWAPS)).round().astype(int))
    size = sample.sums((sample.a**2).mean(1))
    others = np.arange(context)
    rows = []
    shares: dict[str, list[np.ndarray]] = {"later": [], "earlier": []}
    slopes = np.zeros(len(size))
    squares = np.zeros((len(size), context))
    for i in positions.tolist():
        exchanged = _exchanged(prompts, beta, i, output)
        change = pair_weights(function, exchanged, output) - sample.a
        own = moved.x[:, i]
        new = np.roll(own, 1, 0)
        product = (_through(moved, new) - _through(moved, own)) / context**2
        changes = sample.sums(change**2)
        along, length = sample.sums(change * product), sample.sums(product**2)
        D, D_sem = jackknife(lambda d, a: context**2 * ratio(d, 2 * a), changes, size)
        C, C_sem = jackknife(ratio, along, length)
        values_of = dict(zip(ORDER_COLUMNS, (i, others, D, D_sem, C, C_sem), strict=True))
        rows.append(pd.DataFrame(values_of)[others != i])
        shares["later"].append(changes[:, :i].sum(1))
        shares["earlier"].append(changes[:, i + 1 :].sum(1))
        slopes = slopes + along[:, :i].sum(1)
        squares = squares + length * (others < i)
    counts = {"later": positions.sum(), "earlier": (context - 1 - positions).sum()}

    def mean_size(which: str) -> Estimate:
        total = np.sum(shares[which], 0) / max(counts[which], 1)
        value, sem = jackknife(lambda d, a: context**2 * ratio(d, 2 * a), total, size)
        return float(value), float(sem)

    weight = sample.sums(u * sample.a)
    unit = sample.sums(u**2)

    eta = jackknife(partial(_eta, context=context), slopes, squares, weight, unit)
    frame = pd.concat(rows, ignore_index=True)
    return Order(frame, mean_size("later"), mean_size("earlier"), (float(eta[0]), float(eta[1])))


def _exchanged(prompts: Prompts, beta: Tensor, pair: int, output: int) -> Prompts:
    """The prompts with x of one pair from the prompt before, and its y at their own task vector and noise."""
    x, y = prompts.x.clone(), prompts.y.clone()
    x[:, pair] = prompts.x[:, pair].roll(1, 0)
    y[:, pair, output] += ((x[:, pair] - prompts.x[:, pair]) * beta[:, pair].to(x)).sum(1)
    return replace(prompts, x=x, y=y)


def _eta(
    slopes: np.floating, squares: np.ndarray, weight: np.ndarray, unit: np.ndarray, context: int
) -> float:
    """Step size of a delta rule, which changes a_j by -eta / (1 - eta) L c_j times <q, x_i> <x_i, x_j> / L^2."""
    c = context * weight / unit
    rate = max(-float(slopes) / max(float((squares * c).sum()) * context, 1e-300), 0.0)
    return rate / (1 + rate)


def _through(sample: PromptArrays, covariate: np.ndarray) -> Float[np.ndarray, "batch context"]:
    """<q, x_i> <x_i, x_j> for each j."""
    similarity = np.einsum("ni,ni->n", sample.x_query, covariate)
    return similarity[:, None] * np.einsum("ni,nli->nl", covariate, sample.x)
