"""The tensors of a checkpoint folder: weights and snapshots, read and written."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from mechinterp.checkpoints.io.errors import CheckpointError
from mechinterp.checkpoints.io.headers import STEP, opened, read_steps
from mechinterp.checkpoints.io.tensor_files import read_arrays, widened
from mechinterp.checkpoints.native.folder import SNAPSHOTS, old_snapshots


def fill_with_tensors(
    target: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file without the temporary file that `save_file` makes, which a kill would leave."""
    target.write_bytes(serialized(tensors, metadata))


def read_snapshots(path: Path) -> dict[int, tuple[Path, dict[str, Tensor]]]:
    """Tensors during training by step, with the file that holds them; in older folders one file per step.

    Raises:
        CheckpointError: If there are some that cannot be read.
    """
    file = path / SNAPSHOTS
    if file.exists():
        return {step: (file, tensors) for step, tensors in _unstacked(file).items()}
    by_step = sorted(old_snapshots(path).items())
    return {step: (file, read_arrays(file)) for step, file in by_step}


def stacked(snapshots: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Snapshots as tensors of one file: [step, ...] by name, and the steps."""
    steps = sorted(snapshots)
    names = snapshots[steps[0]]
    rows = {name: torch.stack([snapshots[step][name] for step in steps]) for name in names}
    return {STEP: torch.tensor(steps)} | rows


def _unstacked(file: Path) -> dict[int, dict[str, Tensor]]:
    """The inverse of `stacked`, whatever the size of the file: a long run has many snapshots."""
    steps = read_steps(file)
    with opened(file, "pt") as stored:
        names = set(stored.keys()) - {STEP}
        tensors = {name: stored.get_tensor(name) for name in sorted(names)}
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (len(steps),):
            rule = f"must have {len(steps)} rows, one for each step"
            raise CheckpointError(f"{file}: {name} {rule}, got shape {tuple(tensor.shape)}.")
    # Copies, for a part of the whole would keep all of it in memory.
    return {
        step: {name: widened(tensor[row].clone()) for name, tensor in tensors.items()}
        for row, step in enumerate(steps)
    }
