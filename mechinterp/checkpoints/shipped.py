"""Trained models by name, such as `load("softmax-h2-s0")`.

The package includes a dozen (in a clone as links to `checkpoints/`, which has all of them)."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
BUNDLED = PACKAGE / "shipped"
CLONE = PACKAGE.parent / "checkpoints"


def shipped_path(path: str | Path) -> Path:
    """The path itself if it exists, else the path of the shipped model of that name, if there is
    one.

    Example:
        >>> shipped_path("softmax-h2-s0").is_dir(), shipped_path("runs/mine")
        (True, PosixPath('runs/mine'))
    """
    name, path = str(path), Path(path)
    if os.path.lexists(path) or path.name != name:
        return path
    places = (folder / path for folder in (CLONE, BUNDLED))
    return next((place for place in places if place.is_dir()), path)


def bundled_names() -> list[str]:
    """Names of the models in the package.

    Example:
        >>> "garg-gpt2" in bundled_names()
        True
    """
    return sorted(folder.name for folder in BUNDLED.iterdir())
