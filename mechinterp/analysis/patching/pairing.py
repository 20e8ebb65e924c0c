"""Pairs of prompts for patching: clean ones, and corrupted ones that differ from them in the task vector alone."""

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.runner import HookedPredictor
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source

Metric = Callable[[Tensor], Tensor]
"""From a model's output to one number per prompt."""


def clean_and_corrupted(
    source: Source,
    clean: Prompts | None,
    corrupted: Prompts | None,
    *,
    n_prompts: int,
    seed: int,
) -> tuple[Prompts, Prompts]:
    """Prompts of the model's own task, and the same covariates and noise with other task vectors.

    Args:
        clean: None: `n_prompts` are drawn, by `seed`.
        corrupted: None: made of the clean ones and of task vectors that are drawn by the seed after that.
    Raises:
        ValueError: If prompts are to be drawn for a model that comes without a task.
    """
    clean = evaluation_prompts(source, clean, n_prompts=n_prompts, seed=seed)
    if corrupted is None:
        others = evaluation_prompts(source, n_prompts=len(clean), seed=seed + 1)
        corrupted = with_task_vectors(clean, others.beta.to(clean.beta))
    return clean, corrupted


def with_task_vectors(prompts: Prompts, beta: Float[Tensor, "batch d_x d_y"]) -> Prompts:
    """The same covariates and noise with other task vectors.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> prompts = evaluation_prompts(TaskConfig(d_x=2, noise_var=0.0), n_prompts=4)
        >>> other = with_task_vectors(prompts, 2 * prompts.beta)
        >>> bool((other.y - 2 * prompts.y).abs().max() < 1e-12)
        True
    """
    moved = beta - prompts.beta
    at_query = (prompts.x_query[:, None] @ moved)[:, 0]
    return replace(
        prompts,
        y=prompts.y + prompts.x @ moved,
        y_query=prompts.y_query + at_query,
        y_query_clean=prompts.y_query_clean + at_query,
        beta=beta,
    )


def nearness(hooked: HookedPredictor, target: Float[Tensor, "batch d_y"]) -> Metric:
    """Minus the squared distance of the prediction from a target, unit y^2."""

    def metric(output: Tensor) -> Float[Tensor, " batch"]:
        return -(hooked.read(output) - target).square().sum(-1)

    return metric
