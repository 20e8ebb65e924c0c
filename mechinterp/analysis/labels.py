"""Texts of answers, from texts.toml: labels, learners, numbers, columns and the glossary of the page; and the counts of
labels in the calibrations, from calibration.csv, which `python -m analyses.calibration.counts` writes."""

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechinterp.config import TaskConfig

PAIRS = "the prompt's pairs (x_l, y_l)"


@dataclass(frozen=True)
class Label:
    """Texts and calibration counts of a label."""

    text: str
    """Description of a model with this label: without its formula for one layer, with it for several."""
    meaning: str
    """Line in the glossary of the page."""
    wrong: int
    """Number of calibration models that got this label although it is wrong (default limits)."""
    named: int
    """Number of calibration models that got this label; all were made after the rules."""
    name: str = ""
    """Name of the algorithm in lists of algorithms."""
    numbers: Sequence[str] = ()
    """Letters of the fitted numbers, in order."""
    cases: Sequence[str] = ()
    """Simple learners that are special cases of the label, so that they are no alternative to it.
    """

    @classmethod
    def of_kind(cls, kind: str) -> dict[str, "Label"]:
        """Texts and counts of all labels of a kind; a label without counts is an error."""
        labels = {}
        for name, row in TEXTS[kind].items():
            wrong, named = COUNTS[name]
            labels[name] = cls(**row, wrong=wrong, named=named)
        return labels


TEXTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("texts.toml").read_text(encoding="utf-8")
)
with Path(__file__).with_name("calibration.csv").open(encoding="utf-8") as file:
    COUNTS = {row["label"]: (int(row["wrong"]), int(row["named"])) for row in csv.DictReader(file)}


@dataclass(frozen=True)
class CalibratedRange:
    """Tasks of the calibration models of a kind, whose counts say nothing about tasks outside."""

    d_x: tuple[int, int]
    """Smallest and largest dimension."""
    context_length: tuple[int, int]
    """Smallest and largest number of pairs."""
    noise: float
    """Largest noise variance, as a multiple of the variance of the response without noise."""

    def holds(self, task: TaskConfig) -> bool:
        """True if the sizes and the noise of a task lie in the range, and neither its task vectors drift nor its noise varies.

        Example:
            >>> PATTERNS_RANGE.holds(TaskConfig()), PATTERNS_RANGE.holds(TaskConfig(d_x=50))
            (True, False)
        """
        sizes = ((task.d_x, self.d_x), (task.context_length, self.context_length))
        within = all(low <= size <= high for size, (low, high) in sizes)
        plain = task.drift == 1 and len(task.noise_levels) == 1
        return within and plain and task.noise_variance <= self.noise * task.signal_var


PATTERNS_RANGE = CalibratedRange(d_x=(2, 24), context_length=(5, 200), noise=0.5)
"""Range of the second calibration of one layer (analyses/calibration/fresh.py and plain_training.py)."""
ALGORITHMS_RANGE = CalibratedRange(d_x=(3, 5), context_length=(12, 35), noise=0.3)
"""Range of the counted models of several layers (analyses/algorithms/after_families.py)."""


PATTERNS = Label.of_kind("patterns")
"""Labels of one layer of attention."""
ALGORITHM_LABELS = Label.of_kind("algorithms")
"""Labels of several layers."""
NO_LABEL_TEXTS: dict[str, str] = TEXTS["no_label"]
LEARNER_TEXTS: dict[str, str] = TEXTS["learners"]
"""Texts for simple learners, by name."""
