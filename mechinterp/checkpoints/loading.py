"""Checkpoints of any known format: which one lies at a path, and from one to the other."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mechinterp.checkpoints import native
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.exchange import (
    FORMAT,
    SIDE_CAR,
    SUFFIXES,
    read_exchange,
    write_exchange,
)
from mechinterp.checkpoints.files import read_json
from mechinterp.checkpoints.native import Checkpoint
from mechinterp.config import PRESETS, ExperimentConfig, from_dict, preset

FORMATS = ("native", FORMAT)


def load(path: str | Path, *, task: Mapping[str, object] | None = None) -> Checkpoint:
    """The checkpoint at a path: a folder of this package, an exchange folder or a HookedTransformer state dict.

    Args:
        task: Fields of TaskConfig, for files that do not state the task of their model; where fields are
            left out, the softmax paper's setting is assumed, and `assumed` says so.
    Raises:
        CheckpointError: If nothing readable lies there, or the task is given although it is stated there.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = Path(path)
    if path.is_file() and path.suffix in SUFFIXES:
        return read_exchange(path, task=task)
    if task is not None and path.exists():
        raise CheckpointError(
            f"{path}: a task is given for files that do not state theirs ({', '.join(SUFFIXES)}) only."
        )
    stated = (path / SIDE_CAR).is_file() and not (path / "config.json").is_file()
    return read_exchange(path) if stated else native.load(path)


def convert(checkpoint: Checkpoint, target: str, out: str | Path) -> list[Path]:
    """Write a checkpoint in another format into a new folder; the files written.

    Raises:
        CheckpointError: If the folder holds something, or the format has no place for the model.
        ValueError: If the format is unknown.
    """
    out = Path(out)
    if target not in FORMATS:
        raise ValueError(f"Format must be one of {', '.join(FORMATS)}, got {target!r}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: already holds something; it is not overwritten.")
    if target == FORMAT:
        write_exchange(out, checkpoint)
    else:
        native.save(
            out,
            checkpoint.config,
            checkpoint.weights,
            step=checkpoint.step,
            history=checkpoint.history,
            snapshots=checkpoint.snapshots,
            assumed=checkpoint.assumed,
        )
    return sorted(file for file in out.rglob("*") if file.is_file())


def checkpoint_paths(paths: Iterable[Path]) -> list[Path]:
    """The paths, a folder that is no checkpoint but holds folders that are replaced by those."""
    found: list[Path] = []
    for path in paths:
        inner = {
            file.parent for mark in ("config.json", SIDE_CAR) for file in path.glob(f"*/{mark}")
        }
        alone = any((path / mark).exists() for mark in ("config.json", SIDE_CAR))
        found += [path] if alone or not inner else sorted(inner)
    return found


def read_task(file: Path) -> dict[str, object]:
    """Fields of TaskConfig from a JSON file.

    Raises:
        CheckpointError: If the file is not readable or holds no JSON object.
    """
    task = read_json(file)
    if not isinstance(task, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, got {type(task).__name__}.")
    return task


def named_config(what: str) -> ExperimentConfig:
    """The preset of this name, or the config in a file: its own JSON or a checkpoint's config.json.

    Raises:
        ValueError: If it is neither, or the file holds no config.
    Example:
        >>> named_config("checkpoints/softmax-h2-s0/config.json") == preset("softmax-h2")
        True
    """
    file = Path(what)
    if what in PRESETS:
        return preset(what)
    if not file.is_file():
        found = "a folder" if file.is_dir() else "neither"
        raise ValueError(
            f"{what}: train needs a preset ({', '.join(PRESETS)}) or a config file, got {found}."
        )
    document = read_json(file)
    inner = document.get("experiment", document) if isinstance(document, dict) else document
    try:
        return from_dict(inner)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
