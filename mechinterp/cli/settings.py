"""Options of one analysis, read from the arguments of its function."""

from collections.abc import Sequence
from inspect import Parameter
from types import NoneType
from typing import TYPE_CHECKING, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from mechinterp.analysis.registry import Analysis

SHARED = ("n_prompts", "seed", "context_length")
"""Arguments that all analyses take by options of the command itself."""
PLAIN = (int, float, str)


def settings_of(name: str, analysis: "Analysis", words: Sequence[str]) -> dict[str, object]:
    """Further arguments of an analysis, from what follows its own options on the command line.

    A truth value is `--sequential` or `--no-sequential`; an option of several values is repeated.

    Raises:
        ValueError: If there is no such option, or its value is of the wrong type.
    Example:
        >>> from mechinterp.analysis.registry import ANALYSES
        >>> settings_of("p-probe", ANALYSES["p-probe"], ["--layer", "1", "--variant=map"])
        {'layer': 1, 'variant': 'map'}
    """
    hints = get_type_hints(analysis.function)
    kinds = {
        option: kind
        for option, parameter in analysis.options.items()
        if option not in SHARED and (kind := _kind(hints.get(option), parameter)) is not None
    }
    settings: dict[str, object] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        off = key.removeprefix("no_")
        if kinds.get(off) is bool and not equals:
            settings[off] = key == off
            continue
        if not option.startswith("--") or key not in kinds or kinds[key] is bool:
            known = (
                ", ".join(f"--{each.replace('_', '-')}" for each in kinds) or "no further options"
            )
            raise ValueError(f"{name} takes {known}, got {word}.")
        if not equals:
            if not left:
                raise ValueError(f"{option} needs a value.")
            value = left.pop(0)
        kind = kinds[key]
        if isinstance(kind, tuple):
            settings[key] = [*settings.get(key, []), _value(option, value, kind[0])]  # type: ignore[misc]
        else:
            settings[key] = _value(option, value, kind)
    return settings


def _kind(hint: object, parameter: Parameter) -> type | tuple[type] | None:
    """A type that a word can be turned into, in a tuple if there may be several; None for others."""
    if hint is None and parameter.default not in (None, Parameter.empty):
        hint = type(parameter.default)
    choices = [each for each in (get_args(hint) or (hint,)) if each is not NoneType]
    if get_origin(hint) in (list, tuple, Sequence):
        return (choices[0],) if choices[0] in PLAIN else None
    for choice in choices:
        if choice is bool or choice in PLAIN:
            return choice
        if get_origin(choice) in (list, tuple, Sequence):
            return _kind(choice, parameter)
    return None


def _value(option: str, word: str, kind: type) -> object:
    try:
        return kind(word)
    except ValueError:
        words = {int: "an integer", float: "a number"}
        raise ValueError(f"{option} must be {words[kind]}, got {word!r}.") from None
