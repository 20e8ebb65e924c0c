"""Readings of a file that leaves settings open, and which of them predict on prompts of the task.

The loss decides on the scale, the columns and how parts are combined, as training has adapted to
them. It does not decide on the score: a model trained with softmax scores can predict better with
linear ones. So the best reading of every score is kept, unless it predicts nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mechinterp.checkpoints.foreign.options import option, stated_option
from mechinterp.models.heads import AttentionWeights
from mechinterp.models.weights import Weights

ROUNDING = 1e-12
"""Standard errors below this count as 0."""
MARGIN, ERRORS = 0.05, 3.0
"""A loss is below another if it is lower by more than this fraction and this many standard errors,
else they tie.

Larger values make more readings tie.
"""

MOST_SHOWN = 2
LEFT_TO_SAY = ("--score", "--scale", "--output-scale", "--model", "--task")
"""Options that may make a file understood, whatever was tried."""
Said = Mapping[str, str | float | bool | None]
"""Choices of a reading, by the name of the argument of `load`."""
Errors = tuple[Tensor, Tensor]
"""Squared errors per prompt of a model and of predicting 0, divided by the mean of the latter."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One possible meaning of a file's tensors."""

    said: Said
    build: Callable[[], AttentionWeights | Weights]
    """Makes the weights on first use, as all readings together are many times as large as the file.
    """
    loss: float
    """Mean squared error relative to that of predicting 0, on prompts of the assumed task."""
    loss_sem: float
    predicts: bool
    """True if the loss is clearly below that of predicting 0."""
    ties: bool
    """True if no reading predicts clearly better, and this one predicts if any does."""
    stands: bool
    """False if another reading predicts clearly better, and has the same score or this one does not
    predict."""

    @cached_property
    def weights(self) -> AttentionWeights | Weights:
        """Weights under this reading."""
        return self.build()

    def to_document(self) -> dict[str, object]:
        """Its choices, its loss, and the flag `stands`."""
        numbers = {"loss": self.loss, "loss_sem": self.loss_sem, "stands": self.stands}
        return {**self.said, **numbers}

    def __repr__(self) -> str:
        named = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.said.items()
        )
        error = f" ± {self.loss_sem:.1g}" if self.loss_sem > ROUNDING else ""
        return f"{named or 'as it is'}: {self.loss:.3g}{error}"


def ranked(
    candidates: Sequence[tuple[Said, Callable[[], AttentionWeights | Weights]]],
    errors: Sequence[Errors],
) -> list[Reading]:
    """Readings, the best first; those that tie with the best keep the given order, as all do if
    none predicts.

    Args:
        errors: Errors per reading, on the same number of prompts; differences are paired, which is
            exact for the same prompts.
    """
    best, zero = min(errors, key=lambda each: float(each[0].mean().nan_to_num(torch.inf)))
    any_predicts = below(best, zero)
    rivals: dict[object, Tensor] = {}
    for (said, _), (error, _) in zip(candidates, errors, strict=True):
        score = said.get("score")
        if score not in rivals or error.mean() < rivals[score].mean():
            rivals[score] = error
    readings, alike = [], []
    for (said, build), (error, zero) in zip(candidates, errors, strict=True):
        loss, predicts = float(error.mean()), below(error, zero)
        # The standard error of heavy tails is large: a reading that may be no better than 0 does
        # not tie with one that predicts.
        ties = not below(best, error) and (predicts or not any_predicts)
        first_of_score = loss < 1 - MARGIN and not below(rivals[said.get("score")], error)
        reading = Reading(
            said=said,
            build=build,
            loss=loss,
            loss_sem=float((error - loss * zero).std() / len(zero) ** 0.5),
            predicts=predicts,
            ties=ties,
            stands=not any_predicts or ties or first_of_score,
        )
        readings.append(reading)
        alike.append(ties and not below(best, error, margin=0.0))
    if not any(each.predicts for each in readings):
        return readings
    rows = range(len(readings))
    order = sorted(rows, key=lambda i: (not alike[i], 0.0 if alike[i] else readings[i].loss, i))
    return [readings[i] for i in order]


def not_understood(readings: Sequence[Reading]) -> str:
    """Message that a file was not understood, with options to try."""
    if any(each.predicts for each in readings):
        what = f"read as its format states, it predicts no better than 0 ({readings[0]!r})"
        return f"this file was not understood: {what}; {advice(readings)}"
    best = sorted(readings, key=lambda each: each.loss)[:MOST_SHOWN]
    losses = "; ".join(map(repr, best))
    named = [*map(option, readings[0].said), *LEFT_TO_SAY]
    *first, last = dict.fromkeys(named)
    return (
        "this file was not understood: no reading predicts better than 0 on prompts of the task (loss over that of 0: "
        f"{losses}); try {', '.join(first)} or {last}"
    )


def not_at_rest(left: float) -> str:
    """Message that a file may have been read wrongly, as factors on its tensors lower the loss."""
    return (
        f"how this file was read, or its task, is in doubt: one factor on each tensor lowers the loss by {1 - left:.0%} on other "
        "prompts, and training sets such factors; state --task, --model or --scale, or hook the module in memory "
        "(mechinterp.hook_module)"
    )


def other_attention(name: str, left: float) -> str:
    """Message that another kind of attention predicts better than the one that was read."""
    return (
        f"how this file was read is in doubt: with {name}, which leaves no trace in a file and is not read from one, its loss is "
        f"{left:.2f} times as large; if it has it, hook the module in memory (mechinterp.hook_module)"
    )


def tied(readings: Sequence[Reading]) -> str:
    """Message that other readings predict as well as the first, with the options that decide; empty
    if none does."""
    alike = [each.said for each in readings[1:] if each.ties and each.predicts]
    named = [n for n in (readings[0].said if alike else ()) if any(said.get(n) != readings[0].said[n] for said in alike)]  # fmt: skip
    if not named:
        return ""
    return f"{len(alike) + 1} readings predict equally well within errors; state {' and '.join(map(option, named))}"


def advice(readings: Sequence[Reading]) -> str:
    """Options under which a file predicts, although it does not as its format states."""
    settled, predicting = readings[0].said, [each for each in readings[1:] if each.predicts]
    best = min(predicting, key=lambda each: each.loss)
    changed = {n: v for n, v in best.said.items() if v != settled.get(n)}
    named = ", ".join(f"{name} {value}" for name, value in changed.items())
    options = " ".join(stated_option(name, value) for name, value in changed.items())
    n_more = len(predicting) - 1
    more = ["", "; so does another reading"][n_more] if n_more < 2 else f"; so do {n_more} others"
    return f"{named} predicts ({best.loss:.3g}): {options}{more}"


def below(error: Tensor, other: Tensor, margin: float = MARGIN) -> bool:
    """True if the mean of `error` is clearly below that of `other`; False if it is not finite."""
    if not torch.isfinite(error).all():
        return False
    gap = (other - error).nan_to_num(torch.inf)
    if not torch.isfinite(gap).all():
        return True
    clear = gap.mean() > ERRORS * gap.std() / len(gap) ** 0.5
    return bool(clear and gap.mean() > margin * other.mean())
