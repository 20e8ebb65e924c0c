"""Three lines that say what a model computes, how sure that is, and what it is not."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

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

The confirming half of analyses/calibration.py, as analyses/results/calibration_labels.csv counts it.
"""
KNOWN_ALGORITHMS = {
    "gd_plus_plus": (0, 7),
    "gradient_descent": (3, 24),
    "newton": (0, 7),
    "preconditioned_gd": (0, 7),
    "preprocess_then_optimise": (0, 14),
    "ridge_like": (0, 7),
    "sparse_shrinkage": (0, 14),
}
"""The same of several layers, by analyses/algorithm_calibration.py."""
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
FACTORS = "omega and mu are what a head multiplies x·x and y by"


@dataclass(frozen=True)
class Verdict:
    """What a model computes, in three lines."""

    computes: str
    """The formula, with its numbers."""
    sure: str
    """How much of the prediction it explains, how far random weights get, how often the label is wrong."""
    is_not: str
    """What comes next, and by how much."""

    @property
    def lines(self) -> dict[str, str]:
        """The three under their headings."""
        return {
            "What it computes": self.computes,
            "How sure": self.sure,
            "What it is not": self.is_not,
        }

    def __str__(self) -> str:
        return "\n".join(f"{heading}: {text}." for heading, text in self.lines.items())


def none_of(known: str, pattern: str) -> str:
    """That a model is none of what is known, "formulas" or "algorithms"."""
    return {
        "undetermined": f"none of the known {known} clearly (undetermined)",
        "unstructured": "nothing that random weights do not (unstructured)",
    }[pattern]


def nearest_learners(
    computes: str,
    learners: Sequence[str],
    r2: Float[np.ndarray, " learner"],
    r2_sem: Float[np.ndarray, " learner"],
    chance: str = "",
) -> Verdict:
    """The verdict on a model without a formula: the simple learner that comes nearest, and the next."""
    order = np.argsort(-np.nan_to_num(r2, nan=-np.inf), kind="stable")[:2]
    first, second = (f"{LEARNERS[learners[n]]}, {explained(r2[n], r2_sem[n])}" for n in order)
    far = "" if r2[order[0]] >= NEAR else ", and not near"
    return Verdict(
        computes, f"the nearest simple learner is {first}{far}{chance}", f"the next is {second}"
    )


def explained(r2: float, sem: float) -> str:
    """R^2 with its standard error, to the digit that the error is of.

    Example:
        >>> explained(0.99894, 0.00012), explained(1.0, 0.0)
        ('R² = 0.9989 ± 0.0001', 'R² = 1')
    """
    return f"R² = {with_error(r2, sem)}"


def with_error(value: float, sem: float) -> str:
    """A number to the first digit of its standard error, at most six decimals.

    Example:
        >>> with_error(0.24321, 0.0123), with_error(152.3, 12.0), with_error(float("nan"), 1.0)
        ('0.24 ± 0.01', '152 ± 12', 'not defined')
    """
    if not np.isfinite(value):
        return "not defined"
    if abs(value) < 1e-12:
        return "0"
    if not sem > 5e-7:
        error = f" ± {sem:.0e}" if sem > 0 else ""
        return f"{value:.6f}".rstrip("0").rstrip(".") + error
    if sem >= 1000:
        return f"{digits(value)} ± {digits(sem)}"
    decimals = int(np.clip(-np.floor(np.log10(sem)), 0, 6))
    return f"{value:.{decimals}f} ± {sem:.{decimals}f}"


def digits(value: float) -> str:
    """Three significant digits; 0 for what is 0 but for rounding.

    Example:
        >>> [digits(value) for value in (1.0026, 0.88664, 152.4, 20640.0, 1e-23)]
        ['1.00', '0.887', '152', '20640', '0']
    """
    if abs(value) < 1e-12:
        return "0"
    if 1000 <= abs(value) < 100_000:
        return f"{value:.0f}"
    return f"{value:#.3g}".replace(".e", "e").rstrip(".")


def below(lead: float, sem: float) -> str:
    """How far a runner-up is behind, and whether that is more than chance.

    Example:
        >>> below(0.0027, 0.0004)
        '0.0027 ± 0.0004 below'
        >>> below(-0.0003, 0.0002)
        '0.0003 ± 0.0002 above; by predictions alone the two cannot be told apart'
    """
    side = "below" if lead >= 0 else "above"
    clear = "" if lead > 2 * sem else "; by predictions alone the two cannot be told apart"
    return f"{with_error(abs(lead), sem)} {side}{clear}"


def p_text(p: float, n_random: int) -> str:
    """A p-value from n_random random draws; at its floor, that none of them reaches so far.

    Example:
        >>> p_text(1 / 401, 400), p_text(0.2594, 400)
        ('p < 0.0025', 'p = 0.26')
    """
    if np.isnan(p):
        return "p is not defined"
    return f"p < {1 / n_random:.2g}" if p <= 1 / n_random else f"p = {p:.2g}"


def calibration_text(label: str, known: dict[str, tuple[int, int]]) -> str:
    """How often the label was wrong, of models whose kind is known; nothing for a label that was not tried."""
    if label not in known:
        return ""
    wrong, named = known[label]
    return f"; the label was wrong for {wrong} of {named} test models"


def spelled_out(reason: str) -> str:
    """A reason without names of numbers, and with what omega and mu are.

    Example:
        >>> spelled_out("zero_sum 0.379 is above 0.05")
        'the sum of mu over the sum of |mu| 0.379 is above 0.05; omega and mu are what a head multiplies x·x and y by'
    """
    said = re.sub("|".join(WORDS), lambda found: WORDS[found[0]], reason)
    return said + (f"; {FACTORS}" if re.search(r"\b(omega|mu)\b", said) else "")
