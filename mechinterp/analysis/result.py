"""Results of analyses, as the writers of JSON, text, pages and CSV files read them.

A result has a repr, `to_frame` and `plot`. These optional methods replace the defaults:
`sentences()`, a list; `tables()` and `figures()`, by name; `to_document()`, the fields of its JSON
document; `cards()`, one card per head; `head_facts()`, further facts for the cards of other
results; `headline`, the result in a few words, for tables and titles over training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.number_format import LEAST_P, digits

T = TypeVar("T")


@runtime_checkable
class Finding(Protocol):
    """Result of an analysis; its repr is a sentence."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a result, and how it is shown in a terminal."""

    frame: pd.DataFrame
    title: str = ""
    by: str = ""
    """Column that selects rows: if not all rows are shown, those with the largest entries are."""
    per: str = ""
    """Column that splits the table: one table for each of its values."""
    quiet: tuple[str, ...] = ()
    """Columns that are shown only with all rows."""
    brief: bool = True
    """True: the table is always shown. False: only with all tables; it is written as a file in both
    cases."""
    least_p: float = LEAST_P
    """Smallest p-value that can be resolved."""


@dataclass(frozen=True)
class Band:
    """A number and its range under random weights, drawn on one scale that includes 0."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.low)} to {digits(self.high)}"

    @property
    def places(self) -> tuple[float, float, float]:
        """Places of low, high and value on the scale, from 0 to 100."""
        numbers = (0.0, self.low, self.high, self.value)
        start, length = min(numbers), (max(numbers) - min(numbers)) or 1.0
        low, high, value = (round(100 * (number - start) / length, 1) for number in numbers[1:])
        return low, high, value


@dataclass(frozen=True)
class Card:
    """Facts about one head."""

    title: str
    label: str
    meaning: str
    color: str
    facts: Mapping[str, str]
    bands: Mapping[str, tuple[Band, ...]] = field(default_factory=dict)
    """Ranges under random weights for some of the facts, by the name of the fact; one band for each
    number."""


def sentences_of(result: Finding) -> list[str]:
    """Sentences of a result; by default its repr."""
    return _own(result, "sentences", lambda: [repr(result)])


def tables_of(name: str, result: Finding) -> dict[str, Table]:
    """Tables of a result; by default `to_frame()`."""
    tables = _own(result, "tables", lambda: {name.replace("-", "_"): result.to_frame()})
    return {key: t if isinstance(t, Table) else Table(t) for key, t in tables.items()}


def figures_of(name: str, result: Finding) -> dict[str, go.Figure]:
    """Figures of a result; by default `plot()`."""
    return _own(result, "figures", lambda: {name.replace("-", "_"): result.plot()})


def fields_of(name: str, result: Finding) -> dict:
    """Fields of the JSON document; by default the name, the repr and the rows of all tables."""

    def plain() -> dict:
        first, *others = tables_of(name, result).items()
        rows = {key: records(table.frame) for key, table in (("rows", first[1]), *others)}
        return {"analysis": name, "result": repr(result), **rows}

    return _own(result, "to_document", plain)


def records(frame: pd.DataFrame) -> list[dict]:
    """Rows of a table, one dict each."""
    return frame.to_dict(orient="records")


def _own(result: Finding, method: str, otherwise: Callable[[], T]) -> T:
    own = getattr(result, method, None)
    return own() if callable(own) else otherwise()
