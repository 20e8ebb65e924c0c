"""Results of analyses, as the writers of JSON, text, pages and CSV files read them, and the meaning
and unit of the columns of their tables.

A result has a repr, `to_frame` and `plot`. These optional methods replace the defaults:
`sentences()`, a list; `tables()` and `figures()`, by name; `to_document()`, the fields of its JSON
document; `cards()`, one card per head; `head_facts()`, further facts for the cards of other
results; `switches()`, numbers for switches of the heads; `headline`, the result in a few words, for tables and titles over training.

Meaning and unit of a column belong to the class whose table it is: they are read from its `COLUMNS` and from the docstrings
of its fields and properties. No name has a meaning of its own. A table may take those of other classes, `Table(known=...)`.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from inspect import getsource
from itertools import pairwise
from textwrap import dedent
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
    known: Mapping[str, str] = field(default_factory=dict)
    """Meanings by name, for all or some of the columns; none: those of the result."""

    @property
    def meanings(self) -> dict[str, str]:
        """Meanings of the columns; a column without one is left out."""
        named = {str(column): _meaning(str(column), self.known) for column in self.frame.columns}
        return {name: meaning for name, meaning in named.items() if meaning}

    @property
    def units(self) -> dict[str, str]:
        """Units of the columns; empty for a column without one."""
        return {name: unit_of(meaning) for name, meaning in self.meanings.items()}


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


METRIC_UNIT = "unit of the metric"
HEADS = {"layer": "Number of the layer, from 0.", "head": "Number of the head, from 0."}
"""Meanings of the columns that name a head, for the `COLUMNS` of results with a row per head."""
UNIT = re.compile(r"[;,]? ?(?:in )?units? (?:of )?(1/\(x y\)|1/x\^2|y/x|y\^2|x\^2|y\b)")


def known(*results: object) -> dict[str, str]:
    """Meanings that the classes of these results give to columns, those of the first result first.

    "unit of the metric" stands for the field `unit` of the result.

    Example:
        >>> from mechinterp.analysis.ablation.ablate import Ablation
        >>> known(Ablation)["head"]
        'Number of the head, from 0.'
    """
    texts: dict[str, str] = {}
    for each in reversed(results):
        own_unit = getattr(each, "unit", "")
        unit = f"unit {own_unit}".replace("²", "^2") if own_unit else METRIC_UNIT
        own = docstrings(each if isinstance(each, type) else type(each))
        texts |= {name: text.replace(METRIC_UNIT, unit) for name, text in own.items()}
    return texts


def unit_of(meaning: str) -> str:
    """Unit named in a meaning; empty if there is none.

    Example:
        >>> unit_of("Fall of the risk, unit y^2."), unit_of("Share.")
        ('y²', '')
        >>> unit_of("Largest entry, unit 1/(x y).")
        '1/(x y)'
    """
    unit = UNIT.search(meaning)
    return unit[1].replace("^2", "²") if unit else ""


@cache
def docstrings(cls: type) -> Mapping[str, str]:
    """Docstrings of the fields and properties of a class and its bases; its `COLUMNS` come first."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        texts |= {
            n: v.__doc__ for n, v in vars(each).items() if isinstance(v, property) and v.__doc__
        }
        texts |= _of_fields(each) if is_dataclass(each) else {}
        texts |= vars(each).get("COLUMNS", {})
    return {name: " ".join(text.replace("`", "").split()) for name, text in texts.items()}


def _of_fields(cls: type) -> dict[str, str]:
    try:
        body = ast.parse(dedent(getsource(cls))).body[0].body  # type: ignore[attr-defined]
    except OSError:  # docstrings of fields need the source of the class
        return {}
    return {
        stated.target.id: text.value.value  # type: ignore[union-attr,attr-defined]
        for stated, text in pairwise(body)
        if isinstance(stated, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _meaning(column: str, known: Mapping[str, str]) -> str:
    entry = re.sub(r"_\d+$", "", column)
    of = column.removesuffix("_sem")
    if column in known:
        return known[column]
    if entry != column and entry in known:
        return f"One entry. {known[entry]}"
    if of != column and of in known:
        return f"Standard error of {of}."
    reached = column.removesuffix("_p")
    return f"Fraction of random heads that reach {reached}." if reached != column else ""
