"""What `name_algorithm` takes for a model: a source of any kind, or a function of prompts."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import TaskConfig, TaskLike
from mechinterp.icl.algorithm import Algorithm
from mechinterp.icl.prompt_moments import PromptMoments
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import (
    Learner,
    Predictor,
    Source,
    is_learner,
    predictor_of,
)
from mechinterp.models.run.task import task_for

DEPTH = 4
"""Layers of the algorithms that are held against a function without a path."""


@dataclass(frozen=True, eq=False)
class AlgorithmSource:
    """A model, or a function of prompts, with its law of prompts."""

    source: Predictor | Learner
    task: TaskConfig
    n_layers: int
    has_path: bool = False
    """Whether it is a function that gives a prediction after every layer."""

    @property
    def predictor(self) -> Predictor | None:
        """The model; None of a function."""
        return self.source if isinstance(self.source, Predictor) else None

    def path(self, prompts: Prompts) -> Float[Tensor, "layer batch d_y"]:
        """Predictions in float64, without gradients: of a function after every layer, else the last alone."""
        with torch.no_grad():
            if isinstance(self.source, Predictor):
                return self.source.predict(prompts).detach().cpu().double()[None]
            return _checked(self.source(prompts), prompts)

    def predictions_of(
        self, algorithm: Algorithm, scalars: Float[np.ndarray, " scalar"], prompts: Prompts
    ) -> Float[Tensor, "layer batch d_y"]:
        """Those of an algorithm of as many layers."""
        moments = PromptMoments(prompts, self.task)
        return algorithm.predictions(moments, scalars.tolist(), self.n_layers)

    def predicted(self, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
        """The last prediction."""
        return self.path(prompts)[-1]


def algorithm_source(
    source: Source | Learner, prompts: Prompts | None, task: TaskLike | None
) -> AlgorithmSource:
    """A source with its task and its number of layers.

    Args:
        prompts: Given prompts; None: they are drawn from the task.
    Raises:
        ValueError: If there is no task, or a function gives something else than predictions.
    """
    task = task_for(source, task, "name_algorithm", prompts)
    if not is_learner(source):
        predictor = predictor_of(source)
        return AlgorithmSource(predictor, task, predictor.n_layers)
    few = evaluation_prompts(task, n_prompts=2)[:2]
    given = AlgorithmSource(source, task, DEPTH)  # type: ignore[arg-type]
    path = given.path(few)
    if source(few).ndim == 2:  # type: ignore[operator]
        return given
    return AlgorithmSource(source, task, len(path), has_path=True)  # type: ignore[arg-type]


def _checked(predictions: object, prompts: Prompts) -> Float[Tensor, "layer batch d_y"]:
    """Predictions of a function as a path.

    Raises:
        ValueError: If they are of another shape than [batch, d_y] or [layer, batch, d_y].
    """
    shape = tuple(prompts.y_query.shape)
    if (
        not isinstance(predictions, Tensor)
        or predictions.shape[-2:] != shape
        or (predictions.ndim not in (2, 3))
    ):
        got = list(predictions.shape) if isinstance(predictions, Tensor) else type(predictions)
        raise ValueError(
            f"A function of prompts must give predictions {list(shape)} or [layer, {shape[0]}, {shape[1]}], "
            f"got {got}."
        )
    path = predictions.detach().cpu().double()
    return path[None] if path.ndim == 2 else path
