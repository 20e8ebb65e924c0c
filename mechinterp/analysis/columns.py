"""Meaning and unit of the columns of tables, read from the docstrings of the results behind them."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any

COMMON = {
    "attention": "Attention weight of the query on the token.",
    "checkpoint": "Folder or file.",
    "component": "Principal component of x, 1 for the one learned first.",
    "context_length": "Number of pairs before the query.",
    "evidence": "Name of the measured number.",
    "head": "Number of the head, from 0.",
    "how": "How the number is computed.",
    "input": "Input of the later head: its query, key or value.",
    "key": "Number of the token, from 0.",
    "label": "Kind of head: signs of omega and mu, or why the head has none.",
    "later_head": "Number of the reading head, from 0.",
    "later_layer": "Layer of the reading head, from 0.",
    "layer": "Number of the layer, from 0.",
    "learner": "Closed-form learner that the model is compared with.",
    "models": "Number of models of the setting with this pattern.",
    "n_kept": "Number of heads kept.",
    "of": "Number of models of the setting.",
    "order": "Order in which heads are masked.",
    "other": "The other head.",
    "pattern": "Pattern that the heads form together.",
    "pos": "Position of the target in the prompt, from 0; the last position is the query's.",
    "prompt": "Number of the prompt.",
    "random_weights": "Range of the number over models with random initial weights, 5% to 95%.",
    "seed": "Seed of the initial weights.",
    "setting": "Models that differ in nothing but seeds, named by the common start of their names.",
    "step": "Number of updates.",
    "tasks": "Tasks of the prompts: those of the pool, or new ones.",
    "value": "The number.",
}
"""Columns that count rows or name what a row is about."""
METRIC_UNIT = "unit of the metric"
UNIT = re.compile(r"[;,]? ?(?:in )?units? (?:of )?(1/\(x y\)|1/x\^2|y/x|y\^2|x\^2|y)\b")


def meanings(result: object, columns: Iterable[object]) -> dict[str, str]:
    """Meanings of the columns of a result's tables; columns without a field of that name are left
    out.

    A column `mu_0` is an entry of the field `mu`. A column `rise_sem` without a docstring is the
    standard error of `rise`. "unit of the metric" stands for the field `unit` of the result.

    Example:
        >>> from mechinterp.analysis.ablation.orders import PairAblation
        >>> meanings(PairAblation, ["head", "interaction_sem"])["head"]
        'Number of the head, from 0.'
    """
    known = dict(COMMON)
    for each in reversed(list(_results(result))):
        unit = f"unit {each.unit}".replace("²", "^2") if getattr(each, "unit", "") else METRIC_UNIT
        texts = docstrings(each if isinstance(each, type) else type(each))
        known |= {name: text.replace(METRIC_UNIT, unit) for name, text in texts.items()}
    named = {str(column): _meaning(str(column), known) for column in columns}
    return {name: meaning for name, meaning in named.items() if meaning}


def unit_of(meaning: str) -> str:
    """Unit named in a meaning; empty if there is none.

    Example:
        >>> unit_of("Fall of the risk, unit y^2."), unit_of("Share.")
        ('y²', '')
    """
    unit = UNIT.search(meaning)
    return unit[1].replace("^2", "²") if unit else ""


@cache
def docstrings(cls: type) -> Mapping[str, str]:
    """Docstrings of the fields and properties of a class and its bases, and its `COLUMNS`."""
    texts: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        texts |= {
            n: v.__doc__ for n, v in vars(each).items() if isinstance(v, property) and v.__doc__
        }
        texts |= vars(each).get("COLUMNS", {})
        if not is_dataclass(each):
            continue
        try:
            body = ast.parse(dedent(getsource(each))).body[0].body  # type: ignore[attr-defined]
        except OSError:  # docstrings of fields need the source of the class
            continue
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[field.target.id] = text.value.value  # type: ignore[union-attr,attr-defined]
    return {name: " ".join(text.replace("`", "").split()) for name, text in texts.items()}


def _results(result: Any) -> Iterator[Any]:
    """A result and the results inside it, one of each class."""
    if isinstance(result, type):
        yield result
        return
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, tuple):
        for each in {type(each): each for each in result}.values():
            yield from _results(each)
        return
    if not is_dataclass(result):
        return
    yield result
    for each in fields(result):
        yield from _results(getattr(result, each.name))


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
