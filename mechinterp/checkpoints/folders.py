"""The folder of a checkpoint: config.json, model.safetensors, history.parquet, snapshots/.

Nothing in it is ever run as code.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.files import read_json, size_of, write_atomically
from mechinterp.config import ExperimentConfig, from_dict

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"


def document_file(path: Path) -> Path:
    """The config.json of a checkpoint folder.

    Raises:
        CheckpointError: If there is none.
    """
    file = path / "config.json"
    if not file.is_file():
        what = "does not exist"
        if path.exists():
            what = "has no config.json" if path.is_dir() else "is not a folder"
        raise CheckpointError(
            f"{path}: a checkpoint is a folder with config.json and model.safetensors; this {what}."
        )
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
        "package_version": version("mechinterp"),
        "git_commit": git_commit(),
        "step": step,
        "experiment": asdict(config),
    }
    said = {"assumed": assumed, "origin": origin}
    return document | {name: dict(value) for name, value in said.items() if value}


def read_document(file: Path) -> tuple[dict, ExperimentConfig]:
    """A file written from `document_of`, with its experiment.

    Raises:
        CheckpointError: If the file cannot be read, or a field is missing or wrong.
    """
    return document_parts(read_json(file), file)


def document_parts(document: object, file: Path) -> tuple[dict, ExperimentConfig]:
    """What `document_of` makes, checked, with its experiment.

    Raises:
        CheckpointError: If a field is missing or wrong.
    """
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, got {type(document).__name__}.")
    for name in ("format_version", "step", "experiment"):
        if name not in document:
            raise CheckpointError(f"{file}: field {name!r} is missing.")
    if document["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version must be {FORMAT_VERSION}, got {document['format_version']!r}."
        )
    step = document["step"]
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{file}: step must be an integer >= 0, got {step!r}.")
    for name in ("assumed", "origin"):
        if not isinstance(document.get(name, {}), dict):
            raise CheckpointError(f"{file}: {name} must be a JSON object, got {document[name]!r}.")
    try:
        return document, from_dict(document["experiment"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None


def git_commit() -> str | None:
    """The commit of the source tree this package runs from, None if it was installed from a file."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None


def read_history(path: Path) -> pd.DataFrame | None:
    """The history of a checkpoint folder, or None.

    Raises:
        CheckpointError: If there is one that cannot be read.
    """
    file = path / "history.parquet"
    if not file.exists():
        return None
    try:
        size_of(file)
        return pd.read_parquet(file)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a readable parquet file ({one_line(error)}).") from None


def snapshot_files(path: Path) -> dict[int, Path]:
    """The files of weights during training, by step."""
    files = (f for f in (path / "snapshots").glob("*.safetensors") if f.stem.isdigit())
    return dict(sorted((int(file.stem), file) for file in files))


def write_folder(
    path: Path,
    document: Mapping[str, object],
    tensors: dict[str, Tensor],
    *,
    history: pd.DataFrame | None,
    snapshots: Mapping[int, dict[str, Tensor]],
) -> None:
    """Write a checkpoint folder from its config.json, its weights by name and what goes with them.

    Raises:
        CheckpointError: If the folder already holds a checkpoint or cannot be written.
    """
    if (path / "config.json").exists():
        raise CheckpointError(f"{path}: already holds a checkpoint; it is not overwritten.")
    text = json.dumps(document, indent=2) + "\n"
    try:
        for step, snapshot in snapshots.items():
            write_tensors(path / "snapshots" / f"{step}.safetensors", snapshot)
        write_tensors(path / WEIGHTS, tensors)
        if history is not None:
            write_atomically(
                path / "history.parquet", lambda file: history.to_parquet(file, index=False)
            )
        write_atomically(path / "config.json", lambda file: file.write_text(text))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({one_line(error)}).") from None


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name."""
    write_atomically(file, lambda target: save_file(tensors, target))


def require_tensors(
    file: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse tensors that are not of these names and shapes, finite and of one floating-point dtype.

    Raises:
        CheckpointError: If one is not; the message names it.
    """
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{file}: {name} is missing.")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: {name} must have shape {shape}, got {tuple(tensor.shape)}."
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{file}: {name} must hold floating-point numbers, got {tensor.dtype}."
            )
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise CheckpointError(
                f"{file}: {name} must hold finite numbers, got {bad} NaN or infinite."
            )
    kinds = sorted({str(tensors[name].dtype) for name in shapes})
    if len(kinds) > 1:
        raise CheckpointError(f"{file}: the weights must have one dtype, got {', '.join(kinds)}.")
