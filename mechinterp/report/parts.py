"""The parts of a page: sections, and switches for heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import plotly.graph_objects as go

from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Card, Table


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
        texts = {subset: with_error(*risk) for subset, risk in self.risks.items()}
        return {name: getattr(self, name) for name in names} | {"said": texts}


@dataclass(frozen=True)
class Section:
    """One part of the page."""

    title: str
    text: str
    method: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """By name; those with frames share one slider. The first is shown, the others unfold."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """By name; each becomes <name>.csv, and is shown or unfolds if it has no more than `longest_table` rows."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Of the columns of the tables."""
    cards: tuple[Card, ...] = ()
    legend: str = ""
    """What the bands beside numbers are."""
    toggles: Toggles | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of pages by checkpoint."""
    longest_table: int = 128
    unfolded: bool = False
    """Whether every table is shown, however long."""
