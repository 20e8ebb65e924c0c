"""Parts of a page: sections, and switches for heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import plotly.graph_objects as go

from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Card, Table


@dataclass(frozen=True)
class Toggles:
    """Switches for the heads of one layer: excess risk of each subset of heads, and predictions on a few prompts."""

    colors: tuple[str, ...]
    risks: Mapping[str, tuple[float, float]]
    """Risk and its standard error by subset; "10" means that head 0 of two is kept."""
    outputs: list[list[list[float]]]
    """Output of each head, [prompt][head][response]."""
    rest: list[float]
    """Part of the prediction that no head adds: its bias."""
    target: list[list[float]]

    def to_document(self) -> dict[str, object]:
        """Document for the script of the page."""
        names = ("risks", "outputs", "rest", "target")
        texts = {subset: with_error(*risk) for subset, risk in self.risks.items()}
        return {name: getattr(self, name) for name in names} | {"said": texts}


@dataclass(frozen=True)
class Section:
    """One section of a page."""

    title: str
    text: str
    method: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """Figures by name; figures with frames share one slider. The first is shown, the others unfold."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Tables by name, each also written as <name>.csv. A table with at most `longest_table` rows is on the page."""
    meanings: Mapping[str, str] = field(default_factory=dict)
    """Meanings of the tables' columns."""
    cards: tuple[Card, ...] = ()
    legend: str = ""
    """Explanation of the bands beside numbers."""
    toggles: Toggles | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of pages, by checkpoint."""
    longest_table: int = 128
    unfolded: bool = False
    """True: every table is shown, whatever its length."""
