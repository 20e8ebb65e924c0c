"""Texts of answers, from texts.toml: labels, learners, numbers, columns and the glossary of the page; and the counts of
labels in the calibrations, from calibration.csv, which `python -m analyses.calibration.counts` writes."""

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


TEXTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("texts.toml").read_text(encoding="utf-8")
)
with Path(__file__).with_name("calibration.csv").open(encoding="utf-8") as file:
    COUNTS = {row["label"]: (int(row["wrong"]), int(row["named"])) for row in csv.DictReader(file)}


def _labels(kind: str) -> dict[str, Label]:
    """Texts and counts of all labels of a kind; a label without counts is an error."""
    rows = {}
    for name, row in TEXTS[kind].items():
        wrong, named = COUNTS[name]
        rows[name] = Label(**row, wrong=wrong, named=named)
    return rows


PATTERNS = _labels("patterns")
"""Labels of one layer of attention."""
ALGORITHMS = _labels("algorithms")
"""Labels of several layers."""
NO_LABEL: dict[str, str] = TEXTS["no_label"]
LEARNERS: dict[str, str] = TEXTS["learners"]
"""Texts for simple learners, by name."""
