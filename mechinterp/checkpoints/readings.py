"""Readings of a file that does not say everything: which of them predict on prompts of the task.

Scale and columns are told by the loss, as training has settled them. The score is not: a model trained with softmax
scores can predict better with linear ones. So of every score the best reading stands, unless it predicts nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.functional import AttentionWeights, predict

MAX_READINGS = 64
N_PROMPTS = 2048
N_NUMBERS = 2**24  # most numbers of the prompts together
MARGIN, ERRORS = 0.05, 3.0
"""A loss is below another by more than this part of it and this many standard errors, else they tie."""

Said = Mapping[str, str | float]
"""What a reading says, by the name of the argument of `load`."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One meaning of a file's tensors."""

    said: Said
    weights: AttentionWeights
    loss: float
    """Mean squared error over that of predicting 0, on the same prompts of the assumed task."""
    loss_sem: float
    predicts: bool
    """Whether the loss is clearly below that of predicting 0."""
    stands: bool
    """False if another reading predicts clearly better, and has the same score or this one does not predict."""

    def __repr__(self) -> str:
        named = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.said.items()
        )
        return f"{named}: {self.loss:.3g} ± {self.loss_sem:.1g}"


def compare_readings(
    candidates: Sequence[tuple[Said, AttentionWeights]], task: TaskConfig
) -> tuple[Reading, ...]:
    """The readings, those that stand first, by their loss; those that tie in the order given.

    Raises:
        ValueError: If there are more than `MAX_READINGS`.
    """
    if len(candidates) > MAX_READINGS:
        raise ValueError(f"There must be at most {MAX_READINGS} readings, got {len(candidates)}.")
    errors, zero = _errors([weights for _, weights in candidates], task)
    size = zero.mean()
    best = min(errors, key=lambda error: float(error.mean().nan_to_num(torch.inf)))
    any_predicts = _below(best, zero)
    rivals: dict[object, Tensor] = {}
    for (said, _), error in zip(candidates, errors, strict=True):
        score = said.get("score")
        if score not in rivals or error.mean() < rivals[score].mean():
            rivals[score] = error
    found = []
    for (said, weights), error in zip(candidates, errors, strict=True):
        loss = float(error.mean() / size)
        predicts = _below(error, zero)
        found.append(
            Reading(
                said=said,
                weights=weights,
                loss=loss,
                loss_sem=float(
                    (error - error.mean() / size * zero).std() / size / len(zero) ** 0.5
                ),
                predicts=predicts,
                stands=not any_predicts
                or not _below(best, error)
                or (loss < 1 - MARGIN and not _below(rivals[said.get("score")], error)),
            )
        )
    if not any_predicts:
        return tuple(found)
    tied = [not _below(best, error) for error in errors]
    order = sorted(
        range(len(found)), key=lambda i: (not tied[i], 0.0 if tied[i] else found[i].loss, i)
    )
    return tuple(found[i] for i in order)


def _errors(models: Sequence[AttentionWeights], task: TaskConfig) -> tuple[list[Tensor], Tensor]:
    """Squared errors of the models, and of predicting 0, per prompt."""
    per_prompt = (task.context_length + 1) * (task.d_x + task.d_y)
    count = max(2, min(N_PROMPTS, N_NUMBERS // per_prompt))
    prompts = sample_prompts(
        task, count, generator=generator_for(0, "eval", 0), dtype=torch.float64
    )
    errors = [
        (predict(weights.to(torch.float64), prompts) - prompts.y_query).square().mean(1)
        for weights in models
    ]
    return errors, prompts.y_query.square().mean(1)


def _below(error: Tensor, other: Tensor) -> bool:
    """Whether the mean of one is clearly below that of the other; not finite is below nothing."""
    if not torch.isfinite(error).all():
        return False
    gap = (other - error).nan_to_num(torch.inf)
    if not torch.isfinite(gap).all():
        return True
    clear = gap.mean() > ERRORS * gap.std() / len(gap) ** 0.5
    return bool(clear and gap.mean() > MARGIN * other.mean())
