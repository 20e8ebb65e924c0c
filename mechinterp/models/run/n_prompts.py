"""Number of prompts of an analysis: the usual, the least and the largest."""

import numpy as np

from mechinterp.config import TaskConfig
from mechinterp.display import counted
from mechinterp.memory import prompt_bytes
from mechinterp.models.run.predictor import Source, predictor_of

_N_USUAL, _N_SLOW = 4096, 512
"""Default number of evaluation prompts: for attention-only models, and for all others, which are slower."""
PER_FEATURE = 2
"""Smallest number of prompts per scalar that is fitted to them, such as a feature of a probe."""
LEAST = 8
"""Smallest number of distinct prompts for a standard error or a label, and if any scalar is fitted to them."""
MOST_DRAWN = 2**26
"""Largest count of numbers in the prompts that an analysis draws (512 MB in float64). A model with long prompts needs a
smaller n_prompts; given prompts have no such limit."""


def usual_number(source: Source | TaskConfig) -> int:
    """Default number of evaluation prompts: for a task, or for a model, enough for probes of its stream.

    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> usual_number(zero_head(d_x=5))
        4096
    """
    if isinstance(source, TaskConfig):
        return _N_USUAL
    predictor = predictor_of(source)
    usual = _N_USUAL if predictor.attention_only else _N_SLOW
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


def least_for(fitted: int) -> int:
    """Smallest number of distinct prompts for an analysis that fits this many scalars to them.

    Example:
        >>> least_for(0), least_for(12)
        (8, 24)
    """
    return max(LEAST, PER_FEATURE * fitted)


def require_number(
    n_prompts: int, fitted: int = 0, *, what: str = "n_prompts", least: int | None = None
) -> None:
    """Refuse fewer than 8 prompts, or fewer than twice the number of fitted scalars.

    Args:
        least: Smallest number; None: `least_for(fitted)`.
    Raises:
        ValueError: If there are fewer, or it is no whole number.
    Example:
        >>> require_number(8, fitted=3)
    """
    require_whole(n_prompts, what)
    least = least_for(fitted) if least is None else least
    if n_prompts < least:
        numbers = f"{counted(fitted, 'number')} {'is' if fitted == 1 else 'are'} fitted to them"
        needs = f"a standard error or a label needs {LEAST} distinct ones"
        why = numbers if least > LEAST else needs if least > 1 else "an analysis needs one"
        raise ValueError(f"{what} must be >= {least}, since {why}, got {n_prompts}.")


def require_whole(number: object, what: str) -> None:
    """Refuse anything but a whole number."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise ValueError(f"{what} must be a whole number, got {number!r}.")


def most_prompts(task: TaskConfig, context_length: int) -> int:
    """Largest number of prompts of this length that an analysis draws.

    Example:
        >>> most_prompts(TaskConfig(), 40), most_prompts(TaskConfig(), 100_000)
        (267365, 111)
    """
    return MOST_DRAWN // prompt_bytes(task, context_length=context_length, width=1)


def require_few_numbers(task: TaskConfig, n_prompts: int, context_length: int) -> None:
    """Refuse prompts of an analysis that hold more than MOST_DRAWN numbers, before they are drawn.

    Raises:
        ValueError: With the largest number of prompts of this length.
    """
    if n_prompts > (most := most_prompts(task, context_length)):
        raise ValueError(
            f"n_prompts (--n-prompts) must be <= {most} for prompts of {context_length} pairs with d_x = {task.d_x} "
            f"(at most {MOST_DRAWN} numbers are drawn), got {n_prompts}; shorter prompts: --context-length."
        )
