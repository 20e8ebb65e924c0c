"""Text and tables within the terminal's width."""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

import pandas as pd

from mechinterp.analysis.number_format import LEAST_P, cell, narrow_cell
from mechinterp.checkpoints.io.files import spelled
from mechinterp.display import ROWS_SHOWN

LEAST_WIDTH = 40
RELATIONS = "=<>±∝≥≤−"
UNBROKEN = f" (?=[{RELATIONS}])|(?<=[{RELATIONS}]) "
"""Spaces that are not broken."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def wrapped(text: str, indent: str = "") -> str:
    """Text wrapped between words to the terminal's width; continuation lines are indented.

    Lines are not broken next to signs such as = or ±.

    Example:
        >>> wrapped("word " * 99, "  ").splitlines()[1].startswith("  word")
        True
    """
    text = unbroken(spelled(text, sys.stdout.encoding))
    lines = (
        textwrap.wrap(
            line,
            _width(),
            subsequent_indent=indent + " " * (len(line) - len(line.lstrip())),
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [""]
        for line in text.splitlines()
    )
    return "\n".join(line for each in lines for line in each).replace(NO_BREAK, " ")


def unbroken(text: str) -> str:
    """Text with no-break spaces beside =, ± and other signs.

    Example:
        >>> len(unbroken("R² = 0.99 ± 0.01 of it").split(" "))
        3
    """
    return re.sub(UNBROKEN, NO_BREAK, text)


def frame_text(
    frame: pd.DataFrame,
    units: Mapping[str, str] | None = None,
    *,
    wide: bool = False,
    least_p: float = LEAST_P,
) -> str:
    """Table in columns with three digits, within the terminal's width.

    Args:
        units: Units of columns, by name.
        wide: True: show all rows, and standard errors in columns of their own.
        least_p: Smallest p-value that can be resolved.
    """
    shown = frame if wide else narrow(frame.head(ROWS_SHOWN))
    named = {name: f"{name} ({unit})" for name, unit in (units or {}).items() if unit}
    cells = {
        _signs(named.get(str(name), str(name))): [
            _signs(cell(value, str(name), least_p)) for value in shown[name]
        ]
        for name in shown.columns
    }
    left = len(frame) - len(shown)
    more = [f"... and {left} more rows: --wide"] if left else []
    return "\n".join([*_columns(cells), *more])


def narrow(frame: pd.DataFrame) -> pd.DataFrame:
    """Table with layer and head in one column, and standard errors beside their values."""
    frame = frame.copy()
    if {"layer", "head"} <= set(frame.columns):
        pairs = zip(frame["layer"], frame["head"], strict=True)
        names = [f"L{x} {h}" if isinstance(h, str) else f"L{x}H{h}" for x, h in pairs]
        frame = frame.assign(head=names).drop(columns=["layer"])
    if "sem" in frame:  # standard error of the column before it
        of = frame.columns[frame.columns.get_loc("sem") - 1]
        frame = frame.rename(columns={"sem": f"{of}_sem"})
    for name in [name for name in frame.columns if f"{name}_sem" in frame.columns]:
        pairs = zip(frame[name], frame[f"{name}_sem"], strict=True)
        frame[name] = [narrow_cell(*pair) for pair in pairs]
        frame = frame.drop(columns=[f"{name}_sem"])
    return frame


def _signs(text: str) -> str:
    return spelled(text, sys.stdout.encoding)


def _columns(cells: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of a table. Columns that do not fit go below, after a copy of the first column."""
    widths = {
        name: max(map(len, (*values, *name.replace("_", " ").split())))
        for name, values in cells.items()
    }
    first, *names = cells
    blocks = [[first]]
    for name in names:
        if sum(widths[n] + 2 for n in (*blocks[-1], name)) > _width() + 2 and len(blocks[-1]) > 1:
            blocks.append([first])
        blocks[-1].append(name)
    lines = []
    for block in blocks:
        heads = [textwrap.wrap(name.replace("_", " "), widths[name]) for name in block]
        height = max(map(len, heads))
        padded = [[""] * (height - len(head)) + head for head in heads]
        rows = [*zip(*padded, strict=True), *zip(*(cells[name] for name in block), strict=True)]
        lines += [
            "  ".join(
                f"{text:>{widths[name]}}" for text, name in zip(row, block, strict=True)
            ).rstrip()
            for row in rows
        ]
    return lines


def _width() -> int:
    return max(shutil.get_terminal_size().columns, LEAST_WIDTH)
