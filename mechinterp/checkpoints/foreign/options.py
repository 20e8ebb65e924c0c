"""Settings that the user states for an external file that does not state them itself."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mechinterp.config import SCORES
from mechinterp.config.model import ACTIVATIONS, LAYOUTS, NORMS
from mechinterp.fields import Rules

COLUMNS = ("x,y", "y,x")
SIGNS = ("plus", "minus")
ORIENTATIONS = ("out,in", "in,out")
JOINS: dict[str, tuple[str | bool, ...]] = {
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "layout": LAYOUTS,
    "residual": (True, False),
    "context_only": (True, False),
    "positions": ("none", "sinusoidal", "sinusoidal_halves", "rotary"),
    "rms_norm": (False, True),
    "rotary_adjacent_pairs": (True, False),
    "rotary_base": (),
    "passes": (),
}
"""Choices for how the parts of a layer are combined, which names and shapes do not show: the fields
of `Hints.model`.

`rotary_base` is a number > 0. `passes`, the number of runs through the layers, is an integer from 1
to `MOST_PASSES`.
"""
MOST_PASSES = 64
HEAD_KEYS = ("n_head", "num_heads", "num_attention_heads", "n_heads", "nhead")
"""Settings beside the weights that state the number of heads."""
Value = TypeVar("Value", bool, int, float, str)


def option(name: str) -> str:
    """Option of the command line that sets this choice.

    Example:
        >>> option("attend_to_self"), option("norm")
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
        return "--attend-to-self" if value else "--context-only"
    written = str(value).lower() if isinstance(value, bool) else value
    return f"{option(name)}{written}" if name in JOINS else f"{option(name)} {written}"


@dataclass(frozen=True)
class Hints:
    """Arguments of `load`; None: the file's setting, or an assumption that is reported."""

    task: Mapping[str, object] | None = None
    """Fields of TaskConfig."""
    format: str | None = None
    """One of `FORMATS`, for a file that fits several."""
    d_x: int | None = None
    d_y: int | None = None
    n_heads: int | None = None
    scale: float | None = None
    """Factor on the scores."""
    attend_to_self: bool | None = None
    """True: the query attends to itself too."""
    score: str | None = None
    """One of `SCORES`."""
    score_slope: float | None = None
    """The constant C of the score."""
    columns: str | None = None
    """One of `COLUMNS`: the order of x and y in a token."""
    orientation: str | None = None
    """One of `ORIENTATIONS`: the axes of matrices whose names do not show them; "out,in" is that of
    torch.nn.Linear."""
    output_column: int | None = None
    """Entry of the layer's output that is the prediction, from 0; the first one for several
    responses."""
    sign: str | None = None
    """One of `SIGNS`: the prediction is the output's y entry, or minus it."""
    output_scale: float | None = None
    """Factor on the output of attention, for code that has one besides its matrices."""
    model: Mapping[str, object] | None = None
    """How norms, MLPs and tokens are combined: fields of `JOINS`."""
    map: Sequence[str] | None = None
    """Entries "theirs=known": a part of a tensor's name, and the known name that it stands for."""
    weights: str | None = None
    """Name of the state dict to read, if the file has several."""
    anyway: bool | None = None
    """True: load a file even if it was not understood."""

    def __post_init__(self) -> None:
        require = Rules("", self).require
        for name, example in (("task", {"d_x": 5}), ("model", {"norm": "before"})):
            holds = isinstance(getattr(self, name), Mapping | None)
            require(name, holds, f"must be a mapping such as {example}")
        for name, least in (("d_x", 1), ("d_y", 1), ("n_heads", 1), ("output_column", 0)):
            value = getattr(self, name)
            whole = type(value) is int and value >= least
            require(name, value is None or whole, f"must be an integer >= {least}")
        for name in ("scale", "score_slope", "output_scale"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            holds = value is None or (number and 0 < value < math.inf)
            require(name, holds, "must be a positive number")
        closed = {"score": SCORES, "columns": COLUMNS, "orientation": ORIENTATIONS, "sign": SIGNS}
        for name, known in closed.items():
            holds = getattr(self, name) in (None, *known)
            require(name, holds, f"must be one of {'; '.join(known)}")
        named = isinstance(self.weights, str | None) and self.weights != ""
        require("weights", named, "must be the name of a state dict")
        holds = self.attend_to_self in (None, True, False)
        require("attend_to_self", holds, "must be true or false")
        for name, value in (self.model or {}).items():
            if not _is_join(name, value):
                listed = "; ".join(f"{n}={v}" for n, values in JOINS.items() for v in values)
                listed += f"; rotary_base=10000; passes=1 to {MOST_PASSES}"
                raise ValueError(f"model must have fields of {listed}, got {name}={value}.")
        for row in self.map or ():
            if not re.fullmatch("[^=]+=[^=]+", row):
                raise ValueError(f"map must have entries THEIRS=KNOWN, got {row!r}.")

    @property
    def given(self) -> dict[str, object]:
        """Arguments that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _is_join(name: str, value: object) -> bool:
    """True if this value is possible for this field of `Hints.model`."""
    if name == "passes":
        return type(value) is int and 1 <= value <= MOST_PASSES
    if name == "rotary_base":
        return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]
    return value in JOINS.get(name, ())


def settle(name: str, stated: Value | None, given: Value | None) -> Value | None:
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
