"""All that the commands print: results, and errors on one line that names the path."""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

BROKEN_PIPE = 141
"""Exit code that a shell gives for SIGPIPE."""
TOO_LARGE = "needs more memory than is available."
OUTPUT: ContextVar[TextIO | None] = ContextVar("output", default=None)
"""Stream of results, while what a user's code prints goes to standard error; None: standard output."""


@contextmanager
def about_paths(*paths: Path) -> Iterator[None]:
    """Put the first path before the message of a ValueError, unless it begins with one of the
    paths."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(tuple(map(str, paths))):
            raise
        raise ValueError(f"{paths[0]}: {error}") from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(f"{paths[0]}: {TOO_LARGE}") from None


def is_out_of_memory(error: Exception) -> bool:
    """True if Python or PyTorch ran out of memory, on a GPU too."""
    # The last one comes of an import.
    messages = ("allocate memory", "CUDA out of memory", "failed to map segment")
    return isinstance(error, MemoryError) or any(words in str(error) for words in messages)


def say_of(path: Path, text: str) -> None:
    """Print a text about a path: on the path's line if it fits, else below; a single word always
    goes on that line."""
    first, _, rest = text.partition("\n")
    beside = f"{shown_path(path)}: {first}"
    below = " " in first and len(beside) > shutil.get_terminal_size().columns
    say("\n".join(filter(None, (f"{shown_path(path)}:\n{first}" if below else beside, rest))))


def shown_path(path: Path) -> str:
    """A path as one printable line; for a shipped model, its name."""
    from mechinterp.checkpoints.io.files import printable
    from mechinterp.checkpoints.shipped import BUNDLED

    return printable(path.name if path.parent == BUNDLED else str(path))


def complain(message: str) -> None:
    """Print an error on standard error: one line, which a terminal shows wrapped between words."""
    say(_filled(f"mechinterp: {' '.join(message.split())}", "  "), error=True)


def complain_in_rows(title: str, rows: Mapping[str, str]) -> None:
    """Print a table on standard error: a title, then a line for each row, its name first."""
    width = max(map(len, rows), default=0)
    complain(title)
    for name, text in rows.items():
        line = f"  {name:<{width}}  {' '.join(text.split())}"
        say(_filled(line, " " * (width + 4)), error=True)


def _filled(line: str, indent: str) -> str:
    """The line, wrapped if a person reads standard error."""
    if not sys.stderr.isatty():
        return line
    return textwrap.fill(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(text: str, *, error: bool = False) -> None:
    """Print on standard output or standard error; all output of the commands goes through here.

    Control characters, which may come from names of files, are shown as escapes, as are characters
    that the stream's encoding lacks.

    Raises:
        ValueError: If standard output is full; if its reader has closed it, the command exits
            as if by SIGPIPE.
    """
    from mechinterp.checkpoints.io.files import one_line, spelled, visible

    stream = sys.stderr if error else OUTPUT.get() or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = spelled(visible(text), encoding)
    shown = shown.encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except OSError as fault:
        # The rest of the buffer would be written again at exit.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
        if error:
            return
        if isinstance(fault, BrokenPipeError):  # closed by its reader, such as `head`
            raise SystemExit(BROKEN_PIPE) from None
        raise ValueError(f"standard output: cannot be written ({one_line(fault)}).") from None


@contextmanager
def results_alone() -> Iterator[None]:
    """Context in which standard output gets results only; prints of a user's code go to standard error."""
    token = OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        OUTPUT.reset(token)


def answer(document: object, text: str, *, as_json: bool) -> None:
    """Print the result of a command: a JSON document, or a text."""
    if as_json:
        say_json(document)
    else:
        say(text)


def say_json(document: object) -> None:
    """Print a document as JSON."""
    from mechinterp.report.to_json import dumps

    say(dumps(document))
