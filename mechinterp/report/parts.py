"""The parts of a page: sections, the cards of heads in them, and numbers beside those of random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.number_format import digits


@dataclass(frozen=True)
class Band:
    """A number beside the range of random weights, drawn on one scale that holds both and 0."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.low)} to {digits(self.high)}"

    @property
    def places(self) -> tuple[float, float, float]:
        """Of low, high and the value along the scale, from 0 to 100."""
        numbers = (0.0, self.low, self.high, self.value)
        start, length = min(numbers), (max(numbers) - min(numbers)) or 1.0
        low, high, value = (round(100 * (number - start) / length, 1) for number in numbers[1:])
        return low, high, value


@dataclass(frozen=True)
class Card:
    """What is known of one head."""

    title: str
    label: str
    meaning: str
    color: str
    facts: Mapping[str, str]
    bands: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)
    """Random weights beside some of the facts, by their names; one for each number."""


@dataclass(frozen=True)
class Toggles:
    """Heads of one layer that the reader switches off: excess risk of each subset, and predictions on a few prompts."""

    colors: tuple[str, ...]
    risks: Mapping[str, tuple[float, float]]
    """Risk and its standard error by subset, "10" where head 0 of two is kept."""
    outputs: list[list[list[float]]]
    """What each head adds to the prediction, [prompt][head][response]."""
    rest: list[float]
    """What no head adds: the bias of the prediction."""
    target: list[list[float]]

    def to_document(self) -> dict[str, object]:
        """What the script of the page reads."""
        names = ("risks", "outputs", "rest", "target")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    title: str
    text: str
    method: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """By name; those with frames share one slider."""
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    """By name; each becomes <name>.csv, and is shown if it has no more than `longest_table` rows."""
    cards: tuple[Card, ...] = ()
    legend: str = ""
    """What the bands beside numbers are."""
    toggles: Toggles | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of pages by checkpoint."""
    slider: str = "step"
    """What the frames of the figures are."""
    longest_table: int = 40
