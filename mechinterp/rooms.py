"""Names that a folder of the package offers, loaded when they are first used."""

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path


def stub_homes(stub: Path) -> dict[str, str]:
    """The names that a stub imports for editors and type checkers, with their modules; not the version."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: home for name, home in homes.items() if name != "__version__"}


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
