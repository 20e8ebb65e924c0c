"""Cost of heads chosen from data, measured on other data: choices on random halves of the prompts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.probing.linear import cross_validated, streams
from mechinterp.analysis.stats import mean_and_sem, random_halves, ratio_and_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.predictor import Predictor, Source
from mechinterp.progress import ProgressCallback, no_progress

Rule = Callable[[np.ndarray], np.ndarray]
"""From the rises [layer, head] of the excess risk to what is kept, a truth value for each head."""
Mask = tuple[Head, ...]
SPLITS = 8
"""Random halvings of the prompts."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The different sets of heads that were chosen, and what each prompt says of each."""

    kept: Bool[np.ndarray, "set layer head"]
    share: Float[np.ndarray, " set"]
    """Of all choices, those of this set."""
    weight: Float[np.ndarray, "set prompt"]
    """Of the choices that a prompt had no part in, those of this set; sums to 1 over the sets."""

    @property
    def chosen(self) -> Float[np.ndarray, "layer head"]:
        """In which share of the choices each head is kept."""
        return np.tensordot(self.share, self.kept, axes=1)

    def risk(self, errors: Float[np.ndarray, "set prompt"]) -> tuple[float, float]:
        """Mean over prompts of the cross-fitted error, and its standard error."""
        risk, sem = mean_and_sem(self.crossed(errors))
        return float(risk), self._with_choice(sem, errors.mean(1))

    def ratio(
        self, errors: Float[np.ndarray, "set prompt"], full: Float[np.ndarray, " prompt"]
    ) -> tuple[float, float]:
        """Ratio of the cross-fitted risk to another one on the same prompts, and its standard error."""
        ratio, sem = ratio_and_sem(self.crossed(errors), full)
        return float(ratio), self._with_choice(sem, ratio_and_sem(errors.T, full)[0])

    def crossed(self, errors: Float[np.ndarray, "set prompt"]) -> Float[np.ndarray, " prompt"]:
        """The error of each prompt, mean over the choices that it had no part in."""
        return (self.weight * errors).sum(0)

    def _with_choice(self, sem: np.ndarray, values: Float[np.ndarray, " set"]) -> float:
        """Standard error over prompts and choices.

        The spread over choices is not divided by their number: halves of the same prompts overlap, so that many
        of them are no better than one in telling what other prompts would have chosen. It is that of the values
        on all prompts, hence 0 if all choices are the same.
        """
        spread = self.share @ np.square(values - self.share @ values)
        return float(np.hypot(sem, np.sqrt(spread)))


class MaskedErrors:
    """Squared errors of a model on some prompts, with heads masked; each mask is run once."""

    def __init__(
        self, predictor: Predictor, prompts: Prompts, progress: ProgressCallback = no_progress
    ) -> None:
        self.predictor, self.prompts, self.progress = predictor, prompts, progress
        self._as_is: dict[Mask, np.ndarray] = {}
        self._refitted: dict[Mask, np.ndarray] = {}

    def of(self, masks: Sequence[Sequence[Head]]) -> Float[np.ndarray, "prompt mask"]:
        """The errors under each mask."""

        def run(missing: list[Mask]) -> np.ndarray:
            return masked_errors(self.predictor, self.prompts, missing, progress=self.progress).T

        return _looked_up(self._as_is, masks, run)

    def refitted(self, masks: Sequence[Sequence[Head]]) -> Float[np.ndarray, "prompt mask"]:
        """The same with a new read-out for each mask."""

        def run(missing: list[Mask]) -> list[np.ndarray]:
            told = self.progress(missing, "new read-outs")
            return [refit_errors(self.predictor, self.prompts, mask) for mask in told]

        return _looked_up(self._refitted, masks, run)

    def rises(
        self, scored: Bool[np.ndarray, " prompt"], layers: Sequence[int], gone: Sequence[Head] = ()
    ) -> Float[np.ndarray, "layer head"]:
        """Rise of the excess risk when each head of some layers is masked beside those that are gone."""
        heads = [(layer, head) for layer in layers for head in range(self.predictor.n_heads)]
        errors = self.of([gone, *([*gone, head] for head in heads)])[scored].mean(0)
        return (errors[1:] - errors[0]).reshape(len(layers), self.predictor.n_heads)


def _looked_up(
    known: dict[Mask, np.ndarray],
    masks: Sequence[Sequence[Head]],
    run: Callable[[list[Mask]], Iterable[np.ndarray]],
) -> Float[np.ndarray, "prompt mask"]:
    """What is known of each mask, those that are not being run first."""
    keys = [tuple(sorted(mask)) for mask in masks]
    if missing := [key for key in dict.fromkeys(keys) if key not in known]:
        known |= zip(missing, run(missing), strict=True)
    return np.stack([known[key] for key in keys], axis=1)


def choose(
    errors: MaskedErrors, rule: Rule, scored: Bool[np.ndarray, " prompt"], *, sequential: bool
) -> tuple[Bool[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
    """What a rule keeps when heads are scored on some of the prompts, and the rises that it saw.

    Raises:
        ValueError: If the rule keeps no head or its answer has another shape.
    """
    layers = range(errors.predictor.n_layers)
    rise = errors.rises(scored, layers)
    kept = checked(rule(rise), rise.shape)
    for layer in layers if sequential else ():
        gone = [head for head in masked_by(kept) if head[0] < layer]
        if gone:
            rise[layer] = errors.rises(scored, [layer], gone)[0]
            kept = checked(rule(rise), rise.shape)
    return kept, rise


def choices_on_halves(
    errors: MaskedErrors, rule: Rule, *, sequential: bool, splits: int
) -> Choices:
    """What a rule keeps on each half of several random halvings of the prompts."""
    scored = random_halves(len(errors.prompts), splits)
    kept = [choose(errors, rule, half, sequential=sequential)[0] for half in scored]
    different, which = np.unique(np.array(kept), axis=0, return_inverse=True)
    one_of = np.arange(len(different))[:, None] == which.ravel()
    return Choices(different, one_of.mean(1), one_of.astype(float) @ ~scored / splits)


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """The heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> Float[np.ndarray, " prompt"]:
    """Squared error with heads masked and a new read-out, a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = streams(source, prompts, heads=gone)[-1, :, 0]
    prediction, _ = cross_validated(stream, prompts.y_query.double().numpy(force=True))
    return np.square(prediction - prompts.y_query_clean.double().numpy(force=True)).mean(1)


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """What a rule keeps.

    Raises:
        ValueError: If it is not a truth value for each head, or no head is kept.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must give a truth value for each of {shape} heads, got {kept.dtype} of {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"At least one of {kept.size} heads must be kept, got none.")
    return kept
