"""Task of an analysis: the given task, or the model's own."""

from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.icl.given import PromptsTask
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.predictor import Source, is_learner, predictor_of


def task_for(
    source: Source, task: TaskLike | None, analysis: str, prompts: Prompts | None = None
) -> TaskConfig:
    """The given task, with missing fields from the model's own task; or the model's own task.

    Args:
        task: None: the model's own task, which a function of prompts does not have.
        analysis: Name of the analysis, for messages.
        prompts: Given prompts, whose task is returned; without `task` their law is unknown.
    Raises:
        ValueError: If there is no task, or the argument is not a task.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> task_for(zero_head(d_x=3), {"noise_var": 0}, "fit_learners").in_words
        'd_x 3, d_y 1, context_length 40, covariance identity, beta_var 0.3333 (1/d_x), noise_var 0; assumed: context_length, covariance, beta_var'
    """
    if isinstance(task, Prompts):
        raise ValueError(
            "task must be a TaskConfig, a dict of its fields or a JSON file, got Prompts; "
            f"given prompts of {analysis} are its argument prompts=."
        )
    own = None if is_learner(source) else predictor_of(source).task
    law = None if task is None else as_task(task, own)
    if prompts is not None:
        return PromptsTask.of(prompts, law)
    if law is not None:
        return law
    if own is None:
        what = "a function of prompts" if is_learner(source) else "a model that comes without one"
        raise ValueError(f"{analysis} needs a task for {what}, got none; pass task=.")
    return own
