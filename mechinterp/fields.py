"""Fields of frozen dataclasses: checked types, JSON input, and dotted names in messages."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

MAX_SIZE = 2**20
"""Upper bound on any size or count in a config, so that a file cannot cause endless loops."""

LARGEST_SETTING = 1e30
"""Upper bound on a variance, a factor or a slope in a config, so that squares and sums of its prompts stay finite."""


def build(cls: type, values: object, prefix: str = ""):
    """Dataclass from a nested dictionary; missing fields get their defaults.

    Raises:
        ValueError: If a field is unknown (the message lists the known ones) or has a wrong type.
    """
    if not isinstance(values, dict):
        example = f" such as {cls.EXAMPLE}" if hasattr(cls, "EXAMPLE") else ""
        raise ValueError(
            f"{prefix.rstrip('.') or 'A config'} must be a JSON object{example}, got {values!r}."
        )
    hints = _hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise ValueError(unknown_field(f"{prefix}{name}", prefix, list(hints)))
        if is_dataclass(hints[name]):
            arguments[name] = build(hints[name], value, f"{prefix}{name}.")
        else:
            arguments[name] = _checked(value, hints[name], f"{prefix}{name}")
    return cls(**arguments)


def set_checked(config: object, group: str) -> None:
    """Check all fields: values get the form that they have after JSON, and dictionaries become dataclasses."""
    for name, hint in _hints(type(config)).items():  # type: ignore[arg-type]
        label, value = f"{group}.{name}" if group else name, getattr(config, name)
        if not is_dataclass(hint):
            object.__setattr__(config, name, _checked(value, hint, label))
        elif not isinstance(value, hint):  # type: ignore[arg-type]
            object.__setattr__(config, name, build(hint, value, f"{label}."))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Rules:
    """Rules for the fields of a config; a violation is a ValueError with field, rule and value."""

    group: str
    """Prefix of the field names in messages."""
    config: object

    def require(self, name: str, holds: object, rule: str) -> None:
        """Refuse a field's value unless the rule holds."""
        if not holds:
            value = getattr(self.config, name)
            value = list(value) if isinstance(value, tuple) else value
            got = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
            label = f"{self.group}.{name}" if self.group else name
            raise ValueError(f"{label} {rule}, got {got}.")

    def at_least(self, least: float, *names: str) -> None:
        """Refuse the first field below a bound; None is allowed."""
        self._each(names, lambda value: value >= least, f"must be >= {least}")

    def at_most(self, most: float, *names: str) -> None:
        """Refuse the first field above a bound; None is allowed."""
        self._each(names, lambda value: value <= most, f"must be <= {most}")

    def positive(self, *names: str) -> None:
        """Refuse the first field that is 0 or negative; None is allowed."""
        self._each(names, lambda value: value > 0, "must be > 0")

    def _each(self, names: Iterable[str], holds: Callable[[Any], bool], rule: str) -> None:
        for name in names:
            value = getattr(self.config, name)
            self.require(name, value is None or holds(value), rule)

    def one_of(self, name: str, known: Iterable[str | None]) -> None:
        """Refuse a field that is not among the known values."""
        known = tuple(known)
        listed = ", ".join("null" if each is None else each for each in known)
        self.require(name, getattr(self.config, name) in known, f"must be one of {listed}")


def unknown_field(name: str, prefix: str, known: list[str]) -> str:
    """Error message for a field that does not exist."""
    listed = ", ".join(f"{prefix}{field_name}" for field_name in known) or "none"
    return f"Unknown field {name!r}; known: {listed}."


def flatten(values: dict, prefix: str = "") -> dict[str, object]:
    """Values of a nested dictionary, by dotted name."""
    leaves: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _checked(value: object, hint: object, name: str) -> object:
    """The value with its type checked; lists become tuples, and integers become floats in float fields."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
    for option in options:
        if option is float and isinstance(value, Real) and not isinstance(value, bool):
            return _finite(value, name)
        if option is int and isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
        if type(value) is option:
            return value
        if isinstance(value, list | tuple) and get_origin(option) is tuple:
            inner = get_args(option)[0]
            return tuple(_checked(v, inner, f"{name}[{i}]") for i, v in enumerate(value))
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    expected = " or ".join(words.get(o, "null" if o is NoneType else "a list") for o in options)
    raise ValueError(f"{name} must be {expected}, got {value!r}.")


def _finite(value: Real, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}.")
    return number
