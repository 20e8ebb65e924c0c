"""Lazy names of a folder of the package, imported on first use: those that its `__init__.pyi` imports."""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def homes_of(folder: str) -> dict[str, str]:
    """Modules of the names that a folder offers, by name; `__version__` is left out.

    Example:
        >>> homes_of("mechinterp.theory")["modes"]
        'mechinterp.theory.linear'
    """
    inside = folder.split(".")[1:]
    stub = Path(__file__).parent.joinpath(*inside, "__init__.pyi")
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: home for name, home in homes.items() if name != "__version__"}


def names_of(folder: str) -> Callable[[str], object]:
    """`__getattr__` function of a folder (PEP 562).

    Example:
        >>> names_of("mechinterp.theory")("modes").__name__
        'modes'
    """

    def load(name: str) -> object:
        homes = homes_of(folder)
        if name not in homes:
            raise AttributeError(f"module {folder!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
