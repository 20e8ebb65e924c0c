"""Ctrl-C in a command: one line, at any moment. This file loads nothing heavy."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
RETRY = 0.02
"""Seconds until Ctrl-C is tried again while an import must end first."""


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of Ctrl-C: raise KeyboardInterrupt, except in the middle of an import.

    Libraries swallow an exception in their imports and fail later in other ways. An import by a
    command itself comes before all work, so the process ends at once; any other import is let end.
    """
    importer = outermost_importer(frame)
    if importer is None:
        raise KeyboardInterrupt
    if importer.startswith("mechinterp.cli") or not hasattr(signal, "setitimer"):
        os._exit(stopped())
    signal.setitimer(signal.ITIMER_REAL, RETRY)


def outermost_importer(frame: FrameType | None) -> str | None:
    """Name of the module whose import statement is running; None if nothing is being imported."""
    importer, inner = None, ""
    while frame is not None:
        if "importlib._bootstrap" in inner and "importlib" not in frame.f_code.co_filename:
            importer = str(frame.f_globals.get("__name__", ""))
        inner, frame = frame.f_code.co_filename, frame.f_back
    return importer


def stopped() -> int:
    """Say in one line that Ctrl-C ended the command; returns the exit code."""
    trains = sys.argv[1:2] in (["train"], ["sweep"])
    text = "interrupted; to continue, add --resume." if trains else "interrupted."
    sys.stderr.write(f"mechinterp: {text}\n")
    sys.stderr.flush()
    return INTERRUPTED
