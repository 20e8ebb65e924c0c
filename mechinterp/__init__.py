"""Mechanistic interpretability of attention models that do linear regression in context.

The names of __init__.pyi are loaded on first use, so that `import mechinterp` is fast.
"""

from pathlib import Path

from mechinterp.rooms import names_of, stub_homes
from mechinterp.version import __version__

_HOMES = stub_homes(Path(__file__).with_suffix(".pyi"))
__all__ = ["__version__", *_HOMES]

__getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
