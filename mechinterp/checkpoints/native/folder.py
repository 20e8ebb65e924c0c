"""Checkpoint folder: config.json, model.safetensors, history.parquet, snapshots.safetensors.

Nothing in it is ever run as code. `Outline` reads its settings and shapes without its numbers and
without torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from mechinterp.checkpoints.io.files import (
    CheckpointError,
    naming,
    nothing_at,
    printable,
    read_json,
)
from mechinterp.checkpoints.io.headers import (
    read_steps,
    require_finite_in,
    require_shapes,
    shapes_in,
)
from mechinterp.checkpoints.io.locks import require_free, settle
from mechinterp.checkpoints.native.document import read_document, require_stated
from mechinterp.checkpoints.native.tables import read_numbers
from mechinterp.config import ExperimentConfig, TaskConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
SNAPSHOTS = "snapshots.safetensors"
HISTORY_FILE = "history.parquet"
FILES = (CONFIG_FILE, WEIGHTS_FILE, HISTORY_FILE, SNAPSHOTS, "snapshots")
"""Contents of a checkpoint folder; earlier versions wrote "snapshots"."""
OWN = {"format_version", "experiment"}
"""Fields of a config.json by which this package recognises its own."""
HISTORY_COLUMNS = ("loss", "eval_loss", "omega", "mu", "qk_diagonal", "ov_last_entry")
DEEP_COLUMNS = ("loss", "eval_loss", "qk_norm", "ov_norm")
"""Columns of a history besides step, head and, for DEEP_COLUMNS, layer."""


def document_file(path: Path) -> Path:
    """The config.json of a checkpoint folder.

    Raises:
        CheckpointError: If there is none.
    """
    file = path / CONFIG_FILE
    if not file.is_file():
        if not path.exists():
            raise nothing_at(path)
        rule = "a checkpoint is a folder with config.json and model.safetensors"
        what = "has no config.json" if path.is_dir() else "is not a folder"
        raise CheckpointError(f"{path}: {rule}; this {what}.")
    return file


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
    file = path / CONFIG_FILE
    return read_document(file)[0]["files"] if file.is_file() and is_native(path) else {}


def old_snapshots(path: Path) -> dict[int, Path]:
    """Files of an older folder, which has one file for each step."""
    files = (path / "snapshots").glob("*.safetensors")
    return {int(file.stem): file for file in files if file.stem.isdigit()}


def is_native(path: Path) -> bool:
    """True if a folder has a config.json of this package, possibly damaged."""
    file = path / CONFIG_FILE
    if not file.is_file():
        return False
    settings = read_json(file)
    return not isinstance(settings, dict) or bool(OWN & set(settings))


def require_new(path: Path) -> None:
    """Refuse a folder that is not empty; leftovers of a killed process are deleted first.

    Raises:
        CheckpointError: If it contains anything.
    """
    if (path / CONFIG_FILE).exists():
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

    @property
    def identity(self) -> dict[str, object]:
        """Path, format and sizes, for tables of models and JSON documents."""
        shape, task = self.config.model, self.task
        return {
            "path": str(self.path),
            "format": self.format,
            "n_layers": shape.n_layers,
            "n_heads": shape.n_heads,
            "d_x": task.d_x,
            "d_y": task.d_y,
        }

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
