"""Models of the same shape with random initial weights, for comparison with a trained model."""

from dataclasses import replace

from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.models.weights import Weights
from mechinterp.training.general.trainer import initial_deep_weights


def random_models(weights: Weights, count: int) -> list[Weights]:
    """Models of this architecture with the initial weights of the seeds 0, 1, ...

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> len(random_models(zero_head(d_x=5), 3))
        3
    """
    d_x, d_y, model = weights.d_x, weights.d_y, weights.model
    task, longest = TaskConfig(d_x=d_x, d_y=d_y), model.longest_context
    if longest is not None:
        task = replace(task, context_length=min(task.context_length, longest))
    config = ExperimentConfig(task=task, model=replace(model, d_head=model.head_width(d_x, d_y)))
    drawn = [initial_deep_weights(replace(config, seed=seed)) for seed in range(count)]
    return [replace(each, scale=weights.scale) for each in drawn]
