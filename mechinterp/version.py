"""The version of the package, which pyproject.toml and checkpoints state."""

__version__ = "0.2.0"
