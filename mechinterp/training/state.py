"""State of a training run that can be resumed after a kill: one file, written atomically."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mechinterp.checkpoints.checkpoint import fill_with_tensors
from mechinterp.checkpoints.io.atomic import size_of, write_atomically
from mechinterp.checkpoints.io.errors import CheckpointError, one_line
from mechinterp.config import ExperimentConfig, from_dict

FAULTS = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, MemoryError)
ORDER = "stacked"
"""Order of weights in a flat tensor: tensor by tensor, each with all layers."""


@dataclass(frozen=True, eq=False)
class State:
    """Full state of a run, sufficient to resume it."""

    models: Mapping[str, ExperimentConfig]
    step: int
    flat: Tensor
    """All weights, concatenated."""
    moments: Mapping[str, Tensor]
    """State of the optimizer, by name."""
    rows: dict[str, Tensor]
    """History so far, with one row per logged step."""
    snapshots: dict[int, Tensor]
    """`flat` at earlier steps, by step."""


def write_state(file: Path, state: State) -> None:
    """Write the state to a file.

    Raises:
        CheckpointError: If the file cannot be written; an earlier state is kept.
    """
    tensors = {"flat": state.flat}
    tensors |= {f"moment.{name}": moment for name, moment in state.moments.items()}
    tensors |= {f"row.{name}": rows for name, rows in state.rows.items()}
    tensors |= {f"snapshot.{step}": flat for step, flat in state.snapshots.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    models = {name: asdict(config) for name, config in state.models.items()}
    metadata = {"step": str(state.step), "models": json.dumps(models), "order": ORDER}
    metadata["checksum"] = _checksum(metadata, tensors)
    try:
        write_atomically(file, partial(fill_with_tensors, tensors=tensors, metadata=metadata))
    except (OSError, SafetensorError) as error:
        kept = "; the state saved before it is kept" if file.exists() else ""
        raise CheckpointError(
            f"{file}: cannot be written at step {state.step} ({one_line(error)}){kept}."
        ) from None


def read_state(file: Path) -> State:
    """State stored in a file, on the CPU.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        metadata = stored.metadata()
        # safe_open's result has keys() but is not iterable.
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if "checksum" not in metadata:
            raise ValueError("without a checksum, as versions before it wrote them")
        if metadata["checksum"] != _checksum(metadata, tensors):
            raise ValueError("its checksum is not that of what it holds")
        models = _models(metadata)
        if metadata.get("order") != ORDER and any(
            config.model.n_layers > 1 and not config.model.is_stack for config in models.values()
        ):
            raise ValueError("its weights lie layer by layer, as versions before wrote them")
        state = State(
            models=models,
            step=int(metadata["step"]),
            flat=tensors["flat"],
            moments=_named(tensors, "moment."),
            rows=_named(tensors, "row."),
            snapshots={int(step): flat for step, flat in _named(tensors, "snapshot.").items()},
        )
        _require_range(state)
        return state


def stored_models(file: Path) -> dict[str, ExperimentConfig]:
    """Configs of the models in a state file, read without the tensors.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        return _models(stored.metadata())


@contextmanager
def resumable(file: Path) -> Iterator[None]:
    """Context that turns any failure with a state file into a one-line error.

    Raises:
        CheckpointError: If the state in the file cannot be resumed.
    """
    try:
        yield
    except FAULTS as error:
        reason = one_line(error) if file.exists() else "does not exist"
        raise CheckpointError(
            f"{file}: not a training state that can be resumed ({reason}). Delete it, and its models begin anew "
            "with --resume."
        ) from None


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    if file.exists():
        size_of(file)  # raises for a pipe, which would block
    with resumable(file), safe_open(file, framework="pt") as stored:
        yield stored


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of the step, the configs and all tensors of a state."""
    digest = hashlib.sha256(json.dumps([metadata["step"], metadata["models"]]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_range(state: State) -> None:
    """Refuse steps outside the run, and tensors whose sizes do not fit together."""
    train = next(iter(state.models.values())).train
    if not 0 <= state.step <= train.steps:
        raise ValueError(f"step must lie in 0 to {train.steps}, got {state.step}")
    steps = state.rows["step"].tolist()
    logged = range(0, state.step, train.log_every)
    if steps != [*logged[: len(steps)], state.step]:
        raise ValueError(f"rows must be those of the steps up to {state.step}")
    for name, rows in state.rows.items():
        if len(rows) != len(steps):
            raise ValueError(f"rows of {name} must be {len(steps)}, got {len(rows)}")
    for step, flat in state.snapshots.items():
        if step > state.step or step not in train.snapshot_steps:
            raise ValueError(f"a snapshot must be of a step of the run, got {step}")
        if flat.shape != state.flat.shape:
            raise ValueError(f"snapshot {step} must have the shape of the weights")


def _models(metadata: Mapping[str, str]) -> dict[str, ExperimentConfig]:
    documents = json.loads(metadata["models"])
    if not isinstance(documents, dict) or not documents:
        raise ValueError("models must be a JSON object that is not empty")
    return {name: from_dict(document) for name, document in documents.items()}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
