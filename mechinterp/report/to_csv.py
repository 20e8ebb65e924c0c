"""Tables of classified models, CSV or parquet, with one row per checkpoint."""

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from mechinterp.checkpoints.io.files import CheckpointError, write_new, writing

OF_RUNS = ("step", "loss", "loss_sem")
"""Columns for steps of a run: the loss and its standard error."""
HEADER = ("path", "format", "pattern", "reason", "n_layers", "n_heads", "d_x", "d_y")
TABLE_ENDINGS = (".parquet", ".csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a text that spreadsheets take for a formula."""


def classification_frame(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Path, format, pattern, reason, sizes, all that was found, and the error; a column without entries is left out.

    Args:
        rows: Rows of `model_row`, or path and error.

    Example:
        >>> classification_frame([{"path": "x", "error": "gone"}]).columns.tolist()
        ['path', 'format', 'pattern', 'reason', 'n_layers', 'n_heads', 'd_x', 'd_y', 'error']
    """
    ends = (*OF_RUNS, "error")
    found = dict.fromkeys(name for row in rows for name in row if name not in (*HEADER, *ends))
    frame = pd.DataFrame(rows, columns=[*HEADER, *found, *ends])
    shown = [n for n in frame if n in (*HEADER, "error") or frame[n].notna().any()]
    texts = {name: frame[name].map(_encodable) for name in ("path", "pattern", "reason", "error")}
    return frame.assign(**texts)[shown].convert_dtypes()


def require_writable(file: Path) -> None:
    """Refuse a table that exists, or whose name ends in neither .parquet nor .csv.

    Raises:
        CheckpointError: If the file exists or has another ending.
    """
    if file.suffix not in TABLE_ENDINGS:
        raise CheckpointError(f"{file}: must end in {' or '.join(TABLE_ENDINGS)}.")
    if os.path.lexists(file):
        raise CheckpointError(f"{file}: already exists; it is not overwritten.")


def write_table(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the table of these rows.

    Raises:
        CheckpointError: If the file exists, has another ending or cannot be written.
    """
    require_writable(file)
    frame = classification_frame(rows)
    with writing(file, ValueError):
        if file.suffix == ".csv":
            write_new(file, partial(write_csv, frame))
        else:
            write_new(file, partial(frame.to_parquet, index=False))


def write_csv(frame: pd.DataFrame, file: Path) -> None:
    """Write a table as CSV. A text that a spreadsheet would run as a formula gets an apostrophe
    before it."""
    shown = frame.rename(columns=_plain)
    texts = [name for name in shown if not is_numeric_dtype(shown[name])]
    shown.assign(**{name: shown[name].map(_plain) for name in texts}).to_csv(file, index=False)


def _plain(value: object) -> object:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def _encodable(value: object) -> object:
    """Text that UTF-8 can encode; a file name may contain bytes that are not text."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode()
