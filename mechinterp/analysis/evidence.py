"""Numbers of evidence behind a label: value, error, limit with its direction, range under random weights, and meaning."""

from dataclasses import dataclass

import numpy as np

from mechinterp.analysis.labels import TEXTS
from mechinterp.analysis.result import Band

NUMBER_COLUMNS = {
    "evidence": "Name of the measured number.",
    "value": "The number.",
    "sem": "Standard error of the number over prompts.",
    "limit": "Limit of the number for the label.",
    "random_weights": "Range of the number over models with random initial weights, 5% to 95%.",
    "p_value": "Fraction of models with random initial weights that reach the number.",
    "how": "How the number is computed.",
}
"""Meanings of the columns of a table of numbers."""


def require_text(number: str) -> None:
    """Refuses a number that nobody could read.

    Raises:
        ValueError: If texts.toml does not say what the number is.
    """
    if number not in TEXTS["numbers"]:
        raise ValueError(
            f"A number of a label needs a text in texts.toml, [numbers], got {number}."
        )


@dataclass(frozen=True)
class Criterion:
    """A number that a label needs, with its limit."""

    name: str
    """Name of the number; `TEXTS["numbers"]` has its meaning."""
    value: float
    limit: float
    least: bool = False
    """True: the value must be at least the limit. False: at most."""

    def __post_init__(self) -> None:
        require_text(self.name)

    @property
    def holds(self) -> bool:
        """True if the number keeps its limit; a number that is not defined does not."""
        return bool(self.value >= self.limit if self.least else self.value <= self.limit)

    @property
    def bound(self) -> str:
        """The limit with its direction, such as "≥ 0.98"."""
        return f"{'≥' if self.least else '≤'} {self.limit:g}"

    def __str__(self) -> str:
        """The number beside its limit, with its meaning if the limit is broken."""
        if self.holds:
            return f"{self.name} {self.value:.4g} (limit {self.bound})"
        name = f"{self.name} ({TEXTS['numbers'][self.name]})"
        if np.isnan(self.value):
            return f"{name} is not defined"
        # A huge number means that predictions overflow.
        value = f"{self.value:.3f}" if abs(self.value) < 1e6 else f"{self.value:.1e}"
        return f"{name} is {value}, {'below' if self.least else 'above'} the limit {self.limit:g}"


@dataclass(frozen=True, eq=False)
class Number:
    """A number of evidence, as the page, JSON and the terminal show it."""

    name: str
    """Name of the number; `TEXTS["numbers"]` has its meaning."""
    value: float
    sem: float = float("nan")
    """Standard error over prompts; NaN if there is none."""
    check: Criterion | None = None
    """Limit of the number for the label, with its direction; None if the label has none."""
    band: Band | None = None
    """Range of the number over models with random initial weights; None if there is none."""
    p_value: float = float("nan")
    """Fraction of models with random initial weights that reach the number; NaN if they were not compared."""
    entry: int | None = None
    """Index of the number, if the evidence has several numbers of this name."""

    def __post_init__(self) -> None:
        require_text(self.name)

    @property
    def column(self) -> str:
        """Name of the number, with its index."""
        return self.name if self.entry is None else f"{self.name}_{self.entry}"

    @property
    def row(self) -> dict[str, object]:
        """Row of the table of evidence."""
        return {
            "evidence": self.column,
            "value": self.value,
            "sem": self.sem,
            "limit": "" if self.check is None else self.check.bound,
            "random_weights": self.band or "",
            "p_value": self.p_value,
            "how": TEXTS["numbers"][self.name],
        }


def limited(
    name: str, value: float, limit: float, *, least: bool = False, sem: float = float("nan")
) -> Number:
    """Number with a limit for the label.

    Args:
        least: True: the value must be at least the limit. False: at most.
    Example:
        >>> limited("zero_sum", 0.01, 0.05).row["limit"]
        '≤ 0.05'
    """
    return Number(name, value, sem, Criterion(name, value, limit, least))
