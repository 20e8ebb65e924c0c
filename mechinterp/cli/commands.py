"""The command line: parsing of arguments and exit codes; other modules do the work.

Each command imports what it needs, so that `mechinterp --help` and `classify` start fast."""

import atexit
import gc
import os
import sys
from contextlib import nullcontext
from typing import Annotated, NoReturn

import typer

from mechinterp.cli.analyses import analyse, commands
from mechinterp.cli.checkpoints import check, classify, convert, info, report
from mechinterp.cli.interrupts import INTERRUPTED, stopped
from mechinterp.cli.options import add_command, new_app, option
from mechinterp.cli.printing import (
    BROKEN_PIPE,
    TOO_LARGE,
    complain,
    is_out_of_memory,
    results_alone,
    say,
)
from mechinterp.cli.scoring import score
from mechinterp.cli.training import predict_jumps, sweep, train

KEPT = "it is not overwritten."
"""End of messages about an existing file or folder."""
UNPARSED = {"ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose words another command parses."""
app = new_app()


def show_version(wanted: bool) -> bool:
    """Print the version and exit, if wanted."""
    if wanted:
        from mechinterp.version import __version__

        say(f"mechinterp {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def common(
    version: Annotated[
        bool, option("--version", "Show the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """Find out what attention models compute when they do in-context linear regression."""


def run() -> int:
    """Run the command of sys.argv: exit code 0, or 2 with one line on standard error."""
    # Imports make millions of lasting objects; a search through them for cycles takes half a
    # second, also at exit.
    gc.set_threshold(10_000)
    atexit.register(gc.freeze)
    arguments = sys.argv[1:] or ["--help"]
    closed = sys.stdout is None
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the calling process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        as_json = "--json" in arguments and not {"--help", "-h"} & set(arguments)
        with results_alone() if as_json else nullcontext():
            code = app(arguments, standalone_mode=False, prog_name="mechinterp")
        if code == INTERRUPTED:  # by the argument parser
            stopped()
    except SystemExit as ended:
        # The argument parser exits by 1 only if the reader of its help has gone.
        raise SystemExit(BROKEN_PIPE if ended.code == 1 else ended.code) from None
    except (ValueError, OSError) as error:
        from mechinterp.checkpoints.io.files import one_line

        help_failed = isinstance(error, OSError) and error.filename is None
        where = "standard output: cannot be written ({})." if help_failed else "{}"
        _fail(_with_next_step(where.format(one_line(error))))
    except Exception as error:
        if is_out_of_memory(error):
            _fail(f"{arguments[0]} {TOO_LARGE}")
        # Errors of the argument parser; their class is not public in every version of typer.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = "" if context is None else f" See {context.command_path} --help."
        _fail(_with_value(error.format_message(), error, arguments) + hint)
    if closed and not code:  # files are written, but nobody could read the answer
        _fail("standard output: is closed, so that nothing was printed; send it to a file.")
    return code if isinstance(code, int) else 0


# The order of the help.
for command in (train, sweep, predict_jumps, check, classify, *commands()):
    add_command(app, command)  # type: ignore[arg-type]
add_command(app, analyse, context_settings=UNPARSED)
for command in (report, score, info, convert):
    add_command(app, command)


def _with_value(message: str, error: Exception, arguments: list[str]) -> str:
    """The argument parser's message, with the value of the option that it names, unless it has it."""
    names = getattr(getattr(error, "param", None), "opts", [])
    values = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in names:
            given = value if equals else following
            values.append(given if given.strip() else repr(given))
    named = all(value in message for value in values)
    return message if named else f"{message.rstrip('.')}, got {', '.join(values)}."


def _with_next_step(message: str) -> str:
    """The message, with advice to choose another --out if a file or folder is not overwritten."""
    if not message.endswith(KEPT):
        return message
    return f"{message.removesuffix('.')}; choose another --out."


def _fail(message: str) -> NoReturn:
    complain(message)
    sys.exit(2)
