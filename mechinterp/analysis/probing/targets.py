"""Targets of linear probes by name."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from mechinterp.analysis.probing.target_functions import (
    TargetValues,
    preconditioned,
    responses,
    reweighted,
    vectors_of_prompts,
)
from mechinterp.icl.prompts import Prompts

Target = Callable[[Prompts], TargetValues | tuple[TargetValues, TargetValues]]
"""Function from prompts to the values [batch, pos, target] that a probe is fitted to; or to these and the values without
noise that it is scored against."""
READ_OUT = "read_out"
"""Name of the read-outs of the stream at the query, place by place."""
STRUCTURES: dict[str, Target] = {"reweighted x": reweighted, "preconditioned x": preconditioned}
"""Possible outputs of a first layer: x reweighted, times the context's correlations with y (Algorithm 1); x
preconditioned, (S - 1) x with the context's covariance S."""
PROBE_TARGETS: dict[str, Target] = {"y": responses, "beta": vectors_of_prompts, **STRUCTURES}
"""Targets by name, besides "read_out"."""


def named_targets(
    targets: str | Target | Sequence[str | Target] | Mapping[str, Target],
) -> tuple[dict[str, Target], bool]:
    """Targets by name, and True if the read-outs are among them.

    A function gets its own name.

    Raises:
        ValueError: If a name is unknown, a target is neither a name nor a function, a name occurs twice, or there is no
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
        if not callable(each) and each not in (*PROBE_TARGETS, READ_OUT):
            known = ", ".join((*PROBE_TARGETS, READ_OUT))
            raise ValueError(f"targets must be functions of prompts or of {known}, got {each!r}.")
        name = getattr(each, "__name__", type(each).__name__) if callable(each) else each
        if name in chosen:
            raise ValueError(f"targets must have different names, got {name!r} twice.")
        if name != READ_OUT:
            chosen[name] = each if callable(each) else PROBE_TARGETS[each]
    if not listed:
        raise ValueError("targets must name at least one target, got none.")
    return chosen, READ_OUT in listed


def values_of(name: str, target: Target, prompts: Prompts) -> tuple[TargetValues, TargetValues]:
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
