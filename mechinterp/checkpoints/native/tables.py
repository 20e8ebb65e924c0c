"""Parquet tables of this package: written with its mark, and read within bounds."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mechinterp.checkpoints.io.files import (
    CheckpointError,
    naming,
    readable,
    write_atomically,
    write_new,
    writing,
)

MARK = {b"written_by": b"mechinterp"}
MAX_TABLE_BYTES = 2**27
MAX_FOOTER = 2**20
MAX_COLUMNS = 1024
MAX_CELLS = 2**24
"""Largest number of cells of a table; each has at most 8 bytes."""
MAX_GROUPS = 2**12
CODECS = {"SNAPPY", "UNCOMPRESSED"}
FAULTS = (ValueError, KeyError, MemoryError, pa.ArrowException)


def write_own_table(file: Path, frame: pd.DataFrame) -> None:
    """Write a table with this package's mark; an earlier table with the mark is replaced.

    Raises:
        CheckpointError: If another file is there, or the table cannot be written.
    """
    require_own_table(file)
    write = write_atomically if os.path.lexists(file) else write_new
    with writing(file, ValueError, pa.ArrowException):
        table = pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata({**(table.schema.metadata or {}), **MARK})
        write(file, lambda target: pq.write_table(table, target))


def require_own_table(file: Path) -> None:
    """Refuse a file without this package's mark; a missing file is fine.

    Raises:
        CheckpointError: If a file without the mark is there.
    """
    if not os.path.lexists(file):
        return
    if not file.is_symlink():
        with suppress(*FAULTS), readable(file, "parquet", MAX_TABLE_BYTES):
            _require_footer(file)
            if MARK.items() <= (pq.read_metadata(file).metadata or {}).items():
                return
    rule = "must be a table written by a sweep of this version"
    raise CheckpointError(f"{file}: {rule}; it is not overwritten.")


def read_numbers(file: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """Table of numbers with at least one row, these columns and possibly others.

    Its size in memory is bounded by its size, rows and columns before any row is read.

    Args:
        columns: "integer" or "float" for each required column.
    Raises:
        CheckpointError: If it exceeds the bounds, or is not such a table.
    """
    with readable(file, "parquet", MAX_TABLE_BYTES, *FAULTS):
        _require_footer(file)
        with pq.ParquetFile(file) as stored:
            _require_numbers(stored)
            # pandas' own metadata (an index, other types) is ignored.
            frame = stored.read(use_threads=False).to_pandas(ignore_metadata=True)
    with naming(file):
        if frame.empty:
            raise ValueError("must hold at least one row, got none.")
        for name, kind in columns.items():
            if name not in frame:
                raise ValueError(f"column {name!r} is missing.")
            if frame[name].dtype.kind not in {"integer": "iu", "float": "f"}[kind]:
                raise ValueError(f"column {name!r} must be of {kind}s, got {frame[name].dtype}.")
    return frame


def _require_footer(file: Path) -> None:
    """Refuse a file that is no table, or that claims a large footer, before it is parsed."""
    with file.open("rb") as stream:
        stream.seek(-min(8, file.stat().st_size), os.SEEK_END)
        end = stream.read(8)
    if len(end) < 8 or end[4:] != b"PAR1":
        raise ValueError("must be a parquet file, got other bytes at its end")
    footer = int.from_bytes(end[:4], "little")
    if footer > MAX_FOOTER:
        raise ValueError(f"must have a footer of at most {MAX_FOOTER} bytes, got {footer}")


def _require_numbers(stored: pq.ParquetFile) -> None:
    """Refuse columns that are not plain numbers, and numbers of rows or bytes beyond the bounds."""
    about, schema = stored.metadata, stored.schema_arrow
    for value, bound, what in (
        (about.num_columns, MAX_COLUMNS, "columns"),
        (about.num_rows, MAX_CELLS // max(1, about.num_columns), "rows"),
        (about.num_row_groups, MAX_GROUPS, "row groups"),
    ):
        if not 0 <= value <= bound:
            raise ValueError(f"must hold at most {bound} {what}, got {value}")
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("must hold each column once")
    for column in schema:
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise ValueError(f"column {column.name!r} must hold numbers, got {column.type}")
    groups = [about.row_group(index) for index in range(about.num_row_groups)]
    rows = [group.num_rows for group in groups]
    if min(rows, default=0) < 0 or sum(rows) != about.num_rows:
        raise ValueError(f"must have row groups of {about.num_rows} rows, got {sum(rows)}")
    chunks = [group.column(column) for group in groups for column in range(about.num_columns)]
    if sum(abs(chunk.total_uncompressed_size) for chunk in chunks) > MAX_TABLE_BYTES:
        raise ValueError(f"must hold at most {MAX_TABLE_BYTES} bytes uncompressed")
    for chunk in chunks:
        # Other codecs can expand a few bytes to gigabytes; snappy expands at most 22 times.
        if chunk.compression not in CODECS:
            got = chunk.compression.lower()
            raise ValueError(f"must be compressed by snappy or not at all, got {got}")
