"""State dicts of one model in a file, of which one is read."""

import re
from collections.abc import Collection, Iterable, Mapping

from mechinterp.checkpoints.foreign.tensors.names import COMPLETE, piece_of
from mechinterp.checkpoints.io.files import CheckpointError

_MAX_DEPTH = 4
"""Depth of words up to which names are compared; larger values find copies in deeper containers,
but take longer."""
MOST_NAMES = 30_000
"""Files of more tensors are refused later, and are not searched for copies."""
NUMBERED_WORD = re.compile(r"(\D*)(\d+)")
MOST_SHOWN = 8
"""Number of names of state dicts in a message."""
RUN_WORDS = (
    *("seed", "run", "step", "epoch", "iter", "iteration", "model", "net", "ckpt", "checkpoint"),
    *("replica", "member", "fold", "trial", "snapshot"),
)
"""Words whose numbers count models or steps; numbers after other words count layers."""
Shapes = Mapping[str, Collection[int]]
Contents = frozenset[tuple[tuple[str, ...], tuple[int, ...]]]


def copies_in(shapes: Shapes) -> list[str]:
    """Names of state dicts with the same matrices of an attention model; empty if the file holds
    only one.

    Example:
        >>> copies_in({f"{x}.{n}.weight": (4, 4) for x in ("ema", "raw") for n in "qkv"})
        ['ema', 'raw']
        >>> copies_in({f"layers.{x}.{n}.weight": (4, 4) for x in range(2) for n in "qkv"})
        []
    """
    if len(shapes) > MOST_NAMES:  # refused later
        return []
    groups: dict[tuple[str, ...], dict[str, list]] = {}
    for name, shape in shapes.items():
        words = tuple(re.split("[./]", name))
        for depth in range(min(_MAX_DEPTH, len(words) - 1) if len(shape) > 1 else 0):
            rows = groups.setdefault(words[:depth], {}).setdefault(words[depth], [])
            rows.append((words[depth + 1 :], tuple(shape)))
    for prefix in sorted(groups, key=len):
        alike: dict[Contents, list[str]] = {}
        for child, rows in groups[prefix].items():
            if _is_attention(rows):
                alike.setdefault(_without_common_words(rows), []).append(child)
        for children in alike.values():
            if len(children) > 1 and not _are_layers(children):
                return [".".join((*prefix, child)) for child in children]
    return []


def chosen_names(shapes: Shapes, weights: str | None) -> dict[str, str]:
    """Names of the tensors of one state dict, by their names in the file.

    Args:
        weights: Name of the state dict, if a file holds several.
    Raises:
        CheckpointError: If no state dict has this name, or if there are several and none is
            named.
    """
    if weights is None:
        if copies := copies_in(shapes):
            listed = ", ".join(copies[:MOST_SHOWN]) + (", ..." if copies[MOST_SHOWN:] else "")
            raise CheckpointError(
                f"has {len(copies)} state dicts of one model ({listed}); choose one by --weights, such as --weights {copies[0]} "
                "(weights=)."
            )
        return {name: name for name in shapes}
    inside = re.compile(rf"(?:.*?[./])??{re.escape(weights)}[./](.+)", re.DOTALL)
    matched = {name: inside.fullmatch(name) for name in shapes}
    chosen = {name: match[1] for name, match in matched.items() if match is not None}
    if not chosen:
        first = dict.fromkeys(re.split("[./]", name)[0] for name in shapes)
        raise CheckpointError(
            f"weights must name a state dict in the file, one of {', '.join([*first][:MOST_SHOWN])}, got {weights!r:.80}."
        )
    return chosen


def _is_attention(rows: Iterable[tuple[tuple[str, ...], tuple[int, ...]]]) -> bool:
    pieces = (piece_of(".".join(words)) for words, _ in rows)
    parts = {piece.part for piece in pieces if piece is not None}
    return any(each <= parts for each in COMPLETE)


def _without_common_words(rows: list[tuple[tuple[str, ...], tuple[int, ...]]]) -> Contents:
    first, count = rows[0][0], 0
    while all(len(words) > count + 1 and words[count] == first[count] for words, _ in rows):
        count += 1
    return frozenset((words[count:], shape) for words, shape in rows)


def _are_layers(children: Collection[str]) -> bool:
    """True if the children are numbered as layers are: one word, counted from 0 or 1."""
    numbered = [NUMBERED_WORD.fullmatch(child) for child in children]
    if not all(numbered):
        return False
    stems = {match[1].strip("_").lower() for match in numbered if match}
    numbers = sorted(int(match[2][:9]) for match in numbered if match)
    counted = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] < 2
    return len(stems) == 1 and counted and not stems & set(RUN_WORDS)
