"""Lazy names of a folder of the package, imported on first use."""

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path


def stub_homes(stub: Path) -> dict[str, str]:
    """Modules of the names that a stub file imports, by name; `__version__` is left out."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: home for name, home in homes.items() if name != "__version__"}


def names_of(room: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """`__getattr__` function of a folder (PEP 562).

    Args:
        homes: Module of each name.
    Example:
        >>> names_of("mechinterp.theory", {"modes": "mechinterp.theory.linear"})("modes").__name__
        'modes'
    """

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
