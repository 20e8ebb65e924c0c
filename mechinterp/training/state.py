"""The state of a training that can go on after a kill: one file, written atomically."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.files import size_of, write_atomically
from mechinterp.config import ExperimentConfig, from_dict


@dataclass(frozen=True, eq=False)
class State:
    """All that a resumed run needs."""

    models: Mapping[str, ExperimentConfig]
    step: int
    flat: Tensor
    """All weights."""
    moments: Mapping[str, Tensor]
    """What the optimizer keeps."""
    rows: dict[str, Tensor]
    """The history so far, a row per logged step."""
    snapshots: dict[int, Tensor]
    """`flat` at earlier steps."""


def write_state(file: Path, state: State) -> None:
    """Write the state.

    Raises:
        CheckpointError: If it cannot be written; a state that was there before is kept.
    """
    tensors = {"flat": state.flat}
    tensors |= {f"moment.{name}": moment for name, moment in state.moments.items()}
    tensors |= {f"row.{name}": rows for name, rows in state.rows.items()}
    tensors |= {f"snapshot.{step}": flat for step, flat in state.snapshots.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    models = {name: asdict(config) for name, config in state.models.items()}
    metadata = {"step": str(state.step), "models": json.dumps(models)}
    try:
        write_atomically(file, lambda target: save_file(tensors, target, metadata=metadata))
    except (OSError, SafetensorError) as error:
        kept = "; the state saved before it is kept" if file.exists() else ""
        raise CheckpointError(
            f"{file}: cannot be written at step {state.step} ({one_line(error)}){kept}."
        ) from None


def read_state(file: Path) -> State:
    """The state in a file, on the CPU.

    Raises:
        CheckpointError: If the file is cut short or was not written by `write_state`.
    """
    with resumable(file), _opened(file) as stored:
        metadata = stored.metadata()
        # What safe_open gives is no dictionary: it has keys() but cannot be iterated over.
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        return State(
            models=_models(metadata),
            step=int(metadata["step"]),
            flat=tensors["flat"],
            moments=_named(tensors, "moment."),
            rows=_named(tensors, "row."),
            snapshots={int(step): flat for step, flat in _named(tensors, "snapshot.").items()},
        )


def stored_models(file: Path) -> dict[str, ExperimentConfig]:
    """The models whose state lies in a file, without reading the state.

    Raises:
        CheckpointError: If the file is cut short or was not written by `write_state`.
    """
    with resumable(file), _opened(file) as stored:
        return _models(stored.metadata())


@contextmanager
def resumable(file: Path) -> Iterator[None]:
    """Turns what goes wrong with a state into one line.

    Raises:
        CheckpointError: If the state in the file is not one that can be resumed.
    """
    try:
        yield
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = one_line(error) if file.exists() else "does not exist"
        raise CheckpointError(
            f"{file}: not a training state that can be resumed ({reason}). Delete it, and its models begin anew "
            "with --resume."
        ) from None


def _opened(file: Path) -> safe_open:
    size_of(file)  # a pipe would wait for its writer
    return safe_open(file, framework="pt")


def _models(metadata: Mapping[str, str]) -> dict[str, ExperimentConfig]:
    documents = json.loads(metadata["models"])
    return {name: from_dict(document) for name, document in documents.items()}


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
