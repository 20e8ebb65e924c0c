"""Options that state what a file of weights does not state."""

from collections.abc import Mapping
from contextlib import suppress
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mechinterp.checkpoints.foreign.options import Hints


def _option(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    """Annotation of an optional option."""
    return Annotated[kind | None, typer.Option(*names, help=text, **settings)]


OPTIONS: Mapping[str, Any] = {
    "task": _option(
        Path,
        "Fields of the task of the training, if the file does not state them; default: the softmax paper's. Not the law of --prompts.",
        metavar="FILE.json",
    ),
    "format": _option(str, "Format of the file, if its names do not show it.", metavar="NAME"),
    "d_x": _option(int, "Dimension of a covariate.", min=1),
    "d_y": _option(int, "Number of responses.", min=1),
    "n_heads": _option(int, "Number of heads, if the file does not state it.", min=1),
    "scale": _option(float, "Factor on the scores, if the file does not state it."),
    "attend_to_self": _option(
        bool,
        "Let the query attend to itself, or to the context only.",
        "--attend-to-self/--context-only",
    ),
    "score": _option(
        str,
        "Score function, if the file does not state it: softmax, linear, linear/L, 1+tanh, 1+Cx, (1+Cx)^2.",
        metavar="NAME",
    ),
    "score_slope": _option(float, "The constant C of the score; default 1."),
    "columns": _option(str, "Order of a token's columns.", metavar="x,y|y,x"),
    "orientation": _option(
        str,
        "Axes of matrices, if their names do not show them: W x or x W.",
        metavar="out,in|in,out",
    ),
    "sign": _option(str, "Sign of the y entry in the prediction.", metavar="plus|minus"),
    "output_column": _option(
        int, "Entry of the layer's output that is the prediction, from 0.", min=0
    ),
    "output_scale": _option(
        float, "Factor on the output of attention, if the file does not state it."
    ),
    "model": _option(
        list[str],
        "How norms, MLPs and tokens are combined (norm=before, layout=in_turn); repeatable.",
        metavar="NAME=VALUE",
    ),
    "map": _option(
        list[str],
        "Known name for an unknown one (to_q=q_proj); repeatable.",
        metavar="THEIRS=KNOWN",
    ),
    "weights": _option(str, "State dict to read, if the file has several.", metavar="NAME"),
    "anyway": _option(bool, "Show tables even if the file was not understood.", "--anyway"),
}


def hints_of(**given: Any) -> "Hints":
    """Settings that the options state for files that do not state them."""
    from mechinterp.checkpoints.foreign.options import Hints
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
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in OPTIONS.items()
    ]
)
