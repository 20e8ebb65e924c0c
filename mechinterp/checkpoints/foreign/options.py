"""Options for reading an external file, declared once: `load`, the command line and the site read them here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, cleandoc, signature
from pathlib import Path
from typing import Any, TypeVar

from mechinterp.config import SCORES
from mechinterp.config.model import ACTIVATIONS, LAYOUTS, MLP_NORM, NORMS, OVER_PAIRS
from mechinterp.fields import Rules

COLUMNS = ("x,y", "y,x")
PACKINGS = ("whole", "per_head")
"""Order of rows in a packed qkv matrix: all queries first, or head by head its queries, keys and values."""
SIGNS = ("plus", "minus")
ORIENTATIONS = ("out,in", "in,out")
JOINS: dict[str, tuple[str | bool, ...]] = {
    "norm": (*NORMS, MLP_NORM, "none"),
    "activation": ACTIVATIONS,
    "layout": LAYOUTS,
    "residual": (True, False),
    "context_keys": (True, False),
    "positions": ("none", "sinusoidal", "sinusoidal_halves", "rotary"),
    "rms_norm": (False, True),
    "rotary_adjacent_pairs": (True, False),
    "packing": PACKINGS,
    "rotary_base": (),
    "passes": (),
}
"""Choices for how the parts of a layer are combined, which names and shapes do not show: the fields
of `Hints.model`.

`rotary_base` is a number > 0. `passes`, the number of runs through the layers, is an integer from 1
to `MOST_PASSES`.
"""
MOST_PASSES = 64
Value = TypeVar("Value", bool, int, float, str)
Function = TypeVar("Function", bound=Callable[..., object])


def flag_of(name: str) -> str:
    """Option of the command line that sets this choice.

    Example:
        >>> flag_of("attend_to_self"), flag_of("norm")
        ('--attend-to-self', '--model norm=')
    """
    return f"--model {name}=" if name in JOINS else f"--{name.replace('_', '-')}"


def stated_option(name: str, value: object) -> str:
    """Option with its value, as typed on the command line.

    Example:
        >>> stated_option("columns", "y,x"), stated_option("residual", False)
        ('--columns y,x', '--model residual=false')
    """
    if name == "attend_to_self":
        return "--attend-to-self" if value else "--no-attend-to-self"
    written = str(value).lower() if isinstance(value, bool) else value
    return f"{flag_of(name)}{written}" if name in JOINS else f"{flag_of(name)} {written}"


def _hint(text: str, **more: object) -> Any:
    """Field of `Hints` with the text of its option, and what the option takes: min, values, metavar, kind or names."""
    return field(default=None, metadata={"help": text, **more})


@dataclass(frozen=True)
class Hints:
    """Arguments of `load`, which are options of the command line; None: the file's setting, or an
    assumption that is reported."""

    task: Mapping[str, object] | None = _hint(
        "Fields of the task of the training, if the file does not state them; default: those of the format's paper. "
        "They are the law of --prompts, too; unknown: --prompts have no known law. A JSON file, or JSON text such as "
        "'{\"noise_var\": 0}'; in Python also a TaskConfig or a dict.",
        kind=str,
        metavar="FILE.json|JSON|unknown",
    )
    format: str | None = _hint("Format of the file, if its names do not show it.", metavar="NAME")
    d_x: int | None = _hint("Dimension of a covariate.", min=1)
    d_y: int | None = _hint("Number of responses.", min=1)
    n_heads: int | None = _hint("Number of heads, if the file does not state it.", min=1)
    scale: float | None = _hint(
        "Factor on the scores, if the file does not state it; default 1/sqrt(d_head)."
    )
    attend_to_self: bool | None = _hint(
        "The query is among its own keys, or not.",
        names=["--attend-to-self/--no-attend-to-self"],
    )
    score: str | None = _hint(
        f"Score function, if the file states none: {', '.join((*SCORES, OVER_PAIRS))}; default: softmax and linear are tried.",
        values=(*SCORES, OVER_PAIRS),
        metavar="NAME",
    )
    score_slope: float | None = _hint("The constant C of the score; default 1.")
    columns: str | None = _hint("Order of a token's columns; default: tried.", values=COLUMNS)
    orientation: str | None = _hint(
        "Axes of matrices, if their names do not show them: W x or x W; default: tried.",
        values=ORIENTATIONS,
    )
    sign: str | None = _hint("Sign of the y entry in the prediction; default: tried.", values=SIGNS)
    output_column: int | None = _hint("Entry of the output that is the prediction, from 0.", min=0)
    output_scale: float | None = _hint(
        "Factor on the output of attention, if the file states none; default 1."
    )
    model: Mapping[str, object] | None = _hint(
        f"How norms, MLPs and tokens are combined, such as norm=before: {', '.join(JOINS)}; repeatable, in Python a dict; "
        "default: tried.",
        kind=list[str],
        metavar="NAME=VALUE",
    )
    map: Mapping[str, str] | None = _hint(
        "Known name for an unknown one (q=q_proj), or unused; repeatable, in Python a dict.",
        kind=list[str],
        metavar="THEIRS=KNOWN",
    )
    weights: str | None = _hint(
        "State dict to read, if the file has several, such as ema.", metavar="NAME"
    )
    predictions: str | Path | Sequence[str | Path] | None = _hint(  # noqa: RUF009
        "Predictions of the model by its own code, which prove how the file is read: arrays x, y, x_query and prediction; "
        "repeatable, with prompts of other lengths. In Python a path or a list of paths.",
        kind=list[Path],
        metavar="FILE.npz",
    )

    def __post_init__(self) -> None:
        require = Rules("", self).require
        for name, example in (("task", {"d_x": 5}), ("model", {"norm": "before"})):
            holds = isinstance(getattr(self, name), Mapping | None)
            require(name, holds, f"must be a mapping such as {example}")
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            if (least := each.metadata.get("min")) is not None:
                whole = type(value) is int and value >= least
                require(name, value is None or whole, f"must be an integer >= {least}")
            if each.type == float | None:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                holds = value is None or (number and 0 < value < math.inf)
                require(name, holds, "must be a positive number")
            if (known := each.metadata.get("values")) is not None:
                require(name, value in (None, *known), f"must be one of {'; '.join(known)}")
        named = isinstance(self.weights, str | None) and self.weights != ""
        require("weights", named, "must be the name of a state dict")
        holds = self.attend_to_self in (None, True, False)
        require("attend_to_self", holds, "must be true or false")
        for name, value in (self.model or {}).items():
            if not _is_join(name, value):
                listed = "; ".join(f"{n}={v}" for n, values in JOINS.items() for v in values)
                listed += f"; rotary_base=10000; passes=1 to {MOST_PASSES}"
                raise ValueError(f"model must have fields of {listed}, got {name}={value}.")
        holds = isinstance(self.map, Mapping | None)
        require("map", holds, "must be a mapping such as {'my_queries': 'q_proj'}")
        for theirs, known in (self.map or {}).items():
            texts = isinstance(theirs, str) and isinstance(known, str)
            if not texts or not theirs or not known or "=" in theirs + known:
                raise ValueError(f"map must have entries THEIRS=KNOWN, got {theirs}={known}.")

    @property
    def recorded(self) -> list[Path]:
        """Files of `predictions`."""
        given = self.predictions
        files = [given] if isinstance(given, str | Path) else given or ()
        return [Path(file) for file in files]

    @property
    def given(self) -> dict[str, object]:
        """Arguments that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def with_options(function: Function) -> Function:
    """Shows the fields of `Hints` as arguments of a function that takes them as `**options`, and their texts in place of
    `{options}` in its docstring."""
    shown, options = signature(function), fields(Hints)
    own = [each for each in shown.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    named = [
        Parameter(o.name, Parameter.KEYWORD_ONLY, default=None, annotation=o.type) for o in options
    ]
    function.__signature__ = shown.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    texts = "\n    ".join(f"{o.name}: {o.metadata['help']}" for o in options)
    function.__doc__ = cleandoc(str(function.__doc__)).replace("{options}", texts)
    return function


def _is_join(name: str, value: object) -> bool:
    """True if this value is possible for this field of `Hints.model`."""
    if name == "passes":
        return type(value) is int and 1 <= value <= MOST_PASSES
    if name == "rotary_base":
        return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]
    return value in JOINS.get(name, ())


def stated_or_given(name: str, stated: Value | None, given: Value | None) -> Value | None:
    """Value that the file or the user states.

    Raises:
        ValueError: If they differ.
    """
    if stated is None or given is None:
        return given if stated is None else stated
    close = name == "scale" and math.isclose(float(stated), float(given), rel_tol=1e-6)
    if not close and stated != given:
        raise ValueError(f"{name} must be the file's {stated}, got {given}.")
    return stated
