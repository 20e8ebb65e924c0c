"""Progress of slow loops, shown by whatever callback is in use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

Item = TypeVar("Item")

ProgressCallback = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a loop and may show how many are done; the text describes the loop."""


@dataclass
class _Display:
    """A callback, and whether it shows a loop already."""

    callback: ProgressCallback
    busy: bool = False

    def over(self, items: Sequence[Any], text: str) -> Iterator[Any]:
        """The items, shown by the callback."""
        self.busy = True
        try:
            yield from self.callback(items, text)
        finally:
            self.busy = False


_DISPLAY: ContextVar[_Display | None] = ContextVar("display", default=None)


def progress(items: Sequence[Item], text: str) -> Iterable[Item]:
    """The items of a slow loop, with a progress bar inside `show_progress`; loops inside this loop show none.

    Args:
        text: What the loop does.
    Example:
        >>> list(progress([1, 2], "counting"))
        [1, 2]
    """
    display = _DISPLAY.get()
    return items if display is None or display.busy else display.over(items, text)


def bar(items: Sequence[Item], text: str) -> Iterable[Item]:
    """A progress bar on the screen or in the notebook; removed when the loop is done."""
    from rich.progress import track  # slow import

    return track(items, description=text, transient=True)


@contextmanager
def show_progress(callback: ProgressCallback = bar) -> Iterator[None]:
    """Context in which slow functions show their progress.

    Args:
        callback: Function of the items of a loop and a text that yields the items; the default draws a bar.
    See also:
        `ablate`, `prune`, `local_learning_coefficient`.
    Example:
        >>> from mechinterp import ablate, load
        >>> def printed(items, text):
        ...     print(text)
        ...     yield from items
        >>> with show_progress(printed):
        ...     found = ablate(load("softmax-h2-s0"), what="heads", n_prompts=64)
        masking heads (zero)
    """
    token = _DISPLAY.set(_Display(callback))
    try:
        yield
    finally:
        _DISPLAY.reset(token)
