"""Progress of a model along every direction of the task vector, relative to that of an algorithm.

With clean responses y = x·beta, beta along a unit vector u, and a query along u, an algorithm that descends predicts a part of
u·beta: its progress. A model that explains most of a prediction may still ascend along directions in which x varies
little. Weights are not needed, so that functions of prompts can be tested, too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp.analysis.one_layer.descent import LEAST_VARIANCE
from mechinterp.config import TaskConfig
from mechinterp.icl.algorithm import Algorithm, PromptMoments
from mechinterp.icl.given import PromptsTask, no_law
from mechinterp.icl.prompts import Prompts, covariance_matrix, draw_prompts, generator_for

STANDS_STILL = 1e-9
"""A step of a learner below this fraction of its largest step counts as 0; fitted steps of 0 are about 1e-15."""
CONTEXT_STEP = 21
"""Step of the random stream from which the contexts are drawn."""
MOST_CONTEXTS, LEAST_CONTEXTS = 16, 2
PROMPTS = 2048
"""Number of prompts that sets the number of contexts between both limits."""
MOST_DIRECTIONS = 24
"""From this d_x on, a query and a task vector lie along the same principal direction: pairs of them are too many."""


@dataclass(frozen=True, eq=False)
class Directions:
    """Prompts with a query along one principal direction of x and a task vector along another one, without noise."""

    task: TaskConfig
    prompts: Prompts
    """One prompt for each context and pair of directions, in this order."""
    n_contexts: int
    query: Int[np.ndarray, " pair"]
    """Number of the query's direction."""
    beta: Int[np.ndarray, " pair"]
    """Number of the task vector's direction."""
    size: float
    """Task vector times query, if both have one direction."""

    def progress(
        self, predictions: Float[Tensor, "layer prompt d_y"], *, linear: bool
    ) -> Float[np.ndarray, "layer d_y direction direction"]:
        """Symmetric part of the mean prediction over contexts by query's and task vector's direction, as a fraction of
        the target. A learner that is not linear in y has the diagonal alone."""
        n_layers, _, d_y = predictions.shape
        mean = predictions.reshape(n_layers, self.n_contexts, -1, d_y).mean(1) / self.size
        n = int(self.query.max()) + 1
        matrix = np.zeros((n_layers, d_y, n, n))
        matrix[:, :, self.query, self.beta] = mean.mT.numpy()
        return (matrix + matrix.swapaxes(2, 3)) / 2 if linear else matrix * np.eye(n)


def law_of(task: TaskConfig) -> TaskConfig:
    """Law of given prompts, if it is known; else the task itself."""
    return task.law if isinstance(task, PromptsTask) and task.law is not None else task


def directions_of(task: TaskConfig, context_length: int, seed: int) -> Directions | None:
    """Prompts along all directions in which x varies.

    None if the law of the prompts is not known, or task vectors come from a pool or have supports: then no task vector lies
    along a direction.
    """
    law = law_of(task)
    if no_law(task) or law.n_tasks is not None or law.supports is not None:
        return None
    Sigma = torch.from_numpy(covariance_matrix(law.covariance, law.d_x))
    values, vectors = torch.linalg.eigh(Sigma)
    occur = values > LEAST_VARIANCE * values[-1]
    roots, vectors = values[occur].sqrt(), vectors[:, occur]
    every = np.arange(len(roots))
    query, beta = np.meshgrid(every, every) if law.d_x <= MOST_DIRECTIONS else (every, every)
    query, beta = query.ravel(), beta.ravel()
    n_contexts = int(np.clip(PROMPTS // len(query), LEAST_CONTEXTS, MOST_CONTEXTS))
    x = draw_prompts(
        law,
        n_contexts,
        generator=generator_for(seed, "eval", CONTEXT_STEP),
        context_length=context_length,
        dtype=torch.float64,
    ).x.repeat_interleave(len(query), 0)
    size = law.signal_var**0.5
    w = (vectors * (size / roots)).mT[beta].repeat(n_contexts, 1)[..., None].expand(-1, -1, law.d_y)
    x_query = (vectors * roots).mT[query].repeat(n_contexts, 1)
    target = (x_query[:, None] @ w)[:, 0]
    prompts = Prompts(x, x @ w, x_query, target, target, w)
    return Directions(task, prompts, n_contexts, query, beta, size)


@dataclass(frozen=True)
class LeastProgress:
    """Least progress of a model over that of an algorithm, over directions, layers and responses."""

    least: float
    where: str


def progress_of(
    directions: Directions,
    read: Callable[[Prompts], Tensor],
    learner: Algorithm,
    scalars: Float[np.ndarray, " scalar"],
    n_layers: int,
    columns: tuple[str, ...],
) -> LeastProgress:
    """Least progress of a model, relative to a learner with fitted scalars.

    Args:
        read: Function of prompts that gives the model's predictions, one for each column.
    Returns:
        Smallest u^T C u / u^T A u over u, with `Directions.progress` C of the model and A of the learner. Layers in which
        the learner itself makes no progress along some direction, or none but rounding, are left out, as are directions in
        which a learner that is not linear in y makes no step.
    Source:
        Derived here.
    """
    moments = PromptMoments(directions.prompts, directions.task)
    path = learner.predictions(moments, scalars.tolist(), n_layers)[-len(columns) :]
    linear = learner.linear_in_y
    by_learner = directions.progress(path, linear=linear)
    by_model = directions.progress(read(directions.prompts), linear=linear)
    largest = max(abs(A).max() for layer in by_learner for A in layer)
    least = LeastProgress(1.0, columns[-1])
    for layer, name in enumerate(columns):
        for A, C in zip(by_learner[layer], by_model[layer], strict=True):
            values, vectors = np.linalg.eigh(A)
            still = max(LEAST_VARIANCE * abs(values).max(initial=0), STANDS_STILL * largest)
            moves = values > still
            if not np.isfinite(C).all() or (linear and not moves.all()) or not moves.any():
                continue
            scaled = vectors[:, moves] / np.sqrt(values[moves])
            ratio = float(np.linalg.eigvalsh(scaled.T @ C @ scaled)[0])
            least = min(least, LeastProgress(ratio, name), key=lambda each: each.least)
    return least
