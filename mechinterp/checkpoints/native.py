"""The package's own checkpoints: a folder with config.json, model.safetensors, history.parquet, snapshots/.

Weights carry HookedTransformer's names and shapes. Nothing in a checkpoint is ever run as code, and the
hooked model (with it TransformerLens) is built only when it is asked for.
"""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.files import write_atomically
from mechinterp.config import ExperimentConfig, from_dict
from mechinterp.models.functional import AttentionWeights

if TYPE_CHECKING:
    from mechinterp.models.transformer import ICLTransformer

FORMAT_VERSION = 1
PREFIX = "blocks.0.attn."


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model as it lies on disk; history, snapshots and hooked model are read when asked for."""

    path: Path
    config: ExperimentConfig
    step: int
    """Number of updates behind the weights."""
    weights: AttentionWeights

    def __repr__(self) -> str:
        task, model = self.config.task, self.config.model
        return (
            f"Checkpoint({self.name}: {model.n_heads} heads, d_x={task.d_x}, "
            f"context_length={task.context_length}, step {self.step})"
        )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step and head (step, head, loss, eval_loss, omega, mu, ...), or None."""
        file = self.path / "history.parquet"
        if not file.exists():
            return None
        try:
            return pd.read_parquet(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: not a readable parquet file ({_one_line(error)}).") from None

    @cached_property
    def snapshots(self) -> dict[int, AttentionWeights]:
        """Weights during training, by step."""
        files = {int(f.stem): f for f in (self.path / "snapshots").glob("*.safetensors") if f.stem.isdigit()}
        return {step: _read_weights(files[step], self.config) for step in sorted(files)}

    @cached_property
    def model(self) -> "ICLTransformer":
        """The hooked model, on the CPU."""
        from mechinterp.models.transformer import ICLTransformer

        return ICLTransformer.from_weights(self.weights, task=self.config.task)


def load(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        CheckpointError: If the folder is no checkpoint, or its weights are missing, of the wrong shape or
            not finite.
    """
    path = Path(path)
    file = path / "config.json"
    if not path.is_dir() or not file.is_file():
        what = "has no config.json" if path.is_dir() else "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: a checkpoint is a folder with config.json and model.safetensors; this {what}.")
    try:
        document = json.loads(file.read_text())
        config, step = from_dict(document["experiment"]), int(document["step"])
        format_version = document["format_version"]
    except KeyError as error:
        raise CheckpointError(f"{file}: field {error} is missing.") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: {_one_line(error)}") from None
    if format_version != FORMAT_VERSION:
        raise CheckpointError(f"{file}: format_version must be {FORMAT_VERSION}, got {format_version!r}.")
    return Checkpoint(path, config, step, _read_weights(path / "model.safetensors", config))


def save(
    path: str | Path,
    config: ExperimentConfig,
    weights: AttentionWeights,
    *,
    step: int,
    history: pd.DataFrame | None = None,
    snapshots: Mapping[int, AttentionWeights] | None = None,
) -> None:
    """Write a checkpoint folder; config.json comes last, so that a folder that has it is whole.

    Raises:
        CheckpointError: If the folder already holds a checkpoint.
    """
    path = Path(path)
    if (path / "config.json").exists():
        raise CheckpointError(f"{path}: already holds a checkpoint; it is not overwritten.")
    for snapshot_step, snapshot in (snapshots or {}).items():
        write_weights(path / "snapshots" / f"{snapshot_step}.safetensors", snapshot)
    write_weights(path / "model.safetensors", weights)
    if history is not None:
        write_atomically(path / "history.parquet", lambda file: history.to_parquet(file, index=False))
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": version("mechinterp"),
        "git_commit": git_commit(),
        "step": step,
        "experiment": asdict(config),
    }
    text = json.dumps(document, indent=2) + "\n"
    write_atomically(path / "config.json", lambda file: file.write_text(text))


def write_weights(file: Path, weights: AttentionWeights) -> None:
    """Write the weights of one model under HookedTransformer's names."""
    write_atomically(file, lambda target: save_file(state_dict(weights), target))


def state_dict(weights: AttentionWeights) -> dict[str, Tensor]:
    """HookedTransformer's names and shapes: W_O gets its x columns, which are zero."""
    w_o = torch.nn.functional.pad(weights.W_O, (weights.d_x, 0))
    tensors = {"W_Q": weights.W_Q, "W_K": weights.W_K, "W_V": weights.W_V, "W_O": w_o}
    return {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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


def _read_weights(file: Path, config: ExperimentConfig) -> AttentionWeights:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        reason = "does not exist" if not file.exists() else _one_line(error)
        raise CheckpointError(f"{file}: not a readable safetensors file ({reason}).") from None
    wide = (config.model.n_heads, config.d_model, config.d_head)
    expected = {name: wide for name in ("W_Q", "W_K", "W_V")} | {"W_O": (wide[0], wide[2], wide[1])}
    for name, shape in expected.items():
        tensor = tensors.get(PREFIX + name)
        if tensor is None:
            raise CheckpointError(f"{file}: {PREFIX}{name} is missing.")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{file}: {PREFIX}{name} must have shape {shape}, got {tuple(tensor.shape)}.")
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"{file}: {PREFIX}{name} must hold finite numbers, got {bad} NaN or infinite.")
    w_o = tensors[PREFIX + "W_O"]
    if w_o[:, :, : config.task.d_x].any():
        largest = w_o[:, :, : config.task.d_x].abs().max().item()
        raise CheckpointError(f"{file}: the x columns of {PREFIX}W_O must be zero, got {largest:.3g}.")
    return AttentionWeights(
        *(tensors[PREFIX + name] for name in ("W_Q", "W_K", "W_V")),
        W_O=w_o[:, :, config.task.d_x :].contiguous(),
        scale=config.d_head**-0.5,
        score=config.model.score,
        score_slope=config.model.score_slope,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
