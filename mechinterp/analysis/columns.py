"""Meaning and unit of a table's columns, as the fields and properties of the results behind it say them."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import getsource
from itertools import pairwise
from textwrap import dedent

COMMON = {
    "attention": "Weight the query gives to the token.",
    "checkpoint": "Folder or file.",
    "component": "Principal component of x, 1 for the one learned first.",
    "context_length": "Pairs before the query.",
    "evidence": "What was measured.",
    "head": "Number of the head, from 0.",
    "how": "How this was computed.",
    "input": "What the later head makes of it: its query, key or value.",
    "key": "The token, from 0.",
    "label": "Kind of head: signs of omega and mu, or why it has none.",
    "later_head": "The head that reads, from 0.",
    "later_layer": "The layer that reads, from 0.",
    "layer": "Number of the layer, from 0.",
    "learner": "Closed-form learner that the model is compared with.",
    "models": "Models of the setting that form this pattern.",
    "n_kept": "Number of heads kept.",
    "of": "Models of the setting.",
    "order": "Order in which heads are masked.",
    "other": "The other head.",
    "pattern": "What the heads form together.",
    "pos": "Position of the target in the prompt, from 0; the last is the query's.",
    "prompt": "Number of the prompt.",
    "random_weights": "Where 90% of models with random initial weights lie in this number.",
    "seed": "Seed of the initial weights.",
    "setting": "Models that differ in nothing but seeds, by what their names begin with.",
    "step": "Updates made.",
    "tasks": "Whether the prompts have tasks of the pool or new ones.",
    "value": "The number.",
}
"""Columns that count or name what a row is of."""
UNIT = re.compile(r"[;,]? ?(?:in )?units? (?:of )?(1/\(x y\)|1/x\^2|y/x|y\^2|x\^2|y)\b")


def meanings(result: object, columns: Iterable[object]) -> dict[str, str]:
    """What the columns of a result's tables mean; those that no field is named for are left out.

    A column `mu_0` is an entry of the field `mu`, and `rise_sem` without a docstring the standard error of `rise`.

    Example:
        >>> from mechinterp.analysis.ablation.orders import PairAblation
        >>> meanings(PairAblation, ["head", "interaction_sem"])["head"]
        'Number of the head, from 0.'
    """
    known = dict(COMMON)
    for cls in reversed(list(_classes(result))):
        known |= docstrings(cls)
    named = {str(column): _meaning(str(column), known) for column in columns}
    return {name: meaning for name, meaning in named.items() if meaning}


def unit_of(meaning: str) -> str:
    """The unit that a meaning names; none for one without.

    Example:
        >>> unit_of("Fall of the risk, unit y^2."), unit_of("Share.")
        ('y²', '')
    """
    unit = UNIT.search(meaning)
    return unit[1].replace("^2", "²") if unit else ""


@cache
def docstrings(cls: type) -> Mapping[str, str]:
    """The docstring of each field and property of a class, its bases' before it, and its `COLUMNS` beside them."""
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
        except OSError:  # without its source a class has no docstrings of fields
            continue
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[field.target.id] = text.value.value  # type: ignore[union-attr,attr-defined]
    return {name: " ".join(text.replace("`", "").split()) for name, text in texts.items()}


def _classes(result: object) -> Iterator[type]:
    """The class of a result, and those of the results in it, the nearest first."""
    if isinstance(result, type):
        yield result
        return
    if isinstance(result, Mapping):
        result = tuple(result.values())
    if isinstance(result, tuple):
        for each in {type(each): each for each in result}.values():
            yield from _classes(each)
        return
    if not is_dataclass(result):
        return
    yield type(result)
    for each in fields(result):
        yield from _classes(getattr(result, each.name))


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
