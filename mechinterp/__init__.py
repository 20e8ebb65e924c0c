"""What attention models compute when they do in-context linear regression.

The names of __init__.pyi are loaded when they are first used, so that `import mechinterp` stays light.
"""

from pathlib import Path

from mechinterp.rooms import names_of, stub_homes
from mechinterp.version import __version__

_HOMES = stub_homes(Path(__file__).with_suffix(".pyi"))
__all__ = ["__version__", *_HOMES]

__getattr__ = names_of(__name__, _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
