"""Options of an analysis on the command line, from the signature and the docstring of its function."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import Parameter, cleandoc, getsource, signature
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from mechinterp.cli.options import HINTS, Request

if TYPE_CHECKING:
    from mechinterp.analysis.registry import Analysis

Row = Mapping[str, Any]
"""Row of the table of analyses: `name`; `named`, by which the registry finds it; `text`, its description; `options`, each
with name, type and help, `several` if it takes several words, and `of`, the argument of which it is a field."""
TYPES = {"bool": bool, "float": float, "int": int, "str": str, "path": Path}
"""Types of options, by their names in the table."""
SHARED = {
    *signature(Request).parameters,
    *(hint.name for hint in HINTS),
    *("context_length", "device", "verbose", "path", "over_steps", "request", "files"),
}
"""Arguments of an analysis that are no options of its own."""
ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.M)
"""An argument with its description, in a docstring."""


def row_of(analysis: "Analysis", named: str | None = None) -> dict[str, Any]:
    """Row of the table for an analysis.

    Args:
        named: Name under which the analysis is found, if it is none of the registry.
    """
    hints, texts = get_type_hints(analysis.function), texts_of(analysis.function)
    options: list[dict[str, Any]] = []
    for name, parameter in analysis.options.items():
        if name in SHARED:
            continue
        default = parameter.default
        hint = hints.get(name, None if default is Parameter.empty else type(default))
        kinds = get_args(hint) or (hint,)
        parts = next(
            (
                each
                for each in kinds
                if is_dataclass(each) and any(get_origin(kind) is Mapping for kind in kinds)
            ),
            None,
        )
        if parts is not None:
            inner = get_type_hints(parts)
            options += [
                _option(each.name, inner[each.name], field_texts(parts), of=name)  # type: ignore[arg-type]
                for each in fields(parts)
            ]
        else:
            options.append(_option(name, hint, texts))
    return {
        "name": analysis.name,
        "named": named or analysis.name,
        "text": first_paragraph(analysis.function),
        "options": [each for each in options if each["type"]],
    }


def _option(name: str, hint: object, texts: Mapping[str, str], **more: object) -> dict[str, Any]:
    kind, several = kind_of(hint)
    row = {"name": name, "type": kind, "help": texts.get(name, ""), **more}
    return row | ({"several": True} if several else {})


def kind_of(hint: object) -> tuple[str, bool]:
    """Name of the type that a word of an option is converted to, and whether the option takes several words; an empty
    name if there is no such type.

    Example:
        >>> kind_of(int | None), kind_of(Sequence[str] | None), kind_of(str | Path), kind_of(dict)
        (('int', False), ('str', True), ('path', False), ('', False))
    """
    choices = get_args(hint) if get_origin(hint) not in (list, tuple, Sequence) else (hint,)
    choices = choices or (hint,)
    for choice in choices:
        if get_origin(choice) in (list, tuple, Sequence):
            kind, nested = kind_of(get_args(choice)[0])
            if kind and not nested:
                return kind, True
    names = [name for name, kind in TYPES.items() if kind in choices]
    return (names[-1] if "path" in names else names[0], False) if names else ("", False)


def first_paragraph(function: Callable[..., object]) -> str:
    """First paragraph of a docstring, on one line."""
    return " ".join(cleandoc(function.__doc__ or "").partition("\n\n")[0].split()).replace("`", "")


def texts_of(function: Callable[..., object]) -> dict[str, str]:
    """Descriptions of the arguments in a docstring, by name."""
    listed = cleandoc(function.__doc__ or "").partition("Args:\n")[2]
    listed = re.split(r"\n(?=\S)", listed)[0]
    return {
        name: " ".join(text.split()).replace("`", "") for name, text in ARGUMENT.findall(listed)
    }


def field_texts(cls: type) -> dict[str, str]:
    """Docstrings of the fields of a class, by name."""
    body = ast.parse(dedent(getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return {
        stated.target.id: " ".join(text.value.value.replace("`", "").split())  # type: ignore[union-attr,attr-defined]
        for stated, text in pairwise(body)
        if isinstance(stated, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
