"""Prompts of an evaluation and the law that they follow: the one place where an analysis gets both."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mechinterp.config import TaskConfig, TaskLike, as_task
from mechinterp.config.task import UNKNOWN_TASK
from mechinterp.icl.given import PromptsTask, require_fitting
from mechinterp.icl.prompts import Prompts, distinct_rows, draw_prompts
from mechinterp.models.run.n_prompts import (
    least_for,
    require_few_numbers,
    require_number,
    require_whole,
    usual_number,
)
from mechinterp.models.run.predictor import Source, is_learner, predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.models.weights import Weights

LARGEST_ENTRY = 1e15
"""Largest absolute entry of given prompts, whose squares and their sums must stay finite in float32."""


def prompts_and_law(
    source: Source,
    prompts: Prompts | None = None,
    *,
    analysis: str,
    task: TaskLike | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    context_length: int | None = None,
    new_tasks: bool = False,
    fitted: int = 0,
    repeated: bool = False,
) -> tuple[Prompts, TaskConfig | None]:
    """Prompts of an analysis and the law in force: every analysis that runs a model calls this.

    Args:
        source: A model, or a function from prompts to predictions.
        prompts: Given prompts, of which equal ones count once; None: drawn here, as `sample_prompts` draws them.
        analysis: Name of the analysis, for messages.
        task: Law of the prompts. None: the law of the model, also for given prompts, if it was stated;
            "unknown": the law of given prompts is unknown. A `PromptsTask` brings its prompts.
        n_prompts: Number of prompts; None: `usual_number`.
        context_length: Pairs per prompt; None: the task's own.
        new_tasks: True: prompts of a task with a pool get fresh task vectors instead of the pool's.
        fitted: Number of scalars that are fitted to the prompts, which decides how many are needed.
        repeated: True: equal prompts stay and a single prompt is enough, for results without errors and labels.
    Returns:
        The prompts, and their law; None: unknown.
    Raises:
        ValueError: If `prompts` is something else, its sizes differ from the law's, prompts are needed and there is
            no law, or there are too few.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> prompts, law = prompts_and_law(zero_head(d_x=5), analysis="probe", n_prompts=8)
        >>> prompts_and_law(zero_head(d_x=5), prompts, analysis="probe", task={"noise_var": 0.2})[1].noise_var
        0.2
    """
    if isinstance(task, PromptsTask) and prompts is None:
        prompts, task = task.prompts, UNKNOWN_TASK if task.law is None else task.law
    law = law_in_force(source, task, analysis, prompts)
    drawn = evaluation_prompts(
        law if law is not None and is_learner(source) else source,
        prompts,
        law=law,
        n_prompts=n_prompts,
        seed=seed,
        context_length=context_length,
        new_tasks=new_tasks,
        fitted=fitted,
        repeated=repeated,
    )
    return drawn, law


def sample_prompts(
    source: Source | TaskConfig | Mapping[str, object],
    n_prompts: int | None = None,
    *,
    seed: int = 0,
    context_length: int | None = None,
    new_tasks: bool = False,
    dtype: torch.dtype | None = None,
) -> Prompts:
    """Prompts of a model's task, or of a task: for the same number and seed the prompts of every analysis.

    They are drawn in float64 and then brought to the dtype.

    Args:
        source: A model, or a task, or a dict of a task's fields.
        n_prompts: None: 4096, or 512 for models with norms or MLPs; more if probes of a wide stream
            need more.
        seed: Seed of evaluation prompts, which no training of this package draws.
        context_length: Pairs per prompt; None: the task's own.
        new_tasks: True: prompts of a task with a pool get fresh task vectors instead of the pool's,
            with the same covariates and noise.
        dtype: None: that of the model's weights; float32 for a task.
    Raises:
        ValueError: If the source is neither a model nor a task or has no task, `n_prompts` or `context_length`
            is no whole number >= 1, `dtype` is none for real numbers, or the prompts do not fit into memory.
    Source:
        He et al. 2025, arXiv 2503.12734, section 2 (x ~ N(0, I), beta ~ N(0, I/d), noisy responses).
    See also:
        `Prompts`, `load`.
    Example:
        >>> from mechinterp import TaskConfig, load
        >>> sample_prompts(TaskConfig(d_x=3), 8)
        Prompts(8 of 40 pairs, d_x=3, d_y=1, torch.float32)
        >>> checkpoint = load("softmax-h2-s0")
        >>> bool((sample_prompts(checkpoint, 8).x == sample_prompts(checkpoint.task, 8).x).all())
        True
    """
    if is_learner(source):
        raise ValueError("sample_prompts needs a model or a task, got a function of prompts.")
    if isinstance(source, Mapping):
        source = as_task(source)
    for name, number in (("n_prompts", n_prompts), ("context_length", context_length)):
        if number is not None:
            require_whole(number, name)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be one of torch's for real numbers, got {dtype!r}.")
    drawn = _drawn(source, None, n_prompts, seed, context_length, new_tasks=new_tasks)
    if dtype is None and isinstance(source, TaskConfig):
        dtype = torch.float32
    return drawn if dtype is None else drawn.to(dtype)


def evaluation_prompts(
    source: Source | TaskConfig,
    prompts: Prompts | None = None,
    *,
    law: TaskConfig | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
    context_length: int | None = None,
    new_tasks: bool = False,
    fitted: int = 0,
    repeated: bool = False,
) -> Prompts:
    """The given prompts, or evaluation prompts of the model's own task, in the model's dtype.

    Args:
        source: A model; or a task, whose prompts are in float64.
        law: Law of drawn prompts; None: the model's own task.
    Raises:
        ValueError: As `prompts_and_law`; also if drawn prompts would hold more than MOST_DRAWN numbers.
    See also:
        `mechinterp.models.run.evaluation.prompts_and_law`, which has the other arguments.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> evaluation_prompts(zero_head(d_x=5), n_prompts=8)
        Prompts(8 of 40 pairs, d_x=5, d_y=1, torch.float64)
    """
    require_prompts(prompts)
    if prompts is None and isinstance(source, PromptsTask):
        prompts = source.prompts.to(torch.float64)
    least = 1 if repeated else least_for(fitted)
    if prompts is not None:
        given = prompts if context_length is None else prompts.shortened(context_length)
        given = given if repeated else distinct(given)
        require_number(len(given), fitted, what="distinct prompts", least=least)
        return given
    if n_prompts is not None:
        require_number(n_prompts, fitted, least=least)
    drawn = _drawn(source, law, n_prompts, seed, context_length, new_tasks=new_tasks, bounded=True)
    require_number(len(drawn), fitted, least=least)
    return drawn


def _require_moderate(prompts: Prompts) -> None:
    """Refuse given prompts whose tensors do not fit, or with an entry that is not a number or beyond LARGEST_ENTRY."""
    require_fitting(prompts)
    for name in ("x", "y", "x_query", "y_query"):
        largest = float(getattr(prompts, name).detach().abs().max())
        if not largest <= LARGEST_ENTRY:
            raise ValueError(
                f"prompts.{name} must lie within ±{LARGEST_ENTRY:g}, got {largest:.3g}; scale x or y."
            )


def _require_no_autocast(analysis: str) -> None:
    """Refuse an analysis under torch.autocast, which computes in half precision whatever the dtype of the weights."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ValueError(
                f"{analysis} needs the precision of the weights, got torch.autocast({device!r}) that is on: call it under "
                f"torch.autocast({device!r}, enabled=False)."
            )


def _detached(prompts: Prompts) -> Prompts:
    """The prompts without gradients, which no analysis gives; those that need none as they are."""
    needed = {n: t.detach() for n, t in vars(prompts).items() if t is not None and t.requires_grad}
    return replace(prompts, **needed) if needed else prompts


def distinct(prompts: Prompts) -> Prompts:
    """Given prompts, each of them once; a warning gives the number of distinct ones if some are equal."""
    return distinct_pairs(prompts)[0]


def distinct_pairs(*prompts: Prompts) -> tuple[Prompts, ...]:
    """Given prompts that belong together row by row, such as clean and corrupted ones, each row once, without gradients."""
    prompts = tuple(map(_detached, prompts))
    rows, given = distinct_rows(*prompts), len(prompts[0])
    if len(rows) == given:
        return prompts
    warnings.warn(
        f"{len(rows)} distinct prompts of {given} given: equal prompts count once, so that errors are not too small.",
        stacklevel=3,
    )
    return tuple(each[rows] for each in prompts)


def _drawn(
    source: Source | TaskConfig,
    law: TaskConfig | None,
    n_prompts: int | None,
    seed: int,
    context_length: int | None,
    *,
    new_tasks: bool,
    bounded: bool = False,
) -> Prompts:
    """Evaluation prompts, drawn in float64 and brought to the model's dtype; bounded: at most MOST_DRAWN numbers."""
    if isinstance(source, TaskConfig):
        law, dtype = source, torch.float64
    else:
        source = predictor_of(source)
        law = source.task if law is None else law
        if law is None:
            raise ValueError(
                "prompts must be given for a model that comes without a task, got none."
            )
        dtype = _dtype(source)
    number = usual_number(source) if n_prompts is None else n_prompts
    if bounded:
        require_few_numbers(
            law, number, law.context_length if context_length is None else context_length
        )
    return draw_prompts(
        law,
        number,
        seed=seed,
        context_length=context_length,
        dtype=torch.float64,
        new_tasks=new_tasks,
    ).to(dtype)


def law_in_force(
    source: Source, task: TaskLike | None, analysis: str, prompts: Prompts | None = None
) -> TaskConfig | None:
    """Law of the prompts of an analysis; None: the law of the given prompts is unknown.

    A law that was stated with the model (`hook_module(task=)`, a file or a training of this package) is in force for
    given prompts, too; a law that is only assumed is not.

    Args:
        task: Law that replaces the model's, with missing fields from it; or "unknown", for given prompts.
    Raises:
        ValueError: If there is no law and no prompts are given, `task` or `prompts` is something else, or autocast is on.
    """
    require_prompts(prompts, analysis)
    _require_no_autocast(analysis)
    if isinstance(task, Prompts):
        raise ValueError(
            f"{analysis}: task must be a TaskConfig, a dict of its fields, a JSON file or 'unknown', got Prompts; "
            "pass prompts as prompts=."
        )
    if isinstance(task, str) and task == UNKNOWN_TASK:
        if prompts is None:
            raise ValueError(
                f"{analysis}: task='unknown' needs given prompts, got none; pass prompts=."
            )
        return None
    predictor = None if is_learner(source) else predictor_of(source)
    own = None if predictor is None else predictor.task
    law = own if task is None else as_task(task, own)
    if prompts is None:
        if law is None:
            what = (
                "a model that comes without one"
                if predictor is not None
                else "a function of prompts"
            )
            raise ValueError(f"{analysis} needs a task for {what}, got none; pass task=.")
        return law
    if own is not None:
        prompts.require_sizes(d_x=own.d_x, d_y=own.d_y)
    if task is None and not (predictor is not None and predictor.law_stated):
        return None
    return law


def task_for(
    source: Source, task: TaskLike | None, analysis: str, prompts: Prompts | None = None
) -> TaskConfig:
    """The law in force as a task; that of given prompts holds the prompts, too (`PromptsTask`).

    Args:
        task, prompts: As for `law_in_force`.
        analysis: Name of the analysis, for messages.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> task_for(zero_head(d_x=3), {"noise_var": 0}, "compare_learners").in_words
        'd_x 3, d_y 1, context_length 40, covariance identity, beta_var 0.3333 (1/d_x), noise_var 0; assumed: context_length, covariance, beta_var'
    """
    if isinstance(task, PromptsTask) and prompts is None:
        return task
    law = law_in_force(source, task, analysis, prompts)
    if prompts is not None:
        return PromptsTask.of(distinct(prompts), law)
    assert law is not None
    return law


def require_prompts(prompts: object, analysis: str = "", *, name: str = "prompts") -> None:
    """Refuse anything but prompts or None, with what to type instead.

    Args:
        analysis: Name of the analysis, which the message begins with.
        name: Name of the argument.
    Raises:
        ValueError: If it is something else, or an entry is beyond LARGEST_ENTRY.
    Example:
        >>> require_prompts(64, "probe")
        Traceback (most recent call last):
        ...
        ValueError: probe: prompts must be Prompts, got the number 64; a number of prompts is n_prompts=.
    """
    if isinstance(prompts, Prompts):
        _require_moderate(prompts)
    if prompts is None or isinstance(prompts, Prompts):
        return
    what, instead = _described(prompts)
    where = f"{analysis}: " if analysis else ""
    raise ValueError(f"{where}{name} must be Prompts, got {what}; {instead}.")


def _described(given: object) -> tuple[str, str]:
    """Kind of an argument that should be prompts, and the call to type instead."""
    kind = type(given).__name__
    if isinstance(given, TaskConfig):
        return f"a task ({kind})", "a task is task="
    if isinstance(given, Mapping):
        return f"a {kind}", "fields of a task are task="
    if isinstance(given, bool | int | float | np.number):
        return f"the number {given}", "a number of prompts is n_prompts="
    if isinstance(given, str | Path):
        return f"the string {str(given)!r}", "prompts are drawn by sample_prompts(model)"
    if isinstance(given, Predictor | Weights | torch.nn.Module) or hasattr(given, "predictor"):
        return f"a model ({kind})", "prompts of a model are sample_prompts(model)"
    arrays = "prompts of arrays are Prompts.from_arrays(x, y, x_query, y_query)"
    return f"{kind}", arrays


def _dtype(predictor: Predictor) -> torch.dtype:
    """Dtype of the model's weights, at least float32, so that targets stay distinct."""
    if predictor.weights is not None:
        own = predictor.weights.dtype
    else:
        model = predictor.model
        parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
        own = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    return torch.promote_types(own, torch.float32)
