"""A checkpoint: a model with its task, its history and what was assumed; and the package's own folders.

What a folder holds is in `folders`, how the weights are named in `native_tensors`. The hooked model (with it
TransformerLens) is built only when it is asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from safetensors import SafetensorError

from mechinterp.checkpoints.foreign.readings import Reading
from mechinterp.checkpoints.io.atomic import writing
from mechinterp.checkpoints.io.locks import claimed
from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.native.folder import (
    FILES,
    SNAPSHOTS,
    WEIGHTS,
    document_file,
    document_of,
    read_document,
    require_new,
)
from mechinterp.checkpoints.native.folder_tensors import fill_with_tensors, read_snapshots, stacked
from mechinterp.checkpoints.native.outline import Outline
from mechinterp.checkpoints.native.tensors import require_fit, state_dict, weights_from
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig
from mechinterp.display import counted
from mechinterp.models.weights import AnyWeights, Weights, as_weights

if TYPE_CHECKING:
    from mechinterp.models.hooked.transformer import ICLTransformer
    from mechinterp.models.run.predictor import Predictor


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as it lies on disk, whoever wrote it; history and snapshots are read when they are asked for."""

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
    kept: Mapping[int, Weights] = field(default_factory=dict)
    """Of a run of files the weights of each, by step."""

    def __repr__(self) -> str:
        model, task = self.config.model, self.config.task
        layers = "" if model.one_attention else f"{counted(model.n_layers, 'layer')} of "
        mlps = "" if model.d_mlp is None else " with MLPs"
        known = self.format == "native" or self.kept
        step = f", step {self.step}" if known else ""
        return (
            f"Checkpoint({self.name}: {layers}{counted(model.n_heads, 'head')}{mlps}, d_x={task.d_x}, "
            f"context_length={task.context_length}{step})"
        )

    @property
    def name(self) -> str:
        """The folder's or file's name, printable."""
        return self.outline.name

    @property
    def task(self) -> TaskConfig:
        """The law of its prompts."""
        return self.config.task

    @property
    def training(self) -> TrainConfig | None:
        """How this package trained it; None of other files and of runs of them."""
        return self.config.train if self.format == "native" and not self.kept else None

    @property
    def shortest_trained(self) -> int | None:
        """Least context length that it was trained on; None where nobody says."""
        if self.format != "native":
            return None
        return self.config.train.shortest_context or self.task.context_length

    @property
    def assumed_of_task(self) -> tuple[str, ...]:
        """Fields of the task that neither the file nor the reader said; of the covariance its kind decides."""
        unsaid = {name.removesuffix(".kind") for name in self.assumed}
        return tuple(each.name for each in fields(TaskConfig) if f"task.{each.name}" in unsaid)

    @property
    def in_words(self) -> str:
        """One line on what the model is, what of it was assumed, and where it comes from."""
        config, model = self.config, self.config.model
        heads, kind = counted(model.n_heads, "head"), f"{model.score} attention"
        if not model.one_attention:
            heads = f"{counted(model.n_layers, 'layer')} of {heads}"
            kind += f", width {config.d_model}"
        if model.d_mlp is not None:
            kind += f", MLPs of {model.d_mlp}"
        origin = f"seed {config.seed}, step {self.step}, config {config.id}"
        if "step" in self.assumed:
            origin = f"format {self.format}{assumed_text(self.assumed)}"
        return f"{heads}, {kind}, {self.task.in_words(self.assumed_of_task)}; {origin}"

    @cached_property
    def outline(self) -> Outline:
        """What it states, without the weights."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.by_name.items()}
        return Outline(
            self.path, self.config, self.step, shapes, self.format, self.assumed, self.origin
        )

    @property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step, layer (of several) and head: loss, eval_loss, ...; or None.

        That of a run of files is measured: `run_history`.
        """
        return self._measured if self.kept else self.outline.history

    @cached_property
    def _measured(self) -> pd.DataFrame:
        from mechinterp.checkpoints.runs import run_history

        return run_history(self, self.snapshots)

    @cached_property
    def snapshots(self) -> dict[int, Weights]:
        """Weights during training, by step, on the device of `weights`."""
        kept = self.kept or {
            step: weights_from(tensors, self.config, file)
            for step, (file, tensors) in read_snapshots(self.path).items()
        }
        return {step: weights.to(self.weights.device) for step, weights in kept.items()}

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training."""
        return list(self.kept) or self.outline.steps

    def at(self, step: int) -> "Checkpoint":
        """The model as it was after so many updates.

        Raises:
            ValueError: If its weights of that step were not kept.
        Example:
            >>> load("checkpoints/softmax-h2-s0").at(1000).step
            1000
        """
        if step not in self.steps:
            raise ValueError(f"step must be one of {', '.join(map(str, self.steps))}, got {step}.")
        return replace(self, step=step, weights=self.snapshots[step], readings=(), kept={})

    def at_length(self, context_length: int) -> "Checkpoint":
        """The same model of a task with another context length, at which all of its prompts are then drawn."""
        train = self.config.train
        # Training draws prompts no longer than the task's.
        if train.shortest_context is not None:
            train = replace(train, shortest_context=min(train.shortest_context, context_length))
        task = replace(self.task, context_length=context_length)
        stated = {n: v for n, v in self.assumed.items() if n != "task.context_length"}
        return replace(self, config=replace(self.config, task=task, train=train), assumed=stated)

    def to(self, device: torch.device | str) -> "Checkpoint":
        """The same checkpoint with its weights on another device, on which its model then runs.

        Example:
            >>> load("checkpoints/softmax-h2-s0").to("cpu").weights.device
            device(type='cpu')
        """
        return replace(self, weights=self.weights.to(device))

    def under(self, reading: Reading) -> "Checkpoint":
        """The same file under one of its readings."""
        weights = as_weights(reading.weights)
        task = replace(self.config.task, d_x=weights.d_x, d_y=weights.d_y)
        config = replace(self.config, model=weights.model, task=task)
        return replace(self, config=config, weights=weights, readings=(), kept={})

    @cached_property
    def model(self) -> "ICLTransformer":
        """The hooked model, on the device of the weights."""
        from mechinterp.models.hooked.transformer import ICLTransformer

        return ICLTransformer.from_weights(self.weights, task=self.config.task)

    @cached_property
    def predictor(self) -> "Predictor":
        """The model as the analyses take it."""
        from mechinterp.models.hooked.runner import hooked_predictor
        from mechinterp.models.run.predictor import Predictor

        def is_hooked() -> bool:
            return "model" in self.__dict__ and hooked_predictor(self.model).is_hooked

        model = self.config.model
        return Predictor(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            build=lambda: hooked_predictor(self.model),
            own_weights=lambda: self.weights,
            is_hooked=is_hooked,
            task=self.task,
            assumed=self.assumed_of_task,
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Checkpoint":
        """The checkpoint in a folder; `mechinterp.from_pretrained` takes names and repositories, too.

        Raises:
            CheckpointError: As `load` does.
        Example:
            >>> Checkpoint.from_pretrained("checkpoints/softmax-h2-s0")
            Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
        """
        return load(folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder with config.json, model.safetensors and what goes with them, as `save` does.

        Raises:
            CheckpointError: If the folder is not empty or cannot be written.
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


def assumed_text(assumed: Mapping[str, object]) -> str:
    """What was filled in of the architecture that the file did not say; the task has words of its own.

    Example:
        >>> assumed_text({"task.noise_var": 0.1, "model.score": "softmax", "train.steps": 5})
        '; assumed, as the file does not say it: score softmax'
    """
    told = [
        f"{name.partition('.')[2]} {value}"
        for name, value in assumed.items()
        if name.startswith("model.") and value not in (None, (), [])
    ]
    return f"; assumed, as the file does not say it: {', '.join(told)}" if told else ""


def checkpoint_of(source: object, purpose: str) -> Checkpoint:
    """The source, which must be a checkpoint.

    Args:
        purpose: What needs it, for the message.
    Raises:
        ValueError: If it is another model.
    """
    if not isinstance(source, Checkpoint):
        raise ValueError(f"{purpose} needs a checkpoint, got a {type(source).__name__}.")
    return source


def load(path: str | Path) -> Checkpoint:
    """The checkpoint of this package in a folder.

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
    weights = weights_from(read_arrays(file), config, file)
    return Checkpoint(path, config, step, weights, **said)


def save(
    path: str | Path,
    config: ExperimentConfig,
    weights: AnyWeights,
    *,
    step: int,
    history: pd.DataFrame | None = None,
    snapshots: Mapping[int, AnyWeights] | None = None,
    assumed: Mapping[str, object] | None = None,
    origin: Mapping[str, object] | None = None,
    shared: bool = False,
) -> None:
    """Write a checkpoint folder; config.json comes last, so that a folder that has it is whole.

    Args:
        shared: Whether other files may be in the folder; else it must be empty.
    Raises:
        CheckpointError: If a file is in the way, the folder cannot be written, or the weights are not those
            of such a model.
    """
    path, weights = Path(path), as_weights(weights)
    require_fit(path, weights, config)
    kept = {at: state_dict(as_weights(snapshot)) for at, snapshot in (snapshots or {}).items()}
    text = json.dumps(document_of(config, step=step, assumed=assumed, origin=origin), indent=2)
    if not shared:
        require_new(path)
    names = FILES if shared else None
    with writing(path, SafetensorError), claimed(path, last="config.json", names=names) as claim:
        if kept:
            claim.write(SNAPSHOTS, partial(fill_with_tensors, tensors=stacked(kept)))
        claim.write(WEIGHTS, partial(fill_with_tensors, tensors=state_dict(weights)))
        if history is not None:
            claim.write("history.parquet", partial(history.to_parquet, index=False))
        claim.write("config.json", lambda file: file.write_text(f"{text}\n"))
