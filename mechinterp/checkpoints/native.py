"""The package's own checkpoints: models of one layer that reads the query, and context-only ones of any number.

What their folders hold is in `folders`, how the weights are named in `native_tensors`. The hooked model (with it
TransformerLens) is built only when it is asked for.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import pandas as pd

from mechinterp.checkpoints.archives import read_arrays
from mechinterp.checkpoints.errors import CheckpointError
from mechinterp.checkpoints.folders import (
    WEIGHTS,
    document_file,
    document_of,
    read_document,
    read_history,
    snapshot_files,
    write_folder,
)
from mechinterp.checkpoints.native_tensors import (
    deep_weights_from,
    require_fit,
    state_dict,
    weights_from,
)
from mechinterp.checkpoints.readings import Reading
from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.models.deep import DeepWeights
from mechinterp.models.functional import AttentionWeights

if TYPE_CHECKING:
    from mechinterp.models.adapter import HookedPredictor
    from mechinterp.models.transformer import ICLTransformer

Weights = TypeVar("Weights", AttentionWeights, DeepWeights)
Kind = TypeVar("Kind", bound="SavedModel")


@dataclass(frozen=True, eq=False)
class SavedModel(ABC, Generic[Weights]):
    """A model as it lies on disk; history and snapshots are read when they are asked for."""

    path: Path
    config: ExperimentConfig
    step: int
    """Number of updates behind the weights."""
    weights: Weights
    format: str = "native"
    """"native", or the format of somebody else's file."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """What the file did not say and was filled in, by dotted name."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Of a model that training by its config would not give: what it was pruned from, its heads, what came after."""
    readings: tuple[Reading, ...] = ()
    """What the file can mean where it does not say everything, `weights` first; empty if it says enough."""

    def __repr__(self) -> str:
        model, task = self.config.model, self.config.task
        layers = f"{_counted(model.n_layers, 'layer')} of " if model.context_only else ""
        return (
            f"{type(self).__name__}({self.name}: {layers}{_counted(model.n_heads, 'head')}, d_x={task.d_x}, "
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
        """One row per logged step, layer (of context-only models) and head: loss, eval_loss, ...; or None."""
        return read_history(self.path)

    @cached_property
    def snapshots(self) -> dict[int, Weights]:
        """Weights during training, by step."""
        return {
            step: self.read(file, self.config) for step, file in snapshot_files(self.path).items()
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

    @staticmethod
    @abstractmethod
    def read(file: Path, config: ExperimentConfig) -> Weights:
        """The weights in a file of a model of this config.

        Raises:
            CheckpointError: If they are missing, not finite or not those of such a model.
        """

    @classmethod
    def from_pretrained(cls: type[Kind], folder: str | Path) -> Kind:
        """The checkpoint in a folder, by the name that Hugging Face's tools use.

        Raises:
            CheckpointError: As `load` does, and if the folder holds a model of the other kind.
        Example:
            >>> Checkpoint.from_pretrained("checkpoints/softmax-h2-s0")
            Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
        """
        found = load(folder)
        if not isinstance(found, cls):
            raise CheckpointError(
                f"{folder}: must hold a {cls.__name__}, got a {type(found).__name__}."
            )
        return found

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
            origin=self.origin,
        )


class Checkpoint(SavedModel[AttentionWeights]):
    """A model of one layer in which the query is a token of its own."""

    @staticmethod
    def read(file: Path, config: ExperimentConfig) -> AttentionWeights:
        return weights_from(read_arrays(file), config, file)


class DeepCheckpoint(SavedModel[DeepWeights]):
    """A context-only model, of any number of layers: no token is a key but those of the examples."""

    @staticmethod
    def read(file: Path, config: ExperimentConfig) -> DeepWeights:
        return deep_weights_from(read_arrays(file), config, file)


def load(path: str | Path) -> Checkpoint | DeepCheckpoint:
    """The checkpoint of this package in a folder, of whichever kind its config says.

    Raises:
        CheckpointError: If the folder is no checkpoint, or its weights are missing, of the wrong shape or
            not finite.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = Path(path)
    document, config = read_document(document_file(path))
    step, file = document["step"], path / WEIGHTS
    said = {name: document.get(name, {}) for name in ("assumed", "origin")}
    if config.model.context_only:
        return DeepCheckpoint(path, config, step, DeepCheckpoint.read(file, config), **said)
    return Checkpoint(path, config, step, Checkpoint.read(file, config), **said)


def save(
    path: str | Path,
    config: ExperimentConfig,
    weights: Weights,
    *,
    step: int,
    history: pd.DataFrame | None = None,
    snapshots: Mapping[int, Weights] | None = None,
    assumed: Mapping[str, object] | None = None,
    origin: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint folder; config.json comes last, so that a folder that has it is whole.

    Raises:
        CheckpointError: If the folder already holds a checkpoint or cannot be written, or the weights are
            not those of such a model.
    """
    path = Path(path)
    require_fit(path, weights, config)
    kept = {at: state_dict(snapshot) for at, snapshot in (snapshots or {}).items()}
    document = document_of(config, step=step, assumed=assumed, origin=origin)
    write_folder(path, document, state_dict(weights), history=history, snapshots=kept)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"
