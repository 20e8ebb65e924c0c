"""Task from which an analysis draws its prompts: the given task, or the model's own."""

from mechinterp.config import TaskConfig
from mechinterp.models.run.predictor import Source, predictor_of


def task_for(source: Source, task: TaskConfig | None, analysis: str) -> TaskConfig:
    """The given task, or the model's own.

    Args:
        analysis: Name of the analysis, for the message.
    Raises:
        ValueError: If the model has no task and none is given, or the argument is not a task.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> task_for(zero_head(d_x=3), None, "fit_learners").d_x
        3
    """
    require_task(task, analysis)
    task = predictor_of(source).task if task is None else task
    if task is None:
        raise ValueError(f"{analysis} needs a task for a model that comes without one, got none.")
    return task


def assumed_of(source: Source, task: TaskConfig | None) -> tuple[str, ...]:
    """Assumed (not stated) fields of the model's own task; empty if another task is given.

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> "noise_var" in assumed_of(zero_head(d_x=3), None), assumed_of(zero_head(d_x=3), TaskConfig(d_x=3))
        (True, ())
    """
    predictor = predictor_of(source)
    return predictor.assumed if task is None or task is predictor.task else ()


def require_task(task: object, analysis: str) -> None:
    """Refuse prompts, or anything else, in place of a task.

    Args:
        analysis: Name of the analysis, for the message.
    Raises:
        ValueError: If the argument is neither a task nor None.
    """
    if not (task is None or isinstance(task, TaskConfig)):
        raise ValueError(
            f"task must be a TaskConfig, got {type(task).__name__}; {analysis} draws its own prompts, "
            "as task=, n_prompts= and seed= say."
        )
