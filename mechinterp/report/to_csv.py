"""Documents of `classify` as one table, CSV or parquet, with one row per checkpoint."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from mechinterp.checkpoints.io.files import CheckpointError, write_new, writing

OF_RUNS = ("step", "loss", "loss_sem")
"""Columns for steps of a run: the loss and its standard error."""
HEADER = ("path", "format", "pattern", "reason", "n_layers", "n_heads", "d_x", "d_y")
SUFFIXES = (".parquet", ".csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a text that spreadsheets take for a formula."""


def classification_frame(documents: Sequence[dict]) -> pd.DataFrame:
    """Path, format, pattern, reason, sizes, all evidence that is a single number or word, and the error.

    Example:
        >>> classification_frame([{"path": "x", "error": "gone"}]).columns.tolist()
        ['path', 'format', 'pattern', 'reason', 'n_layers', 'n_heads', 'd_x', 'd_y', 'error']
    """
    rows = [
        {name: _encodable(document.get(name)) for name in HEADER}
        | {
            n: _scalar(value)
            for n, value in document.get("evidence", {}).items()
            if n not in HEADER
        }
        | {name: document[name] for name in OF_RUNS if name in document}
        | {"error": _encodable(document.get("error"))}
        for document in documents
    ]
    frame = pd.DataFrame(rows, columns=None if rows else [*HEADER, "error"])
    plain = [name for name in frame.columns if name in HEADER or frame[name].notna().any()]
    return frame[[*(name for name in plain if name != "error"), "error"]].convert_dtypes()


def require_writable(file: Path) -> None:
    """Refuse a table that exists, or whose name ends in neither .parquet nor .csv.

    Raises:
        CheckpointError: If the file exists or has another ending.
    """
    if file.suffix not in SUFFIXES:
        raise CheckpointError(f"{file}: must end in {' or '.join(SUFFIXES)}.")
    if os.path.lexists(file):
        raise CheckpointError(f"{file}: already exists; it is not overwritten.")


def write_table(file: Path, documents: Sequence[dict]) -> None:
    """Write the table of these documents.

    Raises:
        CheckpointError: If the file exists, has another ending or cannot be written.
    """
    require_writable(file)
    frame = classification_frame(documents)
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


def _scalar(value: object) -> object:
    """A single number, word or truth value; the entry of a list with one entry; None for anything else."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, bool | int | float | str) else None
