"""The folder of a checkpoint: config.json, model.safetensors, history.parquet, snapshots.safetensors.

Nothing in it is ever run as code. What it states is read without its numbers, and without torch: `Outline`.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import pandas as pd

from mechinterp.checkpoints.io.atomic import read_json
from mechinterp.checkpoints.io.errors import CheckpointError, naming, nothing_at, printable
from mechinterp.checkpoints.io.headers import (
    read_steps,
    require_finite_in,
    require_shapes,
    shapes_in,
)
from mechinterp.checkpoints.io.locks import require_free, settle
from mechinterp.checkpoints.native.history import read_numbers
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict
from mechinterp.presets import PRESETS, preset
from mechinterp.version import __version__

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
SNAPSHOTS = "snapshots.safetensors"
OWN = {"format_version", "experiment"}
"""What a config.json of this package has."""
FILES = ("config.json", WEIGHTS, "history.parquet", SNAPSHOTS, "snapshots")
"""What a checkpoint folder holds; "snapshots" is of versions before this one."""
COLUMNS = ("loss", "eval_loss", "omega", "mu", "qk_diagonal", "ov_last_entry")
DEEP_COLUMNS = ("loss", "eval_loss", "qk_norm", "ov_norm")
"""What a history holds beside step, head and, in the latter, layer."""


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


def document_of(
    config: ExperimentConfig,
    *,
    step: int,
    assumed: Mapping[str, object] | None = None,
    origin: Mapping[str, object] | None = None,
) -> dict:
    """What config.json says: the experiment, how far it got and which code wrote it."""
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": __version__,
        "git_commit": git_commit(),
        "step": step,
        "experiment": config.to_dict(),
    }
    stated = {"assumed": assumed, "origin": origin}
    return document | {name: dict(value) for name, value in stated.items() if value}


def read_document(file: Path) -> tuple[dict, ExperimentConfig]:
    """A file written from `document_of`, with its experiment.

    Raises:
        CheckpointError: If the file cannot be read, or a field is missing or wrong.
    """
    return document_parts(read_json(file), file)


def document_parts(document: object, file: Path) -> tuple[dict, ExperimentConfig]:
    """What `document_of` makes, checked and with nothing assumed where it says nothing, and its experiment.

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
        document = {"assumed": {}, "origin": {}} | document
        for name in ("assumed", "origin"):
            if not isinstance(document[name], dict):
                raise ValueError(f"{name} must be a JSON object, got {document[name]!r}.")
        return document, from_dict(document["experiment"])


def named_config(what: str) -> ExperimentConfig:
    """The preset of this name, or the config in a file: its own JSON or a checkpoint's config.json.

    Raises:
        ValueError: If it is neither, the file holds no config, or the model in it was pruned.
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
    document = read_json(file)
    if isinstance(document, dict) and document.get("origin"):
        raise ValueError(f"{file}: training does not make this model: it was pruned from another.")
    inner = document.get("experiment", document) if isinstance(document, dict) else document
    with naming(file):
        return from_dict(inner)


@cache
def git_commit() -> str | None:
    """The commit of the source tree this package runs from, None if it was installed from a file."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def read_history(path: Path, config: ExperimentConfig, step: int) -> pd.DataFrame | None:
    """The history of a checkpoint folder, or None.

    Args:
        step: That of the checkpoint, the last that a row may have.
    Raises:
        CheckpointError: If there is one that is not such a history, or larger than `tables` reads.
    """
    file = path / "history.parquet"
    if not os.path.lexists(file):
        return None
    bounds = {"step": step, "head": config.model.n_heads - 1}
    if not config.trains_compiled:
        bounds["layer"] = config.model.n_layers - 1
    measured = COLUMNS if config.trains_compiled else DEEP_COLUMNS
    columns = dict.fromkeys(bounds, "integer") | dict.fromkeys(measured, "float")
    history = read_numbers(file, columns)
    for name, bound in bounds.items():
        for got in (int(history[name].min()), int(history[name].max())):
            if not 0 <= got <= bound:
                raise CheckpointError(f"{file}: {name} must lie in 0 to {bound}, got {got}.")
    if not history["step"].is_monotonic_increasing:
        raise CheckpointError(f"{file}: step must not fall from row to row.")
    return history


def snapshot_steps(path: Path) -> list[int]:
    """Steps of the snapshots in a folder, from the first.

    Raises:
        CheckpointError: If there are some that cannot be read.
    """
    file = path / SNAPSHOTS
    return read_steps(file) if file.exists() else sorted(old_snapshots(path))


def old_snapshots(path: Path) -> dict[int, Path]:
    """The files of an older folder, which has one for each step."""
    files = (path / "snapshots").glob("*.safetensors")
    return {int(file.stem): file for file in files if file.stem.isdigit()}


def is_native(path: Path) -> bool:
    """Whether a folder has a config.json that is not somebody else's."""
    file = path / "config.json"
    if not file.is_file():
        return False
    settings = read_json(file)
    return not isinstance(settings, dict) or bool(OWN & set(settings))


def require_new(path: Path) -> None:
    """Refuse a folder that is not empty, once what a killed process left half written there is deleted.

    Raises:
        CheckpointError: If it holds anything.
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
    """Of the weights, by name."""
    format: str = "native"
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What the file did not say and was filled in, by dotted name."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Of a model that training by its config would not give."""

    @property
    def name(self) -> str:
        """The folder's or file's name, printable; of a download from the hub that of its repository."""
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
        document, config = read_document(document_file(self.path))
        history = read_history(self.path, config, document["step"])
        return None if history is None else history[history["step"] <= self.step]

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training."""
        return snapshot_steps(self.path)


def outline_of(path: Path) -> Outline | None:
    """The outline of a checkpoint of this package, None if something else lies there.

    Raises:
        CheckpointError: If its config, or the names and shapes of its weights, are not as they must be, or some of
            its numbers are not finite.
    Example:
        >>> outline = outline_of(Path("checkpoints/softmax-h2-s0"))
        >>> outline.step, outline.shapes["blocks.0.attn.W_Q"]
        (500001, (2, 6, 6))
    """
    if not is_native(path):
        return None
    document, config = read_document(document_file(path))
    file = path / WEIGHTS
    with naming(file):
        shapes = require_shapes(shapes_in(file), config)
    require_finite_in(file, shapes)
    stated = {name: document[name] for name in ("step", "assumed", "origin")}
    return Outline(path, config, shapes=shapes, **stated)
