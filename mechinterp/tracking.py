"""How far a long computation has come: its loop goes through a function that whoever calls it may give."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")

Track = Callable[[Sequence[Any], str], Iterable[Any]]
"""Gives the items of a loop back one by one, and may tell of it; the text says what the loop does."""


def untracked(items: Sequence[Item], text: str) -> Iterable[Item]:
    """The items, and nothing is told.

    Example:
        >>> list(untracked([1, 2], "counting"))
        [1, 2]
    """
    return items
