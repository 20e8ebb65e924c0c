"""Part of a model that an algorithm leaves unexplained: another learner, or noise of weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.naming_prompts import LAST_PREDICTION, NOISES, squares
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for

REST_ROUNDING = 1e-8
"""A rest below this fraction of the model's mean square is rounding of the model or of the fit."""
INEXACT = 1e-4
"""A rest below this fraction of the model's mean square counts as an inexact fit in settings that nothing was fitted to."""


@dataclass(frozen=True, eq=False)
class Rest:
    """Part of the model that an algorithm with a scaled read-out leaves unexplained.

    Learners treat all coordinates of x alike, or multiply each by its own fixed number. If the law of the task does not
    change with the signs of the coordinates (or with their order), neither does the difference of two learners. Noise of
    weights does: with other signs x^T E w keeps the diagonal of E alone, 1/d_x of its square if entries are independent.
    """

    square: Float[np.ndarray, "column prompt"]
    """Mean square over a prompt and its reflections."""
    product: Float[np.ndarray, "column prompt"]
    """Rest times the rest on the reflected prompt; `square` if the task has no such symmetry."""
    size: Float[np.ndarray, " prompt"]
    """Mean squares of the last prediction."""
    noise: float
    """Fraction that noise of weights keeps."""
    columns: tuple[str, ...] = (LAST_PREDICTION,)
    """Predictions at the own length, then other settings."""

    def share(
        self, counts: Float[np.ndarray, " prompt"] | None = None, *, most: bool = False
    ) -> tuple[float, str]:
        """Fraction of another learner in the rest, 0 for noise and 1 for a learner, and its column: the least, or the
        most, over columns with more than rounding. 0 if there is no such column."""
        counts = np.ones(len(self.size)) if counts is None else counts
        square, product = self.square @ counts, self.product @ counts
        fitted = [INEXACT if name in NOISES else REST_ROUNDING for name in self.columns]
        more = np.flatnonzero(square > np.array(fitted) * (self.size @ counts))
        if not len(more):
            return 0.0, self.columns[0]
        shares = (product[more] / square[more] - self.noise) / (1 - self.noise)
        at = int(shares.argmax() if most else shares.argmin())
        return float(shares[at]), self.columns[more[at]]


def reflected(prompts: Prompts, task: TaskConfig, seed: int) -> list[Prompts]:
    """Prompts with other signs of the coordinates of x, or in reverse order for a chain of correlations, which are as
    likely; none if the task has no such symmetry."""
    if task.n_tasks is not None or task.d_x == 1:
        return []
    if task.covariance.kind == "kms" and task.covariance.rho != 0:
        return [replace(prompts, x=prompts.x.flip(-1), x_query=prompts.x_query.flip(-1))]
    shape = (2, len(prompts), task.d_x)
    generator = generator_for(seed, "init", 3)
    signs = 2.0 * torch.randint(0, 2, shape, generator=generator, device="cpu").to(prompts.x) - 1
    return [
        replace(prompts, x=prompts.x * each[:, None], x_query=prompts.x_query * each)
        for each in signs
    ]


def rest_of(
    own: Float[Tensor, "column prompt d_y"],
    others: Sequence[Float[Tensor, "column prompt d_y"]],
    size: Float[np.ndarray, " prompt"],
    noise: float,
    columns: tuple[str, ...] = (LAST_PREDICTION,),
) -> Rest:
    """Rest from the model minus the learner, on prompts and on their reflections."""
    if not others:
        return Rest(squares(own), squares(own), size, 0.0, columns)
    reflections = torch.stack(list(others))
    square = (own.square() + reflections.square().mean(0)) / 2
    product = own * reflections.mean(0)
    return Rest(square.mean(2).numpy(), product.mean(2).numpy(), size, noise, columns)
