"""Optional progress callback for slow loops."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

ProgressCallback = Callable[[Sequence[Any], str], Iterable[Any]]
"""Function that yields the items of a loop and may show how many are done; the text describes the loop."""


def no_progress(items: Sequence[Item], text: str) -> Iterable[Item]:
    """The items unchanged; no progress is shown.

    Example:
        >>> list(no_progress([1, 2], "counting"))
        [1, 2]
    """
    return items
