"""Names that a folder of the package offers, loaded when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module


def names_of(room: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a folder (PEP 562).

    Args:
        homes: By name the module that has it.
    Example:
        >>> names_of("mechinterp.theory", {"modes": "mechinterp.theory.linear"})("modes").__name__
        'modes'
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
