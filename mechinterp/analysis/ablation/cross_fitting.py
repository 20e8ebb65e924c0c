"""Cross-fitting: heads are chosen on random halves of the prompts, and their cost is measured on
the other halves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.probing.linear import cross_validated, streams
from mechinterp.analysis.stats import random_halves, ratio_and_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.predictor import Predictor, Source
from mechinterp.progress import ProgressCallback, no_progress

Rule = Callable[[np.ndarray], np.ndarray]
"""Function from the rises [layer, head] of the excess risk to a mask [layer, head], True for heads
that are kept."""
Mask = tuple[Head, ...]
SPLITS = 8
"""Number of random halvings of the prompts. More halvings average over more choices and cost more
runs."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The distinct sets of heads that were chosen, with their shares."""

    kept: Bool[np.ndarray, "set layer head"]
    share: Float[np.ndarray, " set"]
    """Share of all choices that chose this set."""
    weight: Float[np.ndarray, "set prompt"]
    """Among the choices that did not use this prompt, the share that chose this set; sums to 1 over
    the sets."""

    @property
    def chosen(self) -> Float[np.ndarray, "layer head"]:
        """Share of the choices that keep each head."""
        return np.tensordot(self.share, self.kept, axes=1)

    def ratio(
        self,
        errors: Float[np.ndarray, "set prompt"],
        full: Float[np.ndarray, " prompt"],
        fit_sem: Float[np.ndarray, " set"] | float = 0.0,
    ) -> tuple[float, float]:
        """Ratio of the cross-fitted risk to another risk on the same prompts, with its standard
        error over prompts, choices and fits; next to errors of 1 the risk itself.

        Args:
            fit_sem: Standard error of each set's mean due to a fitted read-out.
        """
        ratio, sem = ratio_and_sem(self.crossed(errors), full)
        values = ratio_and_sem(errors.T, full)[0]
        # The mean over many halves of the same prompts varies from sample to sample by the covariance C
        # of the values of two halves. The spread over the halves is V = variance of one value - C. Two
        # halves share half of their prompts, so the two rises that decide them have correlation 1/2.
        # Between two equal heads the choice is the sign of a normal variable. With a difference D of the
        # risks the variance is D^2 / 4 and, by Sheppard's formula,
        # C = D^2 / 4 * (2 / pi) asin(1/2) = D^2 / 12, hence V = D^2 / 6 = 2 C. If one head is better, V
        # exceeds 2 C (2.6 C if its lead on a half is one standard error, 5.3 C at two), so that V / 2 is
        # conservative. V is then small, and 0 for a clear choice.
        between = self.share @ np.square(values - self.share @ values) / 2
        # All fits see the same noise, so their errors add up.
        fit = (self.share * fit_sem).sum() / full.mean()
        return float(ratio), float(np.sqrt(sem**2 + between + fit**2))

    def crossed(self, errors: Float[np.ndarray, "set prompt"]) -> Float[np.ndarray, " prompt"]:
        """Error of each prompt, averaged over the choices that did not use it."""
        return (self.weight * errors).sum(0)


class MaskedErrors:
    """Squared errors of a model on some prompts with heads masked; each mask is run once and
    cached."""

    def __init__(
        self, predictor: Predictor, prompts: Prompts, progress: ProgressCallback = no_progress
    ) -> None:
        self.predictor, self.prompts, self.progress = predictor, prompts, progress
        self._as_is: dict[Mask, np.ndarray] = {}
        self._refitted: dict[Mask, tuple[np.ndarray, float]] = {}

    def of(self, masks: Sequence[Sequence[Head]]) -> Float[np.ndarray, "prompt mask"]:
        """Errors under each mask."""
        keys = [tuple(sorted(mask)) for mask in masks]
        if new := [key for key in dict.fromkeys(keys) if key not in self._as_is]:
            errors = masked_errors(self.predictor, self.prompts, new, progress=self.progress)
            self._as_is |= zip(new, errors.T, strict=True)
        return np.stack([self._as_is[key] for key in keys], axis=1)

    def refitted(
        self, masks: Sequence[Sequence[Head]]
    ) -> tuple[Float[np.ndarray, "prompt mask"], Float[np.ndarray, " mask"]]:
        """Errors with a new read-out for each mask, and the standard error of each mean due to the
        fit."""
        keys = [tuple(sorted(mask)) for mask in masks]
        new = [key for key in dict.fromkeys(keys) if key not in self._refitted]
        for key in self.progress(new, "new read-outs") if new else ():
            self._refitted[key] = refit_errors(self.predictor, self.prompts, key)
        errors, fit_sems = zip(*(self._refitted[key] for key in keys), strict=True)
        return np.stack(errors, axis=1), np.array(fit_sems)

    def rises(
        self, scored: Bool[np.ndarray, " prompt"], layers: Sequence[int], gone: Sequence[Head] = ()
    ) -> Float[np.ndarray, "layer head"]:
        """Rise of the excess risk when each head of these layers is masked in addition to the heads
        `gone`."""
        heads = [(layer, head) for layer in layers for head in range(self.predictor.n_heads)]
        errors = self.of([gone, *([*gone, head] for head in heads)])[scored].mean(0)
        return (errors[1:] - errors[0]).reshape(len(layers), self.predictor.n_heads)


def choose(
    errors: MaskedErrors, rule: Rule, scored: Bool[np.ndarray, " prompt"], *, sequential: bool
) -> tuple[Bool[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
    """Heads that a rule keeps when they are scored on some of the prompts, and the rises that it
    used.

    Raises:
        ValueError: If the rule keeps no head, or its mask has another shape.
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
    """Heads that a rule keeps on each half of several random halvings of the prompts."""
    scored = random_halves(len(errors.prompts), splits)
    kept = [choose(errors, rule, half, sequential=sequential)[0] for half in scored]
    different, which = np.unique(np.array(kept), axis=0, return_inverse=True)
    one_of = np.arange(len(different))[:, None] == which.ravel()
    return Choices(different, one_of.mean(1), one_of.astype(float) @ ~scored / splits)


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """Heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> tuple[Float[np.ndarray, " prompt"], float]:
    """Squared error with heads masked and a new read-out, and the standard error of its mean due to
    the fit.

    The read-out is a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = streams(source, prompts, heads=gone)[-1, :, 0]
    (fitted,) = cross_validated(stream, prompts.y_query.double().numpy(force=True))
    clean = prompts.y_query_clean.double().numpy(force=True)
    return np.square(fitted.prediction - clean).mean(1), fitted.fit_sem(clean)


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The mask of a rule, checked.

    Raises:
        ValueError: If it is not a boolean array of this shape, or keeps no head.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must return a boolean array of shape {shape}, got {kept.dtype} of shape {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"A rule must keep at least one of {kept.size} heads, got none.")
    return kept
