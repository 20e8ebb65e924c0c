"""A few lines that say what a model computes, how sure that is, and what it is not."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from mechinterp.analysis.number_format import explained, p_text

KNOWN = {
    "debiased_gd": (0, 293),
    "kernel_regression": (0, 64),
    "linear_gd": (0, 38),
    "preconditioned_gd": (0, 27),
    "superposition": (0, 23),
    "task_heads": (0, 24),
    "weighted_preconditioned_gd": (0, 28),
}
"""Of one layer: models of known kind that got a label under the default limits, and how many wrongly.

The confirming half of analyses/calibration/errors.py, as analyses/results/calibration_labels.csv counts it.
"""
KNOWN_ALGORITHMS = {
    "gd_plus_plus": (0, 1),
    "gradient_descent": (1, 6),
    "newton": (0, 1),
    "posterior_mean": (0, 1),
    "preconditioned_descent": (0, 2),
    "preprocess_then_optimise": (0, 1),
    "ridge_like": (1, 3),
    "sparse_shrinkage": (2, 4),
}
"""The same of several layers, by analyses/algorithms/calibration.py."""
LEARNERS = {
    "vanilla_gd": "a plain gradient step",
    "debiased_gd": "a gradient step on x minus its mean",
    "kernel_head": "a kernel smoother",
    "least_squares": "least squares",
    "ridge": "ridge regression",
}
"""Simple learners by name, in words."""
WORDS = {
    "zero_sum": "the sum of mu over the sum of |mu|",
    "omega_spread": "the spread of |omega| over heads, max/min minus 1,",
    "qk_diagonal_best": "the diagonal's part of the best head's QK circuit,",
    "ov_last_entry_best": "the part of the best head's OV circuit that reads y,",
    "substitution_r2 p": "R² of heads that keep omega and mu only, p",
    "qk_diagonal": "the diagonal's part of its QK circuit",
    "ov_last_entry": "the part of its OV circuit that reads y",
    "alignment": "the cosine of its QK circuit with the heads' common form",
    "support_leak": "the step off the coordinates of its response, over that on them,",
    "theta_spread": "the spread of the step over coordinates, max/min minus 1,",
    "substitution_r2": "R² of heads that keep omega and mu only, as",
    "learner_r2": "R² of the formula, as",
    "task_r2": "R² on its task,",
    "idealised heads": "heads that keep omega and mu only",
}
"""Names of numbers in a reason, spelled out; a name that begins with another stands before it."""
NEAR = 0.5
"""R^2 below which what comes nearest is not called near."""
HIGH = 0.1
"""Upper limit of a share of wrong labels above which a group without one is too small to be told."""
Z95 = 1.959964
"""Of a two-sided interval of 95%."""
NOTHING_EXCLUDED = "none of the others is clearly further from its predictions"
FACTORS = "omega and mu are what a head multiplies x·x and y by"


@dataclass(frozen=True)
class Verdict:
    """What a model computes, in three to five lines."""

    computes: str
    """The formula, with its numbers."""
    sure: str
    """How much of the prediction it explains, how far random weights get, how often the label is wrong."""
    is_not: str
    """What comes next of all that explains the predictions clearly less, and by how much."""
    alike: str = ""
    """What explains the predictions as well, if anything does."""
    doubt: str = ""
    """Why the task may be another one than was assumed, if anything says so."""

    @property
    def lines(self) -> dict[str, str]:
        """All that is said, under headings."""
        said = {
            "What it computes": self.computes,
            "How sure": self.sure,
            "What predicts as well": self.alike,
            "What it is not": self.is_not,
            "What to doubt": self.doubt,
        }
        return {heading: text for heading, text in said.items() if text}

    def __str__(self) -> str:
        return "\n".join(f"{heading}: {text}." for heading, text in self.lines.items())


def none_of(known: str, pattern: str) -> str:
    """That a model is none of what is known, "formulas" or "algorithms"."""
    return {
        "undetermined": f"none of the known {known} clearly (undetermined)",
        "unstructured": "nothing that random weights do not compute, too (unstructured)",
    }[pattern]


def nearest_learners(
    computes: str,
    learners: Sequence[str],
    r2: Float[np.ndarray, " learner"],
    r2_sem: Float[np.ndarray, " learner"],
    *,
    chance: str = "",
    doubt: str = "",
) -> Verdict:
    """The verdict on a model without a formula: the simple learner that comes nearest, and those after it."""
    first, *rest = np.argsort(-np.nan_to_num(r2, nan=-np.inf), kind="stable").tolist()
    said = [
        f"{LEARNERS[name]}, {explained(*pair)}"
        for name, *pair in zip(learners, r2, r2_sem, strict=True)
    ]
    sure = f"the nearest simple learner is {said[first]}"
    if not r2[first] >= NEAR:
        sure += f", which is not near{chance}"
        return Verdict(computes, sure, "near to a simple learner", doubt=doubt)
    behind = [n for n in rest if is_behind(r2[first] - r2[n], math.hypot(r2_sem[first], r2_sem[n]))]
    return Verdict(
        computes,
        f"{sure}{chance}",
        is_not=f"{said[behind[0]]}, which is further off" if behind else NOTHING_EXCLUDED,
        alike="; ".join(said[n] for n in rest if n not in behind),
        doubt=doubt,
    )


def is_behind(lead: float, sem: float, least: float = 0.0) -> bool:
    """Whether something explains less than the winner, by more than chance and by more than `least`.

    One that is not defined is behind, and so is one that explains less by half of the predictions: where few prompts
    explode, its standard error is as large.

    Example:
        >>> is_behind(0.0027, 0.0004), is_behind(-0.0003, 0.0002), is_behind(99.0, 97.0)
        (True, False, True)
    """
    return not lead <= min(max(2 * sem, least), NEAR)


def chance_text(p: float, n_random: int, weights: str) -> str:
    """How many models of random weights do the task as well, with the p-value that follows.

    Args:
        p: (k + 1) / (n_random + 1) for k of them.
        weights: Which weights these have.
    Example:
        >>> chance_text(1 / 401, 400, "random weights")
        'none of 400 models with random weights does the task as well (p < 0.0025)'
        >>> chance_text(12 / 401, 400, "random weights")
        '11 of 400 models with random weights do the task as well (p = 0.03)'
    """
    if np.isnan(p):
        return f"models with {weights} were not held against it, the loss being not defined"
    count = round(p * (n_random + 1)) - 1
    many = f"{count or 'none'} of {n_random} models with {weights}"
    verb = "does" if count < 2 else "do"
    return f"{many} {verb} the task as well ({p_text(p, n_random)})"


def upper_limit(wrong: int, named: int) -> float:
    """Upper end of Wilson's interval of 95% for a share.

    Example:
        >>> round(upper_limit(0, 293), 4), round(upper_limit(3, 24), 4)
        (0.0129, 0.31)
    """
    share, z2 = wrong / named, Z95**2
    spread = Z95 * math.sqrt(share * (1 - share) / named + z2 / (4 * named**2))
    return (share + z2 / (2 * named) + spread) / (1 + z2 / named)


def calibration_text(label: str, known: dict[str, tuple[int, int]]) -> str:
    """How often the label was wrong, of models whose kind is known; nothing for a label that was hardly tried.

    A handful without an error tells nothing. Errors are told of any number.

    Example:
        >>> calibration_text("newton", {"newton": (0, 7)})
        ''
    """
    wrong, named = known.get(label, (0, 1))
    limit = upper_limit(wrong, named)
    if not wrong and limit > HIGH:
        return ""
    return (
        f"; of {named} models made here that got this label it was wrong for {wrong} "
        f"(at most {limit:.1%}, 95% limit)"
    )


def spelled_out(reason: str) -> str:
    """A reason without names of numbers, and with what omega and mu are.

    Example:
        >>> spelled_out("zero_sum 0.379 is above 0.05")
        'the sum of mu over the sum of |mu| 0.379 is above 0.05; omega and mu are what a head multiplies x·x and y by'
    """
    said = re.sub("|".join(WORDS), lambda found: WORDS[found[0]], reason)
    return said + (f"; {FACTORS}" if re.search(r"\b(omega|mu)\b", said) else "")
