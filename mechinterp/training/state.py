"""State file of a training run, from which a killed run is resumed to the same bits.

It contains the weights, Adam's moments, the rows logged so far and the snapshots, with a checksum, and is written atomically.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mechinterp.checkpoints.io.files import CheckpointError, one_line, size_of, write_atomically
from mechinterp.checkpoints.native.tensors import fill_with_tensors
from mechinterp.config import ExperimentConfig, TrainConfig, from_dict

_FAULTS = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, MemoryError)
ORDER = "stacked"
"""Order of weights in a flat tensor: tensor by tensor, each with all layers."""


def write_state(
    file: Path,
    models: Mapping[str, ExperimentConfig],
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    origin: Mapping[str, object] | None = None,
) -> None:
    """Write the state of a run to a file.

    Args:
        models: Configs by name.
        tensors: "flat", "moment.NAME", "row.COLUMN" and "snapshot.STEP".
        origin: The checkpoint that the run started from; None or empty: random weights.
    Raises:
        CheckpointError: If the file cannot be written; an earlier state is kept.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    documents = json.dumps({name: asdict(config) for name, config in models.items()})
    metadata = {"step": str(step), "models": documents, "order": ORDER}
    if origin:
        metadata["origin"] = json.dumps(dict(origin))
    metadata["checksum"] = _checksum(metadata, own)
    try:
        write_atomically(file, partial(fill_with_tensors, tensors=own, metadata=metadata))
    except (OSError, SafetensorError) as error:
        kept = "; the state saved before it is kept" if file.exists() else ""
        raise CheckpointError(
            f"{file}: cannot be written at step {step} ({one_line(error)}){kept}."
        ) from None


def read_state(file: Path) -> tuple[dict[str, ExperimentConfig], int, dict[str, Tensor]]:
    """Configs, step and tensors in a state file, as `write_state` got them; on the CPU.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        metadata = stored.metadata()
        # safe_open's result has keys() but is not iterable.
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if metadata["checksum"] != _checksum(metadata, tensors):
            raise ValueError("its checksum is not that of what it holds")
        if metadata["order"] != ORDER:
            raise ValueError(f"the order of its weights must be {ORDER!r}")
        models, step = _models(metadata), int(metadata["step"])
        _require_range(next(iter(models.values())).train, step, tensors)
        return models, step, tensors


def stored_models(file: Path) -> dict[str, ExperimentConfig]:
    """Configs of the models in a state file, read without the tensors.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        return _models(stored.metadata())


def stored_origin(file: Path) -> dict[str, object]:
    """The checkpoint that the run in a state file started from; empty: random weights.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        return dict(json.loads(stored.metadata().get("origin", "{}")))


@contextmanager
def resumable(file: Path) -> Iterator[None]:
    """Context that turns any failure with a state file into a one-line error.

    Raises:
        CheckpointError: If the state in the file cannot be resumed.
    """
    try:
        yield
    except _FAULTS as error:
        reason = one_line(error) if file.exists() else "does not exist"
        raise CheckpointError(
            f"{file}: not a training state that can be resumed ({reason}). Delete it, and its models begin anew "
            "with --resume."
        ) from None


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    if file.exists():
        size_of(file)  # raises for a pipe, which would block
    with resumable(file), torch.device("cpu"), safe_open(file, framework="pt") as stored:
        yield stored


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of the step, the configs, the origin if there is one, and all tensors of a state."""
    stated = [metadata[name] for name in ("step", "models", "origin") if name in metadata]
    digest = hashlib.sha256(json.dumps(stated).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_range(train: TrainConfig, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse steps outside the run, and tensors whose sizes do not fit together."""
    if not 0 <= step <= train.steps:
        raise ValueError(f"step must lie in 0 to {train.steps}, got {step}")
    rows = with_prefix(tensors, "row.")
    steps = rows["step"].tolist()
    logged = range(0, step, train.log_every)
    if steps != [*logged[: len(steps)], step]:
        raise ValueError(f"rows must be those of the steps up to {step}")
    for name, row in rows.items():
        if len(row) != len(steps):
            raise ValueError(f"rows of {name} must be {len(steps)}, got {len(row)}")
    for at, flat in with_prefix(tensors, "snapshot.").items():
        if int(at) > step or int(at) not in train.snapshot_steps:
            raise ValueError(f"a snapshot must be of a step of the run, got {at}")
        if flat.shape != tensors["flat"].shape:
            raise ValueError(f"snapshot {at} must have the shape of the weights")


def _models(metadata: Mapping[str, str]) -> dict[str, ExperimentConfig]:
    documents = json.loads(metadata["models"])
    if not isinstance(documents, dict) or not documents:
        raise ValueError("models must be a JSON object that is not empty")
    return {name: from_dict(document) for name, document in documents.items()}


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
