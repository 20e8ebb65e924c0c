"""Optional progress callback of loops that take long."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

ProgressCallback = Callable[[Sequence[Any], str], Iterable[Any]]
"""Returns the items of a loop one by one and may show how many are done; the text says what the loop does."""


def no_progress(items: Sequence[Item], text: str) -> Iterable[Item]:
    """The items as they are; nothing is shown.

    Example:
        >>> list(no_progress([1, 2], "counting"))
        [1, 2]
    """
    return items
