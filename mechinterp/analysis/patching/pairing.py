"""Pairs of prompts for patching: clean prompts, and corrupted ones that differ in the task vector
only."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import z_name
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.hooked.written import written
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source

Metric = Callable[[Tensor], Tensor]
"""Function from a model's output to one number per prompt."""


def clean_and_corrupted(
    source: Source, clean: Prompts | None, corrupted: Prompts | None, *, n_prompts: int, seed: int
) -> tuple[Prompts, Prompts]:
    """Clean prompts of the model's own task, and corrupted ones with the same covariates and noise.

    Args:
        clean: Clean prompts; None draws `n_prompts` with `seed`.
        corrupted: Corrupted prompts; None gives the clean ones other task vectors: for given
            prompts those of the previous prompt, else new ones drawn with `seed` + 1.
    Raises:
        ValueError: If prompts must be drawn for a model without a task, or given prompts come
            without task vectors.
    """
    given = clean is not None
    clean = evaluation_prompts(source, clean, n_prompts=n_prompts, seed=seed)
    if corrupted is None:
        own = clean.task_vectors("patching without corrupted prompts")
        other = own.roll(1, 0)
        if not given:
            drawn = evaluation_prompts(source, n_prompts=len(clean), seed=seed + 1)
            other = drawn.task_vectors("patching").to(own)
        corrupted = with_task_vectors(clean, other)
    return clean, corrupted


def with_task_vectors(prompts: Prompts, beta: Float[Tensor, "batch d_x d_y"]) -> Prompts:
    """The prompts with other task vectors, and the same covariates and noise.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> prompts = evaluation_prompts(TaskConfig(d_x=2, noise_var=0.0), n_prompts=4)
        >>> other = with_task_vectors(prompts, 2 * prompts.beta)
        >>> bool((other.y - 2 * prompts.y).abs().max() < 1e-12)
        True
    """
    moved = beta - prompts.task_vectors("with_task_vectors")
    at_query = (prompts.x_query[:, None] @ moved)[:, 0]
    return replace(
        prompts,
        y=prompts.y + prompts.x @ moved,
        y_query=prompts.y_query + at_query,
        y_query_clean=prompts.y_query_clean + at_query,
        beta=beta,
    )


def put(own: Tensor, hook: object, *, at: tuple[int | slice, ...], values: Tensor) -> Tensor:
    """Hook that replaces its activation at one place of every prompt."""
    own = own.clone()
    own[:, *at] = values[:, *at]
    return own


def nearness(hooked: HookedPredictor, target: Float[Tensor, "batch d_y"]) -> Metric:
    """Metric: minus the squared distance of the prediction to a target, unit y^2."""

    def metric(output: Tensor) -> Float[Tensor, " batch"]:
        return -(hooked.read(output) - target).square().sum(-1)

    return metric


@dataclass(frozen=True, eq=False)
class Pair:
    """Clean and corrupted inputs of a model, with the outputs of its heads on both."""

    hooked: HookedPredictor
    clean: Tensor
    corrupted: Tensor
    moved: tuple[Float[Tensor, "batch pos head d_model"], ...]
    """Output of each head on the clean prompts minus that on the corrupted prompts, layer by layer.
    """
    metric: Metric

    @classmethod
    def of(
        cls, hooked: HookedPredictor, clean: Prompts, corrupted: Prompts, metric: Metric | None
    ) -> "Pair":
        with torch.no_grad():
            inputs = hooked.inputs(clean), hooked.inputs(corrupted)
            shapes = [list(each.shape) for each in inputs]
            if shapes[0] != shapes[1] or shapes[0][0] < 2:
                raise ValueError(
                    f"clean and corrupted tokens must have the same shape, with at least 2 prompts, got {shapes[0]} and {shapes[1]}."
                )
            names = [z_name(layer) for layer in range(hooked.n_layers)]
            runs = [hooked.model.run_with_cache(each, names_filter=names) for each in inputs]
            target = hooked.prediction(runs[0][0], clean)
            moved = tuple(
                written(hooked.model, layer, runs[0][1][name] - runs[1][1][name])
                for layer, name in enumerate(names)
            )
        metric = nearness(hooked, target) if metric is None else metric
        return cls(hooked, *inputs, moved, metric)

    @torch.no_grad()
    def gained(self) -> Float[np.ndarray, " batch"]:
        """Metric on the clean prompts minus metric on the corrupted prompts."""
        clean, corrupted = (self.metric(self.hooked.model(t)) for t in (self.clean, self.corrupted))
        return (clean - corrupted).double().numpy(force=True)
