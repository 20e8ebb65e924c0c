"""Checkpoint folder: config.json, model.safetensors, history.parquet, snapshots.safetensors.

Nothing in it is ever run as code. `Outline` reads its settings and shapes without its numbers and
without torch."""

import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from mechinterp.checkpoints.io.files import (
    CheckpointError,
    naming,
    nothing_at,
    printable,
    read_json,
    read_yaml,
    readable,
    write_atomically,
    write_new,
    writing,
)
from mechinterp.checkpoints.io.headers import (
    read_steps,
    require_finite_in,
    require_shapes,
    shapes_in,
)
from mechinterp.checkpoints.io.locks import require_free, settle
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict, override
from mechinterp.presets import PRESETS, preset
from mechinterp.version import __version__

MARK = {b"written_by": b"mechinterp"}
MAX_HISTORY_BYTES = 2**27
MAX_FOOTER = 2**20
MAX_COLUMNS = 1024
MAX_CELLS = 2**24
"""Largest number of cells of a history; each has at most 8 bytes."""
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
        with suppress(*FAULTS), readable(file, "parquet", MAX_HISTORY_BYTES):
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
    with readable(file, "parquet", MAX_HISTORY_BYTES, *FAULTS):
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
    if sum(abs(chunk.total_uncompressed_size) for chunk in chunks) > MAX_HISTORY_BYTES:
        raise ValueError(f"must hold at most {MAX_HISTORY_BYTES} bytes uncompressed")
    for chunk in chunks:
        # Other codecs can expand a few bytes to gigabytes; snappy expands at most 22 times.
        if chunk.compression not in CODECS:
            got = chunk.compression.lower()
            raise ValueError(f"must be compressed by snappy or not at all, got {got}")


FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
SNAPSHOTS = "snapshots.safetensors"
OWN = {"format_version", "experiment"}
"""Fields of a config.json by which this package recognises its own."""
HISTORY_FILE = "history.parquet"
FILES = ("config.json", WEIGHTS_FILE, HISTORY_FILE, SNAPSHOTS, "snapshots")
"""Contents of a checkpoint folder; earlier versions wrote "snapshots"."""
HISTORY_COLUMNS = ("loss", "eval_loss", "omega", "mu", "qk_diagonal", "ov_last_entry")
DEEP_COLUMNS = ("loss", "eval_loss", "qk_norm", "ov_norm")
"""Columns of a history besides step, head and, for DEEP_COLUMNS, layer."""


def document_file(path: Path) -> Path:
    """The config.json of a checkpoint folder.

    Raises:
        CheckpointError: If there is none.
    """
    file = path / "config.json"
    if not file.is_file():
        if not path.exists():
            raise nothing_at(path)
        rule = "a checkpoint is a folder with config.json and model.safetensors"
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise CheckpointError(f"{path}: {rule}; this {what}.")
    return file


GROUNDS = ("known", "proven", "stated")
"""Grounds of the settings of a model of other code that are not assumed."""


def document_of(
    config: ExperimentConfig,
    *,
    step: int,
    assumed: Mapping[str, object] | None = None,
    origin: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    grounds: Mapping[str, Mapping[str, object]] | None = None,
) -> dict:
    """Content of config.json: the experiment, its step, the version of the code that wrote it, and the SHA-256 of each
    other file of the checkpoint."""
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "git_commit": git_commit(),
        "step": step,
        "experiment": config.to_dict(),
    }
    kept = {ground: dict(values) for ground, values in (grounds or {}).items() if values}
    stated = {"files": files, "assumed": assumed, "origin": origin, "grounds": kept}
    return document | {name: dict(value) for name, value in stated.items() if value}


def read_document(file: Path) -> tuple[dict, ExperimentConfig]:
    """Document and experiment in a file written from `document_of`.

    Raises:
        CheckpointError: If the file cannot be read, or a field is missing or wrong.
    """
    return document_parts(read_json(file), file)


def document_parts(document: object, file: Path) -> tuple[dict, ExperimentConfig]:
    """Checked document and experiment; "files", "assumed", "origin" and "grounds" default to empty.

    Raises:
        CheckpointError: If a field is missing or wrong.
    """
    with naming(file):
        if not isinstance(document, dict):
            raise ValueError(f"must hold a JSON object, got {type(document).__name__}.")
        for name in ("format_version", "step", "experiment"):
            if name not in document:
                raise ValueError(f"field {name!r} is missing.")
        version, step = document["format_version"], document["step"]
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}.")
        if type(step) is not int or step < 0:
            raise ValueError(f"step must be an integer >= 0, got {step!r}.")
        parts = ("files", "assumed", "origin", "grounds")
        nothing: dict[str, dict] = {name: {} for name in parts}
        document = nothing | document
        for name in parts:
            if not isinstance(document[name], dict):
                raise ValueError(f"{name} must be a JSON object, got {document[name]!r}.")
        for ground, values in document["grounds"].items():
            if ground not in GROUNDS or not isinstance(values, dict):
                rule = f"grounds must hold a JSON object for each of {', '.join(GROUNDS)}"
                raise ValueError(f"{rule}, got {ground}: {values!r}.")
        return document, from_dict(document["experiment"])


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, as config.json lists it."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def require_stated(file: Path, files: Mapping[str, object]) -> None:
    """Refuse a file that is not the one listed under its name in the config; other names are not checked.

    Raises:
        CheckpointError: If it is missing or has another SHA-256.
    """
    if (stated := files.get(file.name)) is None:
        return
    rule = f"must be the file that was written with its config (SHA-256 {str(stated)[:12]})"
    if not file.exists():
        raise CheckpointError(f"{file}: {rule}, but it is missing: copy the whole folder.")
    with readable(file, "a file of a checkpoint", None):
        found = sha256_of(file)
    if found != stated:
        raise CheckpointError(
            f"{file}: {rule}, got another ({found[:12]}): copy the whole folder of one model."
        )


def named_config(what: str) -> ExperimentConfig:
    """The preset of this name, or the config in a file: a bare config or a checkpoint's
    config.json. A YAML file has the fields that differ from the default, or from its `preset`.

    Raises:
        ValueError: If it is neither, the file has no config, or its model was made from another.
    Example:
        >>> named_config("checkpoints/softmax-h2-s0/config.json") == preset("softmax-h2")
        True
    """
    file = Path(what)
    if what in PRESETS:
        return preset(what)
    if not file.is_file():
        rule = f"a preset ({', '.join(PRESETS)}) or a config file is needed"
        raise ValueError(f"{what}: {rule}, got {'a folder' if file.is_dir() else 'neither'}.")
    if file.suffix in (".yaml", ".yml"):
        with naming(file):
            return _from_yaml(read_yaml(file))
    document = read_json(file)
    if isinstance(document, dict) and document.get("origin"):
        raise ValueError(
            f"{file}: this model was made from another, which a config does not name: load it and give it as start "
            "(train --start)."
        )
    inner = document.get("experiment", document) if isinstance(document, dict) else document
    with naming(file):
        return from_dict(inner)


def _from_yaml(document: object) -> ExperimentConfig:
    """Config of a YAML document whose numbers are texts, so that 1e-3 is a number here too."""
    if not isinstance(document, dict):
        raise ValueError(f"must hold fields of a config, got {document!r}.")
    fields = dict(document)
    base = preset(fields.pop("preset")) if "preset" in fields else ExperimentConfig()
    return override(base, *(f"{name}={text}" for name, text in _assigned(fields)))


def _assigned(fields: Mapping, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Fields by dotted name, with their values as `--set` takes them."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _assigned(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _listed(value)


def _listed(value: str | list) -> str:
    """A value of a YAML file as text: lists, of lists too, as in JSON."""
    return f"[{', '.join(map(_listed, value))}]" if isinstance(value, list) else value


@cache
def git_commit() -> str | None:
    """Commit of the source tree that this package runs from; None for an installed package."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def read_history(
    path: Path, config: ExperimentConfig, step: int, files: Mapping[str, object]
) -> pd.DataFrame | None:
    """History of a checkpoint folder; None without one.

    Args:
        step: Step of the checkpoint, the largest that a row may have.
        files: SHA-256 of the files that config.json lists.
    Raises:
        CheckpointError: If the file is not such a history, or exceeds the bounds of `read_numbers`.
    """
    file = path / HISTORY_FILE
    if not os.path.lexists(file):
        require_stated(file, files)
        return None
    bounds = {"step": step, "head": config.model.n_heads - 1}
    if not config.trains_compiled:
        bounds["layer"] = config.model.n_layers - 1
    measured = HISTORY_COLUMNS if config.trains_compiled else DEEP_COLUMNS
    columns = dict.fromkeys(bounds, "integer") | dict.fromkeys(measured, "float")
    history = read_numbers(file, columns)
    for name, bound in bounds.items():
        for got in (int(history[name].min()), int(history[name].max())):
            if not 0 <= got <= bound:
                raise CheckpointError(f"{file}: {name} must lie in 0 to {bound}, got {got}.")
    if not history["step"].is_monotonic_increasing:
        raise CheckpointError(f"{file}: step must not fall from row to row.")
    require_stated(file, files)
    return history


def snapshot_steps(path: Path) -> list[int]:
    """Steps of the snapshots in a folder, in increasing order.

    Raises:
        CheckpointError: If they cannot be read.
    """
    file = path / SNAPSHOTS
    if file.exists():
        return read_steps(file)
    require_stated(file, stated_files(path))
    return sorted(old_snapshots(path))


def stated_files(path: Path) -> dict[str, object]:
    """SHA-256 of the files that the config.json of a folder lists; empty without one, or for an older folder."""
    file = path / "config.json"
    return read_document(file)[0]["files"] if file.is_file() and is_native(path) else {}


def old_snapshots(path: Path) -> dict[int, Path]:
    """Files of an older folder, which has one file for each step."""
    files = (path / "snapshots").glob("*.safetensors")
    return {int(file.stem): file for file in files if file.stem.isdigit()}


def is_native(path: Path) -> bool:
    """True if a folder has a config.json of this package, possibly damaged."""
    file = path / "config.json"
    if not file.is_file():
        return False
    settings = read_json(file)
    return not isinstance(settings, dict) or bool(OWN & set(settings))


def require_new(path: Path) -> None:
    """Refuse a folder that is not empty; leftovers of a killed process are deleted first.

    Raises:
        CheckpointError: If it contains anything.
    """
    if (path / "config.json").exists():
        raise CheckpointError(f"{path}: already holds a checkpoint; it is not overwritten.")
    settle(path)
    require_free(path)


@dataclass(frozen=True, eq=False)
class Outline:
    """A checkpoint without its weights."""

    path: Path
    config: ExperimentConfig
    step: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the weights, by name."""
    format: str = "native"
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Settings that the file did not state and that were filled in, by dotted name."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Origin of a model that training by its config would not give, such as a pruned one."""
    grounds: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Settings of a model of other code that are known, proven or stated, by that word."""

    @property
    def name(self) -> str:
        """Printable name of the folder or file; for a download from the hub, the name of its
        repository."""
        path = self.path.resolve()
        repository = path.parents[1].name if path.parent.name == "snapshots" else ""
        named = repository.rpartition("--")[2] if repository.startswith("models--") else path.name
        return printable(named)

    @property
    def task(self) -> TaskConfig:
        return self.config.task

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step up to `step`, layer (of several) and head: loss, eval_loss, ...; or None."""
        if self.format != "native":
            return None
        # The folder's own step: `step` is earlier for a model during training.
        if not is_native(self.path):
            return None
        document, config = read_document(document_file(self.path))
        history = read_history(self.path, config, document["step"], document["files"])
        return None if history is None else history[history["step"] <= self.step]

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training."""
        return snapshot_steps(self.path)


def outline_of(path: Path) -> Outline | None:
    """Outline of a checkpoint of this package; None for anything else.

    Raises:
        CheckpointError: If its config, or the names or shapes of its weights, are wrong, or some
            numbers are not finite.
    Example:
        >>> outline = outline_of(Path("checkpoints/softmax-h2-s0"))
        >>> outline.step, outline.shapes["blocks.0.attn.W_Q"]
        (500001, (2, 6, 6))
    """
    if not is_native(path):
        return None
    document, config = read_document(document_file(path))
    file = path / WEIGHTS_FILE
    with naming(file):
        shapes = require_shapes(shapes_in(file), config)
    require_finite_in(file, shapes)
    require_stated(file, document["files"])
    stated = {name: document[name] for name in ("step", "assumed", "origin", "grounds")}
    return Outline(path, config, shapes=shapes, **stated)
