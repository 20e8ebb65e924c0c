"""Mechanistic interpretability of attention models that do linear regression in context.

The names of __init__.pyi are loaded on first use, so that `import mechinterp` is fast.
"""

from mechinterp.rooms import homes_of, names_of
from mechinterp.version import __version__

__all__ = ["__version__", *homes_of(__name__)]
__getattr__ = names_of(__name__)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
