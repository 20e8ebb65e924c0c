"""The package's own checkpoints: a folder with config.json, model.safetensors, history.parquet, snapshots/.

Weights carry HookedTransformer's names and shapes. Nothing in a checkpoint is ever run as code, and the
hooked model (with it TransformerLens) is built only when it is asked for.
"""

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mechinterp.checkpoints.archives import read_arrays
from mechinterp.checkpoints.errors import CheckpointError, one_line
from mechinterp.checkpoints.files import read_json, write_atomically
from mechinterp.config import ExperimentConfig, TaskConfig, from_dict
from mechinterp.models.functional import AttentionWeights, unmerged

if TYPE_CHECKING:
    from mechinterp.models.adapter import HookedPredictor
    from mechinterp.models.transformer import ICLTransformer

FORMAT_VERSION = 1
PREFIX = "blocks.0.attn."
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A trained model as it lies on disk; history, snapshots and hooked model are read when asked for."""

    path: Path
    config: ExperimentConfig
    step: int
    """Number of updates behind the weights."""
    weights: AttentionWeights
    format: str = "native"
    """"native", or the format of somebody else's file."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What the file did not say and was filled in, by dotted name."""

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

    @property
    def task(self) -> TaskConfig:
        """The law of its prompts."""
        return self.config.task

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step and head (step, head, loss, eval_loss, omega, mu, ...), or None."""
        return read_history(self.path)

    @cached_property
    def snapshots(self) -> dict[int, AttentionWeights]:
        """Weights during training, by step."""
        return {
            step: weights_from(read_arrays(file), self.config, file)
            for step, file in snapshot_files(self.path).items()
        }

    @cached_property
    def model(self) -> "ICLTransformer":
        """The hooked model, on the CPU."""
        from mechinterp.models.transformer import ICLTransformer

        return ICLTransformer.from_weights(self.weights, task=self.config.task)

    @property
    def predictor(self) -> "HookedPredictor":
        """The hooked model, as the analyses of heads take it."""
        from mechinterp.models.adapter import as_predictor

        return as_predictor(self.model)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Checkpoint":
        """The checkpoint in a folder: `load`, by the name that Hugging Face's tools use.

        Raises:
            CheckpointError: As `load` does.
        """
        return load(folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder with config.json, model.safetensors and what goes with them, as `save` does.

        Raises:
            CheckpointError: If the folder already holds a checkpoint or cannot be written.
        """
        save(
            folder,
            self.config,
            self.weights,
            step=self.step,
            history=self.history,
            snapshots=self.snapshots,
            assumed=self.assumed,
        )


def load(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
        CheckpointError: If the folder is no checkpoint, or its weights are missing, of the wrong shape or
            not finite.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = Path(path)
    document, config = read_document(document_file(path))
    weights_file = path / WEIGHTS
    weights = weights_from(read_arrays(weights_file), config, weights_file)
    assumed = document.get("assumed", {})
    return Checkpoint(path, config, document["step"], weights, assumed=assumed)


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


def snapshot_files(path: Path) -> dict[int, Path]:
    """The files of weights during training, by step."""
    files = (f for f in (path / "snapshots").glob("*.safetensors") if f.stem.isdigit())
    return dict(sorted((int(file.stem), file) for file in files))


def read_history(path: Path) -> pd.DataFrame | None:
    """The history of a checkpoint folder, or None.

    Raises:
        CheckpointError: If there is one that cannot be read.
    """
    file = path / "history.parquet"
    if not file.exists():
        return None
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a readable parquet file ({one_line(error)}).") from None


def save(
    path: str | Path,
    config: ExperimentConfig,
    weights: AttentionWeights,
    *,
    step: int,
    history: pd.DataFrame | None = None,
    snapshots: Mapping[int, AttentionWeights] | None = None,
    assumed: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint folder; config.json comes last, so that a folder that has it is whole.

    Raises:
        CheckpointError: If the folder already holds a checkpoint or cannot be written, or the weights are
            not those of such a model.
    """
    path = Path(path)
    _require_fit(path, weights, config)
    kept = {at: state_dict(snapshot) for at, snapshot in (snapshots or {}).items()}
    document = document_of(config, step=step, assumed=assumed)
    write_folder(path, document, state_dict(weights), history=history, snapshots=kept)


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


def write_weights(file: Path, weights: AttentionWeights) -> None:
    """Write the weights of one model under HookedTransformer's names."""
    write_tensors(file, state_dict(weights))


def write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors by name."""
    write_atomically(file, lambda target: save_file(tensors, target))


def state_dict(weights: AttentionWeights) -> dict[str, Tensor]:
    """The hooked model's names and shapes: W_O and b_O get their x columns, which are zero."""
    tensors = weights.parameters
    for name in {"W_O", "b_O"} & set(tensors):
        tensors[name] = torch.nn.functional.pad(tensors[name], (weights.d_x, 0))
    return {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def document_of(
    config: ExperimentConfig, *, step: int, assumed: Mapping[str, object] | None = None
) -> dict:
    """What config.json says: the experiment, how far it got and which code wrote it."""
    document = {
        "format_version": FORMAT_VERSION,
        "package_version": version("mechinterp"),
        "git_commit": git_commit(),
        "step": step,
        "experiment": asdict(config),
    }
    return document | ({"assumed": dict(assumed)} if assumed else {})


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
    step, assumed = document["step"], document.get("assumed", {})
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{file}: step must be an integer >= 0, got {step!r}.")
    if not isinstance(assumed, dict):
        raise CheckpointError(f"{file}: assumed must be a JSON object, got {assumed!r}.")
    try:
        return document, from_dict(document["experiment"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: {one_line(error)}") from None


def weights_from(
    tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path
) -> AttentionWeights:
    """The weights among a file's tensors, which carry HookedTransformer's names.

    Raises:
        CheckpointError: If they are missing, not finite or not those of such a model.
    """
    if config.model.context_only:
        raise CheckpointError(
            f"{file}: model.context_only must be false for weights of one layer, got true; mechinterp.load reads "
            "the folders of such models."
        )
    _require_whole(file, tensors, config)
    found = unmerged({name: tensors[PREFIX + name] for name in parameter_shapes(config)})
    for name in {"W_O", "b_O"} & set(found):
        found[name] = found[name][..., config.task.d_x :].contiguous()
    return AttentionWeights(
        **found,
        scale=config.d_head**-0.5,
        score=config.model.score,
        score_slope=config.model.score_slope,
        attend_to_self=config.model.attend_to_self,
        merged_qk=config.model.merged_qk,
    )


def _require_fit(path: Path, weights: AttentionWeights, config: ExperimentConfig) -> None:
    """Refuse weights that would not be the same after a trip through a checkpoint of this config."""
    if config.model.merged_qk != weights.merged_qk:
        raise CheckpointError(
            f"{path}: merged_qk must be the config's {config.model.merged_qk}, got {weights.merged_qk}."
        )
    _require_whole(path, state_dict(weights), config)
    if not math.isclose(weights.scale, config.d_head**-0.5):
        raise CheckpointError(
            f"{path}: scale must be 1/sqrt(d_head) = {config.d_head**-0.5:.6g}, got {weights.scale:.6g}."
        )
    for name in ("score", "score_slope", "attend_to_self"):
        expected, found = getattr(config.model, name), getattr(weights, name)
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} must be the config's {expected!r}, got {found!r}."
            )
    if config.model.biases != (weights.b_O is not None):
        raise CheckpointError(
            f"{path}: biases must be the config's {config.model.biases}, got {not config.model.biases}."
        )


def parameter_shapes(config: ExperimentConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a model, by their names in the hooked model, with their shapes."""
    wide = (config.model.n_heads, config.d_model, config.d_head)
    scores = ("W_QK",) if config.model.merged_qk else ("W_Q", "W_K")
    expected: dict[str, tuple[int, ...]] = {name: wide for name in (*scores, "W_V")}
    expected["W_O"] = (wide[0], wide[2], wide[1])
    if config.model.biases:
        expected |= {name: (wide[0], wide[2]) for name in ("b_Q", "b_K", "b_V")}
        expected["b_O"] = (wide[1],)
    return expected


def _require_whole(file: Path, tensors: Mapping[str, Tensor], config: ExperimentConfig) -> None:
    expected = parameter_shapes(config)
    require_tensors(file, tensors, {PREFIX + name: shape for name, shape in expected.items()})
    for name in {"W_O", "b_O"} & set(expected):
        unread = tensors[PREFIX + name][..., : config.task.d_x]
        if unread.any():
            raise CheckpointError(
                f"{file}: the x columns of {PREFIX}{name} must be zero, got {unread.abs().max().item():.3g}."
            )


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
