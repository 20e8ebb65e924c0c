"""Readings of a file that does not say everything: which of them predict on prompts of the task.

Scale and columns are told by the loss, as training has settled them. The score is not: a model trained with softmax
scores can predict better with linear ones. So of every score the best reading stands, unless it predicts nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.hints import option
from mechinterp.config import TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.models.functional import AttentionWeights, predict
from mechinterp.models.shapes import NAMES
from mechinterp.models.weights import Weights

MAX_READINGS = 64
N_PROMPTS = 2048
N_NUMBERS = 2**24  # most numbers of the prompts together
ALIKE = 1e-6
"""Relative difference of circuits up to which two readings are one model."""
MARGIN, ERRORS = 0.05, 3.0
"""A loss is below another by more than this part of it and this many standard errors, else they tie."""

Said = Mapping[str, str | float | bool | None]
"""What a reading says, by the name of the argument of `load`."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One meaning of a file's tensors."""

    said: Said
    weights: AttentionWeights | Weights
    loss: float
    """Mean squared error over that of predicting 0, on the same prompts of the assumed task."""
    loss_sem: float
    predicts: bool
    """Whether the loss is clearly below that of predicting 0."""
    ties: bool
    """Whether no reading predicts clearly better, and this one no worse than 0 if any predicts."""
    stands: bool
    """False if another reading predicts clearly better, and has the same score or this one does not predict."""

    def to_document(self) -> dict[str, object]:
        """What it says, its loss, and whether it stands."""
        numbers = {"loss": self.loss, "loss_sem": self.loss_sem, "stands": self.stands}
        return {**self.said, **numbers}

    def __repr__(self) -> str:
        named = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.said.items()
        )
        return f"{named}: {self.loss:.3g} ± {self.loss_sem:.1g}"


def require_few(n_readings: int, open_ones: Iterable[str], file: Path) -> None:
    """Refuse more readings than are tried.

    Args:
        open_ones: What they differ in, by the names of `Said`.
    Raises:
        CheckpointError: If there are more than `MAX_READINGS`.
    """
    if n_readings > MAX_READINGS:
        raise CheckpointError(
            f"{file}: at most {MAX_READINGS} readings are tried, got {n_readings}; say some of "
            f"{', '.join(map(option, open_ones))}."
        )


def compare_readings(
    candidates: Sequence[tuple[Said, AttentionWeights]], task: TaskConfig
) -> tuple[Reading, ...]:
    """The readings, those that stand first, by their loss; those that tie in the order given.

    Readings that are one model, such as two scales where d_head is 1, count once.
    """
    apart: list[tuple[Said, AttentionWeights]] = []
    for said, weights in candidates:
        if not any(_is_one_model(weights, other) for _, other in apart):
            apart.append((said, weights))
    per_prompt = (task.context_length + 1) * (task.d_x + task.d_y)
    count = max(2, min(N_PROMPTS, N_NUMBERS // per_prompt))
    prompts = evaluation_prompts(task, count)
    errors = [
        (predict(weights.to(torch.float64), prompts) - prompts.y_query).square().mean(1)
        for _, weights in apart
    ]
    zero = prompts.y_query.square().mean(1)
    found = ranked(apart, [(error / zero.mean(), zero / zero.mean()) for error in errors])
    if not any(each.predicts for each in found):
        return found
    tied = [each.ties for each in found]
    order = sorted(
        range(len(found)), key=lambda i: (not tied[i], 0.0 if tied[i] else found[i].loss, i)
    )
    return tuple(found[i] for i in order)


def ranked(
    candidates: Sequence[tuple[Said, AttentionWeights | Weights]],
    errors: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Reading, ...]:
    """The readings in the order given, held against each other.

    Args:
        errors: Per candidate the squared errors per prompt of the model and of predicting 0, over the mean of the
            latter. Prompts of the same number in all; where they are the same, differences are paired.
    """
    best, zero = min(errors, key=lambda each: float(each[0].mean().nan_to_num(torch.inf)))
    any_predicts = _below(best, zero)
    rivals: dict[object, Tensor] = {}
    for (said, _), (error, _) in zip(candidates, errors, strict=True):
        score = said.get("score")
        if score not in rivals or error.mean() < rivals[score].mean():
            rivals[score] = error
    found = []
    for (said, weights), (error, zero) in zip(candidates, errors, strict=True):
        loss = float(error.mean())
        # Of heavy tails the standard error is large: what is worse than 0 ties with nothing that predicts.
        ties = not _below(best, error) and (loss < 1 or not any_predicts)
        first_of_score = loss < 1 - MARGIN and not _below(rivals[said.get("score")], error)
        reading = Reading(
            said=said,
            weights=weights,
            loss=loss,
            loss_sem=float((error - loss * zero).std() / len(zero) ** 0.5),
            predicts=_below(error, zero),
            ties=ties,
            stands=not any_predicts or ties or first_of_score,
        )
        found.append(reading)
    return tuple(found)


def evaluation_prompts(task: TaskConfig, count: int) -> Prompts:
    """The prompts on which readings are held against each other."""
    return sample_prompts(task, count, generator=generator_for(0, "eval", 0), dtype=torch.float64)


def _is_one_model(one: AttentionWeights, other: AttentionWeights) -> bool:
    """Whether two layers have the same circuits."""
    for name in ("score", "score_slope", "attend_to_self"):
        if getattr(one, name) != getattr(other, name):
            return False
    if one.b_O is None and other.b_O is None:
        pairs = [(one.QK, other.QK), (one.OV, other.OV)]
    else:
        names = one.tensors.keys() | other.tensors.keys() | set(NAMES)
        pairs = [(one.tensors[name], other.tensors[name]) for name in names]
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=ALIKE, atol=ALIKE * float(a.abs().max()))
        for a, b in pairs
    )


def _below(error: Tensor, other: Tensor) -> bool:
    """Whether the mean of one is clearly below that of the other; not finite is below nothing."""
    if not torch.isfinite(error).all():
        return False
    gap = (other - error).nan_to_num(torch.inf)
    if not torch.isfinite(gap).all():
        return True
    clear = gap.mean() > ERRORS * gap.std() / len(gap) ** 0.5
    return bool(clear and gap.mean() > MARGIN * other.mean())
