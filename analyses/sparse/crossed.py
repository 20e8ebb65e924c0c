"""Cost of a pruning rule, cross-fitted: heads are chosen on random halves of the prompts, and their cost is measured on
the other halves.

The prompts are halved at random 8 times, heads are chosen on each half, and the error of a prompt is its mean over the
choices that did not use it. The standard error is

sqrt(SEM^2 + V / 2 + F^2),

with SEM that of the mean of these errors over prompts (paired, by the delta method, for ratios), V the variance of the
risk (or ratio) over the 16 choices, and F the error of the fit of a new read-out. V is 0 if the choice is clear. V is
halved, not divided by the number of halves, because halves of the same prompts overlap: V / 2 is the variance of the mean
over choices between two equally good heads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from mechinterp import Prompts
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruning import refit_errors
from mechinterp.analysis.ablation.pruning_rules import Rule, checked, masked_by
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    halves,
    mean_and_sem,
    ratio_and_sem,
)
from mechinterp.models.run.predictor import predictor_of
from mechinterp.models.run.ways import Predictor
from mechinterp.progress import progress

SPLITS = 8
"""Number of random halvings of the prompts. More halvings average over more choices and cost more
runs."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The distinct sets of heads that a rule chose on halves of the prompts, with their shares."""

    kept: Bool[np.ndarray, "set layer head"]
    share: Float[np.ndarray, " set"]
    """Share of all choices that chose this set."""
    weight: Float[np.ndarray, "set prompt"]
    """Among the choices that did not use this prompt, the share that chose this set; sums to 1 over
    the sets."""

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Crossed:
    """Cost of a rule that masks heads for good, without retraining; of heads chosen anew on each half of the prompts."""

    kept: Bool[np.ndarray, "layer head"]
    """Heads chosen on all prompts."""
    rise: Float[np.ndarray, "layer head"]
    """Rise of the excess risk when a head is masked, on all prompts, unit y^2; the rule reads it."""
    choices: Choices
    """Sets of heads that the rule chose on halves of the prompts."""
    errors: Float[np.ndarray, "set prompt"]
    """Squared error with each of these sets kept, unit y^2."""
    refit_errors: Float[np.ndarray, "set prompt"]
    """The same with a new read-out."""
    fit_errors: Float[np.ndarray, " set"]
    """Standard error of the mean of `refit_errors` due to the fit of the read-out."""
    risk: float
    """Excess risk of the pruned model, on prompts that were not used to choose its heads."""
    risk_sem: float
    ratio: float
    """`risk` divided by that of the full model."""
    ratio_sem: float
    refit_risk: float
    """Excess risk of the pruned model with a new read-out."""
    refit_risk_sem: float
    refit_ratio: float
    """Risk with a new read-out divided by the risk of the unchanged full model."""
    refit_ratio_sem: float
    carried_by_few: bool
    """True if 1% of the prompts make up more than half of `risk`."""
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float
    full_refit_risk: float
    """Excess risk of the full model with a new read-out."""
    full_refit_risk_sem: float

    @property
    def chosen(self) -> Float[np.ndarray, "layer head"]:
        """Share of the choices on halves of the prompts that keep a head."""
        return np.tensordot(self.choices.share, self.choices.kept, axes=1)


def crossed(model: object, prompts: Prompts, rule: Rule) -> Crossed:
    """Cost of a rule on prompts that had no part in its choice.

    Raises:
        ValueError: If the rule keeps no head or its mask has another shape, or there are fewer than four prompts.
    """
    predictor = predictor_of(model)
    shape = (predictor.n_layers, predictor.n_heads)
    single = masked_errors(predictor, prompts, [[], *([head] for head in predictor.heads)])

    def rise_on(scored: np.ndarray | slice) -> Float[np.ndarray, "layer head"]:
        risks = single[scored].mean(0)
        return (risks[1:] - risks[0]).reshape(shape)

    rise = rise_on(slice(None))
    halvings = random_halves(len(prompts), SPLITS)
    on_halves = [checked(rule(rise_on(half)), shape) for half in halvings]
    choices = choices_of(np.array(on_halves), halvings)
    costs = _costs(predictor, prompts, single[:, 0], choices)
    return Crossed(kept=checked(rule(rise), shape), rise=rise, choices=choices, **costs)


def choices_of(
    kept: Bool[np.ndarray, "half layer head"], halves: Bool[np.ndarray, "half prompt"]
) -> Choices:
    """The distinct sets among the heads that are kept on each half of the prompts."""
    different, which = np.unique(kept, axis=0, return_inverse=True)
    one_of = np.arange(len(different))[:, None] == which.ravel()
    without = (~halves).sum(0)  # choices that did not use a prompt
    return Choices(different, one_of.mean(1), one_of.astype(float) @ ~halves / without)


def _costs(
    predictor: Predictor, prompts: Prompts, full: Float[np.ndarray, " prompt"], choices: Choices
) -> dict[str, Any]:
    """Errors and risks of the model with each chosen set of heads, by field of `Crossed`."""
    masks = [masked_by(each) for each in choices.kept]
    errors = masked_errors(predictor, prompts, masks).T
    refits = [
        refit_errors(predictor, prompts, gone) for gone in progress([[], *masks], "new read-outs")
    ]
    (full_refitted, *refitted), (full_fit, *fits) = (
        list(each) for each in zip(*refits, strict=True)
    )
    refit, fit_sem, ones = np.array(refitted), np.array(fits), np.ones(len(prompts))
    full_refit_risk, sem = mean_and_sem(full_refitted)
    return {
        "errors": errors,
        "refit_errors": refit,
        "fit_errors": fit_sem,
        "carried_by_few": bool(carried_by_few(choices.crossed(errors))),
        **estimates(
            risk=choices.ratio(errors, ones),
            ratio=choices.ratio(errors, full),
            refit_risk=choices.ratio(refit, ones, fit_sem),
            refit_ratio=choices.ratio(refit, full, fit_sem),
            full_risk=mean_and_sem(full),
            full_refit_risk=(full_refit_risk, np.hypot(sem, full_fit)),
        ),
    }


def random_halves(n_prompts: int, splits: int) -> Bool[np.ndarray, "half prompt"]:
    """Masks of random halves, two rows per random order: one half and its complement.

    Raises:
        ValueError: If there are fewer than four prompts, or `splits` is below 1.
    """
    if splits < 1:
        raise ValueError(f"splits must be >= 1, got {splits}.")
    generator = np.random.default_rng(0)
    orders = (generator.permutation(n_prompts).argsort() for _ in range(splits))
    return np.array(
        [np.isin(np.arange(n_prompts), half) for order in orders for half in halves(order)]
    )
