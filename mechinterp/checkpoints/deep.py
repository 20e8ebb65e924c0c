"""Checkpoints of context-only models, of any number of layers: the same folders as those of one layer.

Weights carry HookedTransformer's names, with W_in and unembed.W_U where the model has a width of its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from torch import Tensor

from mechinterp.checkpoints.archives import read_arrays
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.native import (
    WEIGHTS,
    Checkpoint,
    document_file,
    document_of,
    load,
    read_document,
    read_history,
    require_tensors,
    snapshot_files,
    write_folder,
)
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.models.deep import DeepWeights, deep_from_parameters

if TYPE_CHECKING:
    from mechinterp.models.adapter import HookedPredictor
    from mechinterp.models.transformer import ICLTransformer


@dataclass(frozen=True, eq=False)
class DeepCheckpoint:
    """A context-only model as it lies on disk; history, snapshots and hooked model are read when asked for."""

    path: Path
    config: ExperimentConfig
    step: int
    """Number of updates behind the weights."""
    weights: DeepWeights
    format: str = "native"
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Nothing: these folders say everything."""

    def __repr__(self) -> str:
        task, model = self.config.task, self.config.model
        layers = f"{model.n_layers} layer{'s' if model.n_layers > 1 else ''}"
        heads = f"{model.n_heads} head{'s' if model.n_heads > 1 else ''}"
        return (
            f"DeepCheckpoint({self.name}: {layers} of {heads}, d_x={task.d_x}, "
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
        """One row per logged step, layer and head (step, layer, head, loss, eval_loss, ...), or None."""
        return read_history(self.path)

    @cached_property
    def snapshots(self) -> dict[int, DeepWeights]:
        """Weights during training, by step."""
        return {
            step: deep_weights_from(read_arrays(file), self.config, file)
            for step, file in snapshot_files(self.path).items()
        }

    @cached_property
    def model(self) -> "ICLTransformer":
        """The hooked model, on the CPU."""
        from mechinterp.models.transformer import ICLTransformer

        return ICLTransformer.from_deep_weights(self.weights, task=self.config.task)

    @property
    def predictor(self) -> "HookedPredictor":
        """The hooked model, as the analyses of heads take it."""
        from mechinterp.models.adapter import as_predictor

        return as_predictor(self.model)


def load_saved(path: str | Path) -> Checkpoint | DeepCheckpoint:
    """The checkpoint of this package in a folder, of whichever kind its config says.

    Raises:
        CheckpointError: If the folder is no checkpoint, or its weights are missing, of the wrong shape or
            not finite.
    Example:
        >>> load_saved("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = Path(path)
    document, config = read_document(document_file(path))
    if not config.model.context_only:
        return load(path)
    file = path / WEIGHTS
    weights = deep_weights_from(read_arrays(file), config, file)
    return DeepCheckpoint(path, config, document["step"], weights)


def save_deep(
    path: str | Path,
    config: ExperimentConfig,
    weights: DeepWeights,
    *,
    step: int,
    history: pd.DataFrame | None = None,
    snapshots: Mapping[int, DeepWeights] | None = None,
) -> None:
    """Write a checkpoint folder; config.json comes last, so that a folder that has it is whole.

    Raises:
        CheckpointError: If the folder already holds a checkpoint or cannot be written, or the weights are
            not those of such a model.
    """
    path = Path(path)
    _require_fit(path, weights, config)
    kept = {at: _state_dict(snapshot) for at, snapshot in (snapshots or {}).items()}
    document = document_of(config, step=step)
    write_folder(path, document, _state_dict(weights), history=history, snapshots=kept)


def deep_weights_from(
    tensors: Mapping[str, Tensor], config: ExperimentConfig, file: Path
) -> DeepWeights:
    """The weights among a file's tensors.

    Raises:
        CheckpointError: If they are missing, not finite or not those of such a model.
    """
    shapes = deep_shapes(config)
    require_tensors(file, tensors, shapes)
    return deep_from_parameters(
        {name: tensors[name] for name in shapes},
        d_y=config.task.d_y,
        scale=config.d_head**-0.5,
        score=config.model.score,
        score_slope=config.model.score_slope,
    )


def deep_shapes(config: ExperimentConfig) -> dict[str, tuple[int, ...]]:
    """The parameters of a context-only model, by their names in the hooked model, with their shapes.

    Example:
        >>> from mechinterp.presets import preset
        >>> list(deep_shapes(preset("sparse-h4")))[-3:]
        ['blocks.3.attn.W_O', 'W_in', 'unembed.W_U']
    """
    heads, width, d_head = config.model.n_heads, config.d_model, config.d_head
    layer = dict.fromkeys(("W_Q", "W_K", "W_V"), (heads, width, d_head))
    layer["W_O"] = (heads, d_head, width)
    shapes: dict[str, tuple[int, ...]] = {
        f"blocks.{index}.attn.{name}": shape
        for index in range(config.model.n_layers)
        for name, shape in layer.items()
    }
    if config.model.d_model is not None:
        shapes["W_in"] = (config.task.d_x + config.task.d_y, width)
        shapes["unembed.W_U"] = (width, config.task.d_y)
    return shapes


def _state_dict(weights: DeepWeights) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in weights.parameters.items()}


def _require_fit(path: Path, weights: DeepWeights, config: ExperimentConfig) -> None:
    """Refuse weights that would not be the same after a trip through a checkpoint of this config."""
    if not config.model.context_only:
        raise CheckpointError(
            f"{path}: model.context_only must be true for such weights, got false."
        )
    state, shapes = _state_dict(weights), deep_shapes(config)
    require_tensors(path, state, shapes)
    for name in sorted(state.keys() - shapes.keys()):
        raise CheckpointError(f"{path}: {name} has no place in a model of this config.")
    if not math.isclose(weights.scale, config.d_head**-0.5):
        raise CheckpointError(
            f"{path}: scale must be 1/sqrt(d_head) = {config.d_head**-0.5:.6g}, got {weights.scale:.6g}."
        )
    for name in ("score", "score_slope"):
        expected, found = getattr(config.model, name), getattr(weights, name)
        if found != expected:
            raise CheckpointError(
                f"{path}: {name} must be the config's {expected!r}, got {found!r}."
            )
