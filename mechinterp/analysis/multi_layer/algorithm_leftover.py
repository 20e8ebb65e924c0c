"""What an algorithm leaves unexplained: noise of weights, or another learner.

Learners treat all coordinates of x alike, or each by its own fixed number; where the law of the task is
the same with other signs of the coordinates (or with their order reversed), so is what any of two learners
differ by. Noise of weights is not: of x^T E w with a fixed matrix E of independent entries, other signs
keep the diagonal, 1/d_x of its square; the reverse order of a chain keeps as much on average over E, more or less of one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.analysis.multi_layer.algorithm_paths import Path, read_path
from mechinterp.analysis.multi_layer.algorithm_scores import Room, Scores, candidates_of, scaled
from mechinterp.analysis.multi_layer.algorithm_source import AlgorithmSource
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm_fits import TOLERANCE
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts, generator_for

ROUNDING = 1e-8
"""Share of the model below which what an algorithm leaves unexplained is rounding, of the model or of the fit."""
REFLECTIONS = 2
"""Signs that are drawn for each prompt."""


@dataclass(frozen=True, eq=False)
class Leftover:
    """What an algorithm with a free scale of the read-out leaves of a model, per layer and scored prompt."""

    square: Float[np.ndarray, "column prompt"]
    """Its mean square over a prompt and its reflections."""
    product: Float[np.ndarray, "column prompt"]
    """What is left times what is left of the reflected prompt; as `square` where the task has no such symmetry."""
    size: Float[np.ndarray, " prompt"]
    """Mean squares of the last prediction."""
    noise: float
    """The share that noise of weights would keep."""

    def share(self, counts: Float[np.ndarray, " prompt"] | None = None) -> tuple[float, int]:
        """The part of a learner in what is left, 0 for noise and 1 for another learner: the least over layers
        after which more than rounding is left, and that layer. 0 where nothing is left."""
        counts = np.ones(len(self.size)) if counts is None else counts
        square, product = self.square @ counts, self.product @ counts
        left = np.flatnonzero(square > ROUNDING * (self.size @ counts))
        if not len(left):
            return 0.0, 0
        shares = (product[left] / square[left] - self.noise) / (1 - self.noise)
        return float(shares.min()), int(left[shares.argmin()])


def reflected(prompts: Prompts, task: TaskConfig, seed: int) -> tuple[list[Prompts], float]:
    """Prompts that are as likely with other signs of their coordinates, or for a chain of correlations with these in
    reverse order, and the share of noise that stays the same; no prompts where a task has no such symmetry."""
    chain = task.covariance.kind == "kms" and task.covariance.rho != 0
    if task.n_tasks is not None or task.d_x == 1:
        return [], 0.0
    if chain:
        return [_with_x(prompts, lambda x: x.flip(-1))], 1 / task.d_x
    generator = generator_for(seed, "init", 3)
    shape = (REFLECTIONS, len(prompts), 1, task.d_x)
    signs = 2.0 * torch.randint(0, 2, shape, generator=generator, device="cpu").to(prompts.x) - 1
    return [_with_x(prompts, partial(_with_signs, signs=each)) for each in signs], 1 / task.d_x


def _with_signs(x: Tensor, signs: Tensor) -> Tensor:
    return (x.reshape(len(signs), -1, signs.shape[2]) * signs).reshape(x.shape)


def _with_x(prompts: Prompts, change: Callable[[Tensor], Tensor]) -> Prompts:
    return replace(prompts, x=change(prompts.x), x_query=change(prompts.x_query))


def leftover(
    own: Float[Tensor, "column prompt d_y"],
    others: Sequence[Float[Tensor, "column prompt d_y"]],
    size: Float[np.ndarray, " prompt"],
    noise: float,
) -> Leftover:
    """Of predictions of a model minus those of an algorithm, on prompts and on their reflections.

    Args:
        size: Mean squares of the last prediction.
        noise: The share that noise of weights would keep.
    """
    if not others:
        alone = own.square().mean(2).numpy()
        return Leftover(alone, alone, size, noise)
    reflections = torch.stack(list(others))
    square = (own.square() + reflections.square().mean(0)) / 2
    product = own * reflections.mean(0)
    return Leftover(square.mean(2).numpy(), product.mean(2).numpy(), size, noise)


def with_leftovers(
    scores: Scores, room: Room, model: AlgorithmSource, path: Path, near: float, seed: int
) -> tuple[Scores, dict[str, Leftover]]:
    """With members of a scaled read-out where a member comes near, and what these leave of the model."""
    least = scores.r2()[:, : room.n_own].min(1)
    left: dict[str, Leftover] = {}
    members = {str(member.label): member for member in candidates_of(model.task)}
    rows = {label: scores.names.index(label) for label in members if label in scores.names}
    rows = {label: row for label, row in rows.items() if not least[row] < near}
    if not rows:
        return scores, left
    others, noise = reflected(room.own.prompts[1::2], model.task, seed)
    known = partial(read_path, model, path) if room.path is not None else model.predicted
    places = [(room.target()[..., 1::2, :], room.moments(next(iter(room.settings))))]
    places += [(known(prompts), PromptMoments(prompts, model.task)) for prompts in others]
    for label, row in rows.items():
        one_more = scaled(members[label])
        start = np.append(scores.scalars[row], 1.0)
        fit = room.scores([one_more], starts={one_more.name: start}, tolerance=TOLERANCE)
        learner = partial(
            one_more.predictions, scalars=fit.scalars[0].tolist(), n_layers=model.n_layers
        )
        own, *rest = (theirs - learner(moments)[-room.n_own :] for theirs, moments in places)
        left[label] = leftover(own, rest, fit.size[room.n_own - 1], noise)
        scores = scores.joined(fit)
    return scores, left
