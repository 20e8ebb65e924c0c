"""A few lines that say what a model computes, how sure that is, and what it is not."""

import math
import re
from dataclasses import dataclass

import numpy as np

from mechinterp.analysis.labels import NO_LABEL, Label
from mechinterp.analysis.learners.nearest import NEAR, Nearby
from mechinterp.analysis.number_format import p_text

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
        texts = {
            "What it computes": self.computes,
            "How sure": self.sure,
            "What predicts as well": self.alike,
            "What it is not": self.is_not,
            "What to doubt": self.doubt,
        }
        return {heading: text for heading, text in texts.items() if text}

    def __str__(self) -> str:
        return "\n".join(f"{heading}: {text}." for heading, text in self.lines.items())


def none_of(kind: str, pattern: str) -> str:
    """That a model is none of what is known, "formulas" or "algorithms"."""
    return NO_LABEL[pattern].format(kind=kind)


def nearest_learners(computes: str, near: Nearby, *, chance: str = "", doubt: str = "") -> Verdict:
    """The verdict on a model without a formula: the simple learner that comes nearest, and those after it."""
    sure = f"{near.sentence}{chance}"
    if not near.is_near:
        return Verdict(computes, sure, "near to a simple learner", doubt=doubt)
    r2, sem, rest = near.r2, near.r2_sem, range(1, len(near.learners))
    behind = [n for n in rest if is_behind(r2[0] - r2[n], math.hypot(sem[0], sem[n]))]
    return Verdict(
        computes,
        sure,
        is_not=f"{near.told(behind[0])}, which is further off" if behind else NOTHING_EXCLUDED,
        alike="; ".join(near.told(n) for n in rest if n not in behind),
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


def calibration_text(label: Label) -> str:
    """How often the label was wrong, of models whose kind is known; nothing for a label that was hardly tried.

    A handful without an error tells nothing. Errors are told of any number.

    Example:
        >>> from mechinterp.analysis.labels import ALGORITHMS
        >>> calibration_text(ALGORITHMS["newton"])
        ''
    """
    limit = upper_limit(label.wrong, label.named)
    if not label.wrong and limit > HIGH:
        return ""
    return (
        f"; of {label.named} models made here that got this label it was wrong for {label.wrong} "
        f"(at most {limit:.1%}, 95% limit)"
    )


def spelled_out(reason: str) -> str:
    """A reason without names of numbers, and with what omega and mu are.

    Example:
        >>> spelled_out("zero_sum 0.379 is above 0.05")
        'the sum of mu over the sum of |mu| 0.379 is above 0.05; omega and mu are what a head multiplies x·x and y by'
    """
    text = re.sub("|".join(WORDS), lambda name: WORDS[name[0]], reason)
    return text + (f"; {FACTORS}" if re.search(r"\b(omega|mu)\b", text) else "")
