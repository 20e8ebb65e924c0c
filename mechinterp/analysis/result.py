"""Results of analyses, as the writers of JSON, text, pages and CSV files read them, and the meaning
and unit of the columns of their tables.

A result has a repr, `to_frame` and `plot`. These optional methods replace the defaults:
`sentences()`, a list; `tables()` and `figures()`, by name; `to_document()`, the fields of its JSON
document; `cards()`, one card per head; `head_facts()`, further facts for the cards of other
results; `switches()`, numbers for switches of the heads; `headline`, the result in a few words, for tables and titles over training.

Meaning and unit of a column belong to the class whose table it is: its `COLUMNS` has the meaning of each column, and its
`UNITS` the columns of each unit. No name has a meaning of its own. A table may take those of other classes,
`Table(known=...)`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import pandas as pd
import plotly.graph_objects as go

from mechinterp.analysis.number_format import LEAST_P, digits

_Result = TypeVar("_Result")
Meaning = tuple[str, str]
"""Meaning of a column, and its unit; the unit is empty if there is none."""
METRIC_UNIT = "unit of the metric"
"""Unit of a column whose unit is the field `unit` of its result."""
HEAD_COLUMNS = {"layer": "Number of the layer, from 0.", "head": "Number of the head, from 0."}
"""Meanings of the columns that name a head, for the `COLUMNS` of results with a row per head."""


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
    known: Mapping[str, str | Meaning] = field(default_factory=dict)
    """Meanings and units by name, for all or some of the columns; none: those of the result."""

    @property
    def _known(self) -> dict[str, Meaning]:
        known = {name: _pair(stated) for name, stated in self.known.items()}
        named = {str(name): _meaning(str(name), known) for name in self.frame.columns}
        return {name: meaning for name, meaning in named.items() if meaning is not None}

    @property
    def meanings(self) -> dict[str, str]:
        """Meanings of the columns with their units; a column without one is left out."""
        return {
            name: f"{text.removesuffix('.')}, unit {unit}." if unit else text
            for name, (text, unit) in self._known.items()
        }

    @property
    def units(self) -> dict[str, str]:
        """Units of the columns; empty for a column without one."""
        return {name: unit for name, (_, unit) in self._known.items()}


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
    bands: Mapping[str, Band] = field(default_factory=dict)
    """Ranges under random weights for some of the facts, by the name of the fact."""


def sentences_of(result: Finding) -> list[str]:
    """Sentences of a result; by default its repr."""
    return _own(result, "sentences", lambda: [repr(result)])


def tables_of(name: str, result: Finding) -> dict[str, Table]:
    """Tables of a result, with the meanings of their columns; by default `to_frame()`."""
    tables = _own(result, "tables", lambda: {name.replace("-", "_"): result.to_frame()})
    tables = {key: t if isinstance(t, Table) else Table(t) for key, t in tables.items()}
    return {key: replace(t, known=t.known or known(result)) for key, t in tables.items()}


def figures_of(name: str, result: Finding) -> dict[str, go.Figure]:
    """Figures of a result; by default `plot()`."""
    return _own(result, "figures", lambda: {name.replace("-", "_"): result.plot()})


def fields_of(name: str, result: Finding) -> dict:
    """Fields of the JSON document; by default the repr and the rows of all tables."""

    def plain() -> dict:
        first, *others = tables_of(name, result).items()
        rows = {key: records(table.frame) for key, table in (("rows", first[1]), *others)}
        return {"result": repr(result), **rows}

    return _own(result, "to_document", plain)


def records(frame: pd.DataFrame) -> list[dict]:
    """Rows of a table, one dict each."""
    return frame.to_dict(orient="records")


def _own(result: Finding, method: str, otherwise: Callable[[], _Result]) -> _Result:
    own = getattr(result, method, None)
    return own() if callable(own) else otherwise()


def known(*results: object) -> dict[str, Meaning]:
    """Meanings and units that the classes of these results give to columns, those of the first result first.

    Example:
        >>> from mechinterp.analysis.ablation.ablation import Ablation
        >>> known(Ablation)["head"]
        ('Number of the head, from 0.', '')
    """
    found: dict[str, Meaning] = {}
    for each in reversed(results):
        for cls in reversed((each if isinstance(each, type) else type(each)).__mro__):
            own = vars(cls)
            units = {name: unit for unit, names in own.get("UNITS", {}).items() for name in names}
            for name, meaning in own.get("COLUMNS", {}).items():
                text, unit = _pair(meaning)
                unit = units.get(name, unit)
                found[name] = text, getattr(each, "unit", "") if unit == METRIC_UNIT else unit
    return found


def _pair(stated: str | Meaning) -> Meaning:
    return (stated, "") if isinstance(stated, str) else stated


def _meaning(name: str, known: Mapping[str, Meaning]) -> Meaning | None:
    """Meaning and unit of a column; None if nothing states them."""
    entry = re.sub(r"_\d+$", "", name)
    if name in known:
        return known[name]
    if entry in known:
        return f"One entry. {known[entry][0]}", known[entry][1]
    if (of := name.removesuffix("_sem")) != name and of in known:
        return f"Standard error of {of}.", ""
    return None
