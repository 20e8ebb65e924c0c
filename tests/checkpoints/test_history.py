"""A history.parquet from anywhere is a table of a known shape and size, or one clear line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mechinterp.checkpoints.checkpoint import Checkpoint, load, save
from mechinterp.checkpoints.io.files import CheckpointError
from mechinterp.checkpoints.native import tables
from mechinterp.config import ExperimentConfig
from mechinterp.training.one_layer.step import initial_weights
from tests.conftest import without_hashes

CONFIG = ExperimentConfig()
CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"


def history() -> pd.DataFrame:
    measured = ("loss", "eval_loss", "omega", "mu", "qk_diagonal", "ov_last_entry")
    columns = {name: np.full(4, 0.5, dtype=np.float32) for name in measured}
    return pd.DataFrame({"step": [0, 0, 5, 5], "head": [0, 1, 0, 1], **columns})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save(tmp_path / "model", CONFIG, initial_weights(CONFIG), step=5, history=history())
    checkpoint = load(tmp_path / "model")
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


@pytest.mark.slow
def test_the_histories_of_shipped_checkpoints_are_read_as_pandas_reads_them():
    folders = [file.parent for file in CHECKPOINTS.glob("*/history.parquet")]
    assert len(folders) > 100
    for folder in folders[::10]:
        expected = pd.read_parquet(folder / "history.parquet")
        pd.testing.assert_frame_equal(load(folder).history, expected)


def changed(**columns: object) -> Callable[[Path], None]:
    """The history with other columns; None leaves one out."""
    frame = history().assign(**{name: value for name, value in columns.items()})
    dropped = frame.drop(columns=[name for name, value in columns.items() if value is None])
    return lambda file: dropped.to_parquet(file)


def many_rows(file: Path) -> None:
    """16 MB once they are read, 57 kB on the disk."""
    table = pa.table({"step": np.zeros(tables.MAX_CELLS + 1, dtype=np.int8)})
    pq.write_table(table, file)
    assert file.stat().st_size < 100_000


def many_columns(file: Path) -> None:
    pq.write_table(pa.table({f"c{i}": [1.0] for i in range(tables.MAX_COLUMNS + 1)}), file)


def many_groups(file: Path) -> None:
    pq.write_table(pa.table({"a": np.zeros(tables.MAX_GROUPS + 1)}), file, row_group_size=1)


def long_footer(file: Path) -> None:
    metadata = {"x": "y" * (tables.MAX_FOOTER + 1)}
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata(metadata), file)


def twice(file: Path) -> None:
    columns = [pa.array([1]), pa.array([1])]
    pq.write_table(pa.Table.from_arrays(columns, names=["step", "step"]), file)


def pandas_metadata(file: Path) -> None:
    """What pandas would take as an index of columns that are not there, and as a type that is none."""
    about = {"index_columns": ["gone"], "columns": [{"name": 7}], "column_indexes": None}
    table = pa.table({"step": [0]}).replace_schema_metadata({"pandas": json.dumps(about)})
    pq.write_table(table, file)


BAD = {
    "empty file": (lambda file: file.write_bytes(b""), "must be a parquet file"),
    "text": (lambda file: file.write_text("not a table at all"), "must be a parquet file"),
    "short": (lambda file: file.write_bytes(b"PAR1"), "must be a parquet file"),
    "no footer": (lambda file: file.write_bytes(b"PAR1\xff\0\0\0PAR1"), "not a readable parquet"),
    "folder": (lambda file: file.mkdir(), "must be a regular file"),
    "pipe": (os.mkfifo, "must be a regular file"),
    "dangling": (lambda file: file.symlink_to("nowhere"), "No such file"),
    "rows": (many_rows, "must hold at most 16777216 rows, got 16777217"),
    "columns": (many_columns, "must hold at most 1024 columns, got 1025"),
    "row groups": (many_groups, "must hold at most 4096 row groups, got 4097"),
    "footer": (long_footer, "footer of at most 1048576 bytes"),
    "codec": (
        lambda file: history().to_parquet(file, compression="zstd"),
        "by snappy or not at all, got zstd",
    ),
    "twice": (twice, "must hold each column once"),
    "metadata": (pandas_metadata, "column 'head' is missing"),
    "no rows": (lambda file: history().iloc[:0].to_parquet(file), "at least one row, got none"),
    "no columns": (lambda file: pd.DataFrame(index=[0]).to_parquet(file), "'step' is missing"),
    "missing": (changed(eval_loss=None), "column 'eval_loss' is missing"),
    "text column": (changed(note="x"), "column 'note' must hold numbers, got"),
    "nested": (changed(omega=[[1.0]] * 4), "column 'omega' must hold numbers, got list"),
    "whole loss": (changed(loss=1), "column 'loss' must be of floats, got int64"),
    "broken step": (changed(step=0.5), "column 'step' must be of integers, got float64"),
    "step beyond": (changed(step=[0, 0, 6, 6]), "step must lie in 0 to 5, got 6"),
    "step below": (changed(step=[-1, -1, 5, 5]), "step must lie in 0 to 5, got -1"),
    "falling": (changed(step=[5, 5, 0, 0]), "step must not fall from row to row"),
    "head": (changed(head=[0, 1, 0, 2]), "head must lie in 0 to 1, got 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_another_file_is_refused_on_one_line(checkpoint: Checkpoint, name: str):
    file = checkpoint.path / "history.parquet"
    file.unlink()
    make, words = BAD[name]
    make(file)
    with pytest.raises(CheckpointError) as error:
        _ = checkpoint.history
    assert str(error.value).startswith(f"{file}: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_columns_of_numbers_are_kept(checkpoint: Checkpoint):
    file = checkpoint.path / "history.parquet"
    history().assign(more=[1, 2, 3, 4]).to_parquet(file)
    without_hashes(checkpoint.path)
    assert checkpoint.history is not None
    assert checkpoint.history["more"].tolist() == [1, 2, 3, 4]
