"""Ctrl-C, delayed while something must be done as a whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted(*, once: bool = False) -> Iterator[None]:
    """Delay Ctrl-C until the body has ended.

    Args:
        once: True: a second Ctrl-C interrupts the body at once.
    """
    # None: a handler that is not of Python.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(*about: Any) -> None:
        came.append(about)
        if once and len(came) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came and callable(before):
        before(*came[0])
