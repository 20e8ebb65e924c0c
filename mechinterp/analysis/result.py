"""What an analysis returns, as the writers of JSON, text, pages and CSV files read it.

A result has a repr, `to_frame` and `plot`. One that has more to say has methods of these names, which the writers take
instead: `sentences()`, a list; `tables()` and `figures()` by name; `to_document()`, the fields of its JSON document;
`cards()`, one for each head; `head_facts()`, what stands on such cards beside what `cards` says; `headline`, the result
in a few words, which tables and titles over training show.
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
    """What an analysis returns; its repr is a sentence."""

    def to_frame(self) -> pd.DataFrame: ...

    def plot(self) -> go.Figure: ...


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a result, and how a terminal shows it."""

    frame: pd.DataFrame
    title: str = ""
    by: str = ""
    """Where not all rows are shown, those with the largest entries in this column are."""
    per: str = ""
    """A column; each of its values has a table of its own."""
    quiet: tuple[str, ...] = ()
    """Columns that are shown among all only."""
    brief: bool = True
    """Whether it is shown at all unless everything is; it is written as a file in any case."""
    least_p: float = LEAST_P
    """The p-value below which none can be told."""


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


def sentences_of(result: Finding) -> list[str]:
    """What a result says; of one that says no more, its repr."""
    return _own(result, "sentences", lambda: [repr(result)])


def tables_of(name: str, result: Finding) -> dict[str, Table]:
    """Its tables, the first of them `to_frame()` unless it says otherwise."""
    tables = _own(result, "tables", lambda: {name.replace("-", "_"): result.to_frame()})
    return {key: t if isinstance(t, Table) else Table(t) for key, t in tables.items()}


def figures_of(name: str, result: Finding) -> dict[str, go.Figure]:
    """Its figures, the first of them `plot()` unless it says otherwise."""
    return _own(result, "figures", lambda: {name.replace("-", "_"): result.plot()})


def fields_of(name: str, result: Finding) -> dict:
    """The fields of its JSON document: its own, or name, sentence and rows, and further tables by name."""

    def plain() -> dict:
        first, *others = tables_of(name, result).items()
        rows = {key: records(table.frame) for key, table in (("rows", first[1]), *others)}
        return {"analysis": name, "result": repr(result), **rows}

    return _own(result, "to_document", plain)


def records(frame: pd.DataFrame) -> list[dict]:
    """The rows of a table, one dict each."""
    return frame.to_dict(orient="records")


def _own(result: Finding, method: str, otherwise: Callable[[], T]) -> T:
    own = getattr(result, method, None)
    return own() if callable(own) else otherwise()
