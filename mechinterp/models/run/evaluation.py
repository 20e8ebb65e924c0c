"""Prompts and task of an evaluation."""

import torch

from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.display import counted
from mechinterp.icl.predictors import PromptsTask
from mechinterp.icl.prompts import Prompts, sample_prompts
from mechinterp.models.run.predictor import Predictor, Source, is_learner, predictor_of

N_PROMPTS, N_HOOKED = 4096, 512
"""Default number of evaluation prompts: for attention-only models, and for all others, which are slower."""
PER_FEATURE = 2
"""Smallest number of prompts per scalar that is fitted to them, such as a feature of a probe."""
LEAST, LEAST_FITTED = 2, 8
"""Smallest number of prompts: for a standard error, and if any scalar is fitted to them."""


def evaluation_prompts(
    source: Source | TaskConfig,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    context_length: int | None = None,
    new_tasks: bool = False,
    fitted: int = 0,
) -> Prompts:
    """The given prompts, or evaluation prompts of the model's own task, in the model's dtype.

    Args:
        source: A model; or a task, whose prompts are in float64.
        prompts: Returned unchanged if given; None: drawn here.
        n_prompts: Number of prompts; None: `usual_number`.
        context_length: Pairs per prompt; None: the task's own.
        new_tasks: True: prompts of a task with a pool get fresh task vectors instead of the pool's.
        fitted: Number of scalars that are fitted to the prompts, which decides how many are needed.
    Raises:
        ValueError: If prompts are not given and the model has no task, or there are too few.
    See also:
        `sample_prompts`.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> evaluation_prompts(zero_head(d_x=5), n_prompts=8)
        Prompts(8 of 40 pairs, d_x=5, d_y=1, torch.float64)
    """
    if prompts is None and isinstance(source, PromptsTask):
        prompts = source.prompts.to(torch.float64)
    if prompts is not None:
        require_number(len(prompts), fitted, what="prompts")
        return prompts if context_length is None else prompts.shortened(context_length)
    if isinstance(source, TaskConfig):
        task, dtype, usual = source, torch.float64, N_PROMPTS
    else:
        predictor = predictor_of(source)
        if predictor.task is None:
            raise ValueError(
                "prompts must be given for a model that comes without a task, got none."
            )
        task, dtype, usual = predictor.task, _dtype(predictor), usual_number(predictor)
    size = usual if n_prompts is None else n_prompts
    require_number(size, fitted)
    drawn = sample_prompts(
        task,
        size,
        seed=seed,
        context_length=context_length,
        dtype=torch.float64,
        new_tasks=new_tasks,
    )
    return drawn.to(dtype)


def require_number(n_prompts: int, fitted: int = 0, *, what: str = "n_prompts") -> None:
    """Refuse fewer than 2 prompts; with fitted scalars, fewer than 8 or than twice their number.

    Raises:
        ValueError: If there are fewer.
    Example:
        >>> require_number(8, fitted=3)
    """
    least = max(LEAST_FITTED, PER_FEATURE * fitted) if fitted else LEAST
    if n_prompts < least:
        numbers = f"{counted(fitted, 'number')} {'is' if fitted == 1 else 'are'} fitted to them"
        why = numbers if fitted else "a standard error needs two"
        raise ValueError(f"{what} must be >= {least}, since {why}, got {n_prompts}.")


def usual_number(source: Source) -> int:
    """Default number of evaluation prompts for a model, enough for probes of its stream.

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> usual_number(zero_head(d_x=5))
        4096
    """
    predictor = predictor_of(source)
    usual = N_PROMPTS if predictor.attention_only else N_HOOKED
    return max(usual, least_number(predictor))


def least_number(source: Source) -> int:
    """Smallest number of prompts for a probe of the model's stream.

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> least_number(zero_head(d_x=5))
        12
    """
    return PER_FEATURE * stream_width(source)


def stream_width(source: Source) -> int:
    """Width of the model's stream, which is the number of features of a probe; 1 if unknown."""
    predictor = predictor_of(source)
    weights = predictor.weights
    if weights is not None:
        return weights.model.stream_width(weights.d_x, weights.d_y)
    return getattr(getattr(predictor.model, "cfg", None), "d_model", None) or 1


def _dtype(predictor: Predictor) -> torch.dtype:
    """Dtype of the model's weights, at least float32, so that targets stay distinct."""
    if predictor.weights is not None:
        own = predictor.weights.dtype
    else:
        model = predictor.model
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
        own = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    return torch.promote_types(own, torch.float32)


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
