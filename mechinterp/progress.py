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


def show_progress(items: Sequence[Item], text: str) -> Iterable[Item]:
    """A progress bar on the screen or in the notebook, for the argument `progress`; removed when the loop is done.

    See also:
        `ablate_heads`, `prune`, `local_learning_coefficient`.
    Example:
        >>> from mechinterp import ablate_heads, load
        >>> found = ablate_heads(load("softmax-h2-s0"), n_prompts=64, progress=show_progress)
        >>> found.rise.shape
        (1, 2)
    """
    from rich.progress import track  # slow import

    return track(items, description=text, transient=True)
