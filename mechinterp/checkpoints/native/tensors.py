"""Tensors of a checkpoint folder: weights and snapshots, from and to safetensors files."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save as serialized
from torch import Tensor

from mechinterp.checkpoints.foreign.tensors.lens import PREFIX
from mechinterp.checkpoints.foreign.tensors.refusals import require_numbers
from mechinterp.checkpoints.io.files import CheckpointError, naming
from mechinterp.checkpoints.io.headers import STEP, opened, read_steps, require_shapes
from mechinterp.checkpoints.io.tensor_files import read_arrays, widened
from mechinterp.checkpoints.native.document import require_stated
from mechinterp.checkpoints.native.folder import SNAPSHOTS, old_snapshots, stated_files
from mechinterp.config import ExperimentConfig
from mechinterp.models.weights import Weights

UNREAD = (PREFIX + "W_O", PREFIX + "b_O")


def state_dict(weights: Weights) -> dict[str, Tensor]:
    """Tensors of the hooked model by name, as they are written."""
    return {name: t.detach().cpu().contiguous() for name, t in weights.by_name.items()}


def weights_from(tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path) -> Weights:
    """Weights of a model of this config from a file's tensors.

    Raises:
        CheckpointError: If tensors are missing, not finite or of the wrong shape.
    """
    with naming(file):
        shapes = _require_tensors(tensors, config)
    own = {name: tensors[name] for name in shapes}
    return Weights.of_names(config.model, config.task.d_x, config.task.d_y, own)


def require_fit(path: Path, weights: Weights, config: ExperimentConfig) -> None:
    """Refuse weights that a checkpoint of this config would not restore exactly.

    Raises:
        CheckpointError: If it would not; the message names the difference.
    """
    width = config.model.head_width(config.task.d_x, config.task.d_y)
    own = replace(weights.model, d_head=weights.model.head_width(weights.d_x, weights.d_y))
    wanted = asdict(replace(config.model, d_head=width))
    with naming(path):
        for name, got in asdict(own).items():
            if got != wanted[name]:
                raise ValueError(f"{name} must be the config's {wanted[name]!r}, got {got!r}.")
        _require_tensors(state_dict(weights), config)
        scale, stated = weights.scale, width**-0.5
        if not math.isclose(scale, stated):
            raise ValueError(f"scale must be 1/sqrt(d_head) = {stated:.6g}, got {scale:.6g}.")


def _require_tensors(
    tensors: Mapping[str, Tensor], config: ExperimentConfig
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of such a model; all must be there, finite and of one
    floating-point dtype."""
    shapes = require_shapes({name: tuple(t.shape) for name, t in tensors.items()}, config)
    for name in shapes:
        require_numbers(tensors[name], name)
    kinds = sorted({str(tensors[name].dtype) for name in shapes})
    if len(kinds) > 1:
        raise ValueError(f"the weights must have one dtype, got {', '.join(kinds)}.")
    if config.model.trains_compiled or (config.model.one_attention and config.model.biases):
        for name in set(UNREAD) & set(shapes):
            unread = tensors[name][..., : config.task.d_x]
            if unread.any():
                got = f"{unread.abs().max().item():.3g}"
                raise ValueError(f"the x columns of {name} must be zero, got {got}.")
    return shapes


def fill_with_tensors(
    target: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file directly; `save_file` uses a temporary file that a killed process
    would leave behind."""
    target.write_bytes(serialized(tensors, metadata))


def read_snapshots(path: Path) -> dict[int, tuple[Path, dict[str, Tensor]]]:
    """Snapshots by step, as tensors with the file they come from; older folders have one file per
    step.

    Raises:
        CheckpointError: If they cannot be read.
    """
    file = path / SNAPSHOTS
    if file.exists():
        return {step: (file, tensors) for step, tensors in _unstacked(file).items()}
    require_stated(file, stated_files(path))
    by_step = sorted(old_snapshots(path).items())
    return {step: (file, read_arrays(file)) for step, file in by_step}


def stacked_snapshots(snapshots: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of one file with all snapshots: [step, ...] by name, and the steps."""
    steps = sorted(snapshots)
    names = snapshots[steps[0]]
    rows = {name: torch.stack([snapshots[step][name] for step in steps]) for name in names}
    return {STEP: torch.tensor(steps, device="cpu")} | rows


def _unstacked(file: Path) -> dict[int, dict[str, Tensor]]:
    """Snapshots of one file, the inverse of `stacked_snapshots`; the file may have any size, because long
    runs have many."""
    steps = read_steps(file)
    with torch.device("cpu"), opened(file, "pt") as stored:
        names = set(stored.keys()) - {STEP}
        tensors = {name: stored.get_tensor(name) for name in sorted(names)}
    for name, tensor in tensors.items():
        if tensor.shape[:1] != (len(steps),):
            rule = f"must have {len(steps)} rows, one for each step"
            raise CheckpointError(f"{file}: {name} {rule}, got shape {tuple(tensor.shape)}.")
    # Copies, because a view would keep the whole tensor in memory.
    return {
        step: {name: widened(tensor[row].clone()) for name, tensor in tensors.items()}
        for row, step in enumerate(steps)
    }
