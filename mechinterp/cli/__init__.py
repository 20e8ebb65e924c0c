"""The command line. This file loads nothing heavy, so that Ctrl-C is handled from the start."""

import atexit
import signal
import sys

from mechinterp.cli.interrupts import interrupt, stopped
from mechinterp.rooms import names_of

__getattr__ = names_of(__name__)


def main() -> None:
    """Entry point of the console script: exit code 0, or 2 with one line on standard error."""
    # A shell that starts a command in the background has it ignore Ctrl-C.
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    names = [name for name in ("SIGINT", "SIGALRM") if listens and hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        for name in names:
            signal.signal(getattr(signal, name), interrupt)
        from mechinterp.cli.commands import run

        code = run()
    except KeyboardInterrupt:
        code = stopped()
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
    # The result is there, and the end of the process takes a moment.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
