"""The folder of a checkpoint: config.json, model.safetensors, history.parquet, snapshots.safetensors.

Nothing in it is ever run as code.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mechinterp.checkpoints.archives import read_arrays
from mechinterp.checkpoints.claims import claimed, require_free, settle
from mechinterp.checkpoints.errors import CheckpointError, nothing_at, one_line
from mechinterp.checkpoints.files import fill_with_tensors, read_json, size_of
from mechinterp.checkpoints.tables import read_numbers
from mechinterp.config import ExperimentConfig, from_dict
from mechinterp.version import __version__

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
SNAPSHOTS = "snapshots.safetensors"
STEP = "step"
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
        "package_version": __version__,
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
    model = config.model
    last = {"step": step, "head": model.n_heads - 1}
    by_layers = not config.trains_compiled
    if by_layers:
        last["layer"] = model.n_layers - 1
    measured = DEEP_COLUMNS if by_layers else COLUMNS
    history = read_numbers(file, dict.fromkeys(last, "integer") | dict.fromkeys(measured, "float"))
    for name, bound in last.items():
        for found in (int(history[name].min()), int(history[name].max())):
            if not 0 <= found <= bound:
                raise CheckpointError(f"{file}: {name} must lie in 0 to {bound}, got {found}.")
    if not history["step"].is_monotonic_increasing:
        raise CheckpointError(f"{file}: step must not fall from row to row.")
    return history


def read_snapshots(path: Path) -> dict[int, tuple[Path, dict[str, Tensor]]]:
    """Tensors during training by step, with the file that holds them; in older folders one file per step.

    Raises:
        CheckpointError: If there are some that cannot be read.
    """
    file = path / SNAPSHOTS
    if file.exists():
        return {step: (file, tensors) for step, tensors in _unstacked(file).items()}
    files = (f for f in (path / "snapshots").glob("*.safetensors") if f.stem.isdigit())
    by_step = sorted((int(file.stem), file) for file in files)
    return {step: (file, read_arrays(file)) for step, file in by_step}


def _stacked(snapshots: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Snapshots as tensors of one file: [step, ...] by name, and the steps."""
    steps = sorted(snapshots)
    names = snapshots[steps[0]]
    rows = {name: torch.stack([snapshots[step][name] for step in steps]) for name in names}
    return {STEP: torch.tensor(steps)} | rows


def _unstacked(file: Path) -> dict[int, dict[str, Tensor]]:
    """The inverse of `_stacked`, whatever the size of the file: a long run has many snapshots."""
    size_of(file)  # a pipe would wait for its writer
    try:
        with safe_open(file, framework="pt") as stored:
            # What safe_open gives is no dictionary: it has keys() but cannot be iterated over.
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({one_line(error)})."
        ) from None
    steps = tensors.pop(STEP, torch.zeros(()))
    if steps.dtype != torch.int64 or steps.ndim != 1:
        raise CheckpointError(f"{file}: {STEP} must hold whole numbers, one for each snapshot.")
    numbers = steps.tolist()
    if numbers != sorted({number for number in numbers if number >= 0}):
        raise CheckpointError(f"{file}: {STEP} must rise from 0 or later, got {numbers}.")
    for name, tensor in tensors.items():
        if tensor.shape[:1] != steps.shape:
            raise CheckpointError(
                f"{file}: {name} must have {len(numbers)} rows, one for each step, "
                f"got shape {tuple(tensor.shape)}."
            )
    return {
        step: {name: _copied(tensor[row]) for name, tensor in tensors.items()}
        for row, step in enumerate(numbers)
    }


def _copied(row: Tensor) -> Tensor:
    """A copy, for a part of the whole would keep all of it in memory; as wide as `read_arrays` gives it."""
    narrow = row.is_floating_point() and row.element_size() < 4
    return row.float() if narrow else row.clone()


def require_new(path: Path) -> None:
    """Refuse a folder that is not empty, once what a killed process left half written there is deleted.

    Raises:
        CheckpointError: If it holds anything.
    """
    if (path / "config.json").exists():
        raise CheckpointError(f"{path}: already holds a checkpoint; it is not overwritten.")
    settle(path)
    require_free(path)


def write_folder(
    path: Path,
    document: Mapping[str, object],
    tensors: dict[str, Tensor],
    *,
    history: pd.DataFrame | None,
    snapshots: Mapping[int, dict[str, Tensor]],
    shared: bool = False,
) -> None:
    """Write a checkpoint folder from its config.json, its weights by name and what goes with them.

    Args:
        shared: Whether other files may be in the folder; else it must be empty.
    Raises:
        CheckpointError: If a file is in the way, or the folder cannot be written.
    """
    if not shared:
        require_new(path)
    text = json.dumps(document, indent=2) + "\n"
    try:
        with claimed(path, last="config.json", names=FILES if shared else None) as claim:
            if snapshots:
                claim.write(SNAPSHOTS, partial(fill_with_tensors, tensors=_stacked(snapshots)))
            claim.write(WEIGHTS, partial(fill_with_tensors, tensors=tensors))
            if history is not None:
                claim.write("history.parquet", partial(history.to_parquet, index=False))
            claim.write("config.json", lambda file: file.write_text(text))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be written ({one_line(error)}).") from None


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
