"""Targets of linear probes: functions of the prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

Values = Float[Tensor, "batch pos target"]
Target = Callable[[Prompts], Values | tuple[Values, Values]]
"""Function from prompts to the values [batch, pos, target] that a probe is fitted to; or to these and the values without
noise that it is scored against."""
READ_OUT = "read_out"
"""Name of the read-outs of the stream at the query, place by place."""


def responses(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Response at each position: with noise to fit to, and without noise (if known) to score
    against."""
    noisy = torch.cat([prompts.y, prompts.y_query[:, None]], dim=1)
    known = prompts.knows_task_vectors
    context = prompts.y_without_noise("a probe of y") if known else prompts.y
    clean = torch.cat([context, prompts.y_query_clean[:, None]], dim=1)
    return noisy, clean


def reweighted(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Covariates of each position times the context's correlations, r_j x_j with r = (1/L) sum_l
    y_l x_l.

    With several responses, y is their mean. A preprocessing first layer (Algorithm 1) writes this.
    """
    correlations = (prompts.x.mT @ prompts.y / prompts.x.shape[1]).mean(2)
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    return x * correlations[:, None], x * correlations[:, None]


def preconditioned(prompts: Prompts) -> tuple[Tensor, Tensor]:
    """(S - 1) x at each position, with the context's covariance S = (1/L) sum_l x_l x_l^T.

    A first layer that preconditions the descent of later layers without using y writes this.
    """
    x = torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)
    target = x @ (prompts.x.mT @ prompts.x / prompts.x.shape[1]) - x
    return target, target


def task_vectors(prompts: Prompts) -> Values:
    """Task vector beta, all d_x d_y entries; the same at each position unless the task drifts.

    Raises:
        ValueError: If the prompts come without task vectors.
    """
    return prompts.task_vectors_at_every_x("a probe of beta").flatten(2)


STRUCTURES: dict[str, Target] = {"reweighted x": reweighted, "preconditioned x": preconditioned}
"""Possible outputs of a first layer: x reweighted, times the context's correlations with y (Algorithm 1); x
preconditioned, (S - 1) x with the context's covariance S."""
TARGETS: dict[str, Target] = {"y": responses, "beta": task_vectors, **STRUCTURES}
"""Targets by name, besides "read_out"."""


def named_targets(
    targets: str | Target | Sequence[str | Target] | Mapping[str, Target],
) -> tuple[dict[str, Target], bool]:
    """Targets by name, and True if the read-outs are among them.

    A function gets its own name.

    Raises:
        ValueError: If a name is unknown, a target is neither a name nor a function, a name stands twice, or there is no
            target.
    Example:
        >>> chosen, read_out = named_targets(["y", "read_out"])
        >>> list(chosen), read_out
        (['y'], True)
    """
    if isinstance(targets, Mapping) and targets:
        return dict(targets), False
    if isinstance(targets, Iterable) and not isinstance(targets, str):
        listed = list(targets)
    else:
        listed = [targets]
    chosen: dict[str, Target] = {}
    for each in listed:
        if not callable(each) and each not in (*TARGETS, READ_OUT):
            known = ", ".join((*TARGETS, READ_OUT))
            raise ValueError(f"targets must be functions of prompts or of {known}, got {each!r}.")
        name = getattr(each, "__name__", type(each).__name__) if callable(each) else each
        if name in chosen:
            raise ValueError(f"targets must have different names, got {name!r} twice.")
        if name != READ_OUT:
            chosen[name] = each if callable(each) else TARGETS[each]
    if not listed:
        raise ValueError("targets must name at least one target, got none.")
    return chosen, READ_OUT in listed


def values_of(name: str, target: Target, prompts: Prompts) -> tuple[Values, Values]:
    """Values that a probe is fitted to, and values that it is scored against.

    Raises:
        ValueError: If the target gives something else.
    """
    given = target(prompts)
    both = given if isinstance(given, tuple) else (given, given)
    for values in both:
        if not isinstance(values, Tensor) or values.ndim != 3 or len(values) != len(prompts):
            got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"target {name!r} must give values [batch, pos, target] with batch = {len(prompts)}, got {got}."
            )
    fitted, scored = both
    return fitted, scored
