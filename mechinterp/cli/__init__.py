"""The command line."""

from mechinterp.cli.main import app, main

__all__ = ["app", "main"]
