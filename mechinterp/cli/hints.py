"""Options that state what a file of weights does not state."""

from contextlib import suppress
from dataclasses import Field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args

import typer

from mechinterp.checkpoints.foreign.options import Hints


def _option(hint: Field) -> Any:
    """Annotation of the option for one field of `Hints`."""
    more = dict(hint.metadata)
    kind, names = more.pop("kind", get_args(hint.type)[0]), more.pop("names", ())
    values = more.pop("values", ())
    more.setdefault("metavar", "|".join(values) or None)
    return Annotated[kind | None, typer.Option(*names, **more)]


def hints_of(**given: Any) -> Hints:
    """Settings that the options state for files that do not state them."""
    from mechinterp.config import task_fields

    task, rows = given.pop("task", None), given.pop("model", None)
    joins = (row.partition("=") for row in rows or ())
    model = {name: _value(value) for name, _, value in joins} or None
    return Hints(task=None if task is None else task_fields(task), model=model, **given)


def _value(text: str) -> str | bool | int | float:
    """Value of a typed word: true, false, a number or a text."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


hints_of.__signature__ = Signature(  # type: ignore[attr-defined]
    [
        Parameter(hint.name, Parameter.KEYWORD_ONLY, default=None, annotation=_option(hint))
        for hint in fields(Hints)
    ]
)
