"""A checkpoint: a model with its task, its history and what was assumed; reading and writing of the
package's folders."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from mechinterp.checkpoints.foreign.readings.losses import Reading
from mechinterp.checkpoints.io.files import writing
from mechinterp.checkpoints.io.locks import claimed
from mechinterp.checkpoints.io.tensor_files import read_arrays
from mechinterp.checkpoints.native.card import card_of, training_in_words
from mechinterp.checkpoints.native.document import (
    GROUNDS,
    document_of,
    read_document,
    require_stated,
    sha256_of,
)
from mechinterp.checkpoints.native.folder import (
    CONFIG_FILE,
    FILES,
    HISTORY_FILE,
    SNAPSHOTS,
    WEIGHTS_FILE,
    Outline,
    document_file,
    require_new,
    stated_files,
)
from mechinterp.checkpoints.native.tensors import (
    fill_with_tensors,
    read_snapshots,
    require_fit,
    stacked_snapshots,
    state_dict,
    weights_from,
)
from mechinterp.checkpoints.runs import Run, run_history
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig
from mechinterp.display import counted
from mechinterp.models.run.predictor import WeightsPredictor
from mechinterp.models.run.ways import Predictor
from mechinterp.models.weights import Weights

CARD = "README.md"
"""File of the model card, which hubs display."""


if TYPE_CHECKING:
    from mechinterp.models.hooked.transformer import ICLTransformer


class CurrentWeights:
    """The field `weights` of a checkpoint: those of its model once that exists, which share memory with its parameters."""

    def __get__(self, checkpoint: "Checkpoint | None", owner: type | None = None) -> Weights:
        if checkpoint is None:
            raise AttributeError("the field weights has no default")
        stated = vars(checkpoint)["weights"]
        current: Any = checkpoint.predictor.weights if stated is None else stated
        return current

    def __set__(self, checkpoint: "Checkpoint", weights: Weights) -> None:
        vars(checkpoint)["weights"] = weights


@dataclass(frozen=True, eq=False)
class Checkpoint(Run):
    """A model on disk, in the format of this package or of external code; history and snapshots are
    read on first use."""

    path: Path
    config: ExperimentConfig
    step: int
    """Number of updates of the weights."""
    weights: Weights = CurrentWeights()  # type: ignore[assignment]
    """Weights of the model. An edit in place of these or of `model` is an edit of both."""
    format: str = "native"
    """"native", or the format of an external file."""
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Settings that the file did not state and that were assumed, by dotted name."""
    stated: Mapping[str, object] = field(default_factory=dict)
    """Settings of an external file that it or the user states, by dotted name."""
    known: Mapping[str, object] = field(default_factory=dict)
    """Settings that the code of the file's format, or the shapes, fix."""
    proven: Mapping[str, object] = field(default_factory=dict)
    """Settings that recorded predictions prove."""
    origin: Mapping[str, object] = field(default_factory=dict)
    """Origin of a model beyond training by its config: the model that was pruned, its heads, later changes."""
    readings: Sequence[Reading] = ()
    """Possible readings of a file that leaves settings open, that of `weights` first; empty if
    nothing was open."""
    kept: Mapping[int, Weights] = field(default_factory=dict)
    """Weights by step, for a run of several files."""
    doubting: Callable[[], str] | None = None
    """Computes why the reading of an external file may be wrong; None: nothing to doubt."""

    def __repr__(self) -> str:
        task, mlps = self.task, "" if self.config.model.d_mlp is None else " with MLPs"
        step = f", step {self.step}" if self.format == "native" or self.kept else ""
        sizes = f"d_x={task.d_x}, context_length={task.context_length}"
        return f"Checkpoint({self.name}: {self._heads}{mlps}, {sizes}{step})"

    def __getstate__(self) -> dict[str, object]:
        """The fields alone, as cached properties are computed again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def _heads(self) -> str:
        """Numbers of layers and heads, in words."""
        model = self.config.model
        layers = "" if model.one_attention else f"{counted(model.n_layers, 'layer')} of "
        return layers + counted(model.n_heads, "head")

    @property
    def name(self) -> str:
        """The folder's or file's name, printable."""
        return self.outline.name

    @cached_property
    def task(self) -> TaskConfig:
        """Task of the prompts; fields that neither the file nor the user stated are assumed."""
        unsaid = [n.removeprefix("task.") for n in self.assumed if n.startswith("task.")]
        return self.config.task.assuming({name.removesuffix(".kind") for name in unsaid})

    @property
    def trained_here(self) -> bool:
        """True if this package trained the model, so that its task is known."""
        return "step" not in self.assumed

    @cached_property
    def doubt(self) -> str:
        """Why an external file may have been read wrongly, or under a wrong task; empty if nothing
        suggests it. Computed on first use."""
        if "doubt" in self.assumed:
            return str(self.assumed["doubt"])
        return "" if self.doubting is None else self.doubting()

    @property
    def assumed_and_doubt(self) -> dict[str, object]:
        """Assumed settings, with the doubt if there is one, as folders store them."""
        return {**self.assumed, **({"doubt": self.doubt} if self.doubt else {})}

    @property
    def identity(self) -> dict[str, object]:
        """Path, format and sizes, for tables of models and JSON documents."""
        return self.outline.identity

    @property
    def grounds(self) -> dict[str, Mapping[str, object]]:
        """Settings that are not assumed, by their ground."""
        return {ground: getattr(self, ground) for ground in GROUNDS}

    @property
    def training(self) -> TrainConfig | None:
        """Training settings of a model of this package; None for external files and runs of them."""
        return self.config.train if self.format == "native" and not self.kept else None

    @property
    def shortest_trained(self) -> int | None:
        """Least context length of its training; None if not known."""
        train = self.config.train
        if self.format != "native":
            return None
        if train.first_counted is not None:
            return train.first_counted
        return train.shortest_context or self.task.context_length

    @property
    def in_words(self) -> str:
        """Line about the model: its kind, its task, its format, and what was assumed."""
        config, model = self.config, self.config.model
        kind = f"{model.score} attention"
        if not model.one_attention:
            kind += f", width {config.d_model}"
        if model.d_mlp is not None:
            kind += f", MLPs of {model.d_mlp}"
        origin = f"seed {config.seed}, step {self.step}, config {config.id}"
        if not self.trained_here:
            named = {n.partition(".")[2]: v for n, v in self.assumed.items() if n[:6] == "model."}
            assumed = [f"{n} {value}" for n, value in named.items() if value not in (None, (), [])]
            grounds = {ground: self.grounds[ground] for ground in ("stated", "proven", "known")}
            settled = [
                f"{ground}: {', '.join(n.removeprefix('model.') for n in settings if n[:6] == 'model.')}"
                for ground, settings in grounds.items()
                if any(name.startswith("model.") for name in settings)
            ]
            # Settings that may be wrong come first.
            first = [f"assumed for the model: {', '.join(assumed)}"] if assumed else []
            doubt = [self.doubt] if self.doubt else []
            origin = "; ".join([*first, *doubt, *settled, f"format {self.format}"])
        return f"{self._heads}, {kind}, {self.task.in_words}; {origin}"

    @cached_property
    def outline(self) -> Outline:
        """Config, step and shapes, without the weights."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.weights.by_name.items()}
        grounds = {ground: settings for ground, settings in self.grounds.items() if settings}
        stated = (self.format, self.assumed, self.origin, grounds)
        return Outline(self.path, self.config, self.step, shapes, *stated)

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """One row per logged step, layer (if several) and head: loss, ...; for a run of files
        `run_history`; None if there is none."""
        return run_history(self, self.snapshots) if self.kept else self.outline.history

    @cached_property
    def snapshots(self) -> dict[int, Weights]:
        """Weights during training, by step, on the device of `weights`."""
        kept = self.kept or {
            step: weights_from(tensors, self.config, file)
            for step, (file, tensors) in read_snapshots(self.path).items()
        }
        if not self.kept:
            require_stated(self.path / SNAPSHOTS, stated_files(self.path))
        return {step: weights.to(self.weights.device) for step, weights in kept.items()}

    @property
    def steps(self) -> list[int]:
        """Steps of the snapshots during training; reads no weights."""
        return list(self.kept) or self.outline.steps

    def _after(self, step: int) -> "Checkpoint":
        weights = self.snapshots[step].copied()
        return replace(self, step=step, weights=weights, readings=(), kept={})

    def at_length(self, context_length: int) -> "Checkpoint":
        """Copy for a task with another context length, with which prompts are then drawn."""
        train = self.config.train
        # Training draws prompts no longer than the task's.
        for name in ("shortest_context", "curriculum_length"):
            if (longer := getattr(train, name)) is not None:
                train = replace(train, **{name: min(longer, context_length)})
        task = replace(self.task, context_length=context_length)
        stated = {n: v for n, v in self.assumed.items() if n != "task.context_length"}
        return replace(self, config=replace(self.config, task=task, train=train), assumed=stated)

    def to(self, device: torch.device | str) -> "Checkpoint":
        """Copy with its weights on another device, where its model then runs.

        Example:
            >>> load("checkpoints/softmax-h2-s0").to("cpu").weights.device
            device(type='cpu')
        """
        return replace(self, weights=self.weights.to(device))

    def under(self, reading: Reading) -> "Checkpoint":
        """Checkpoint of the file under one of its readings."""
        weights = reading.weights.copied()
        task = replace(self.config.task, d_x=weights.d_x, d_y=weights.d_y)
        config = replace(self.config, model=weights.model, task=task)
        return replace(self, config=config, weights=weights, readings=(), kept={})

    @property
    def model(self) -> "ICLTransformer":
        """The hooked model, on the device of the weights."""
        return self.predictor.hooked.model  # type: ignore[return-value]

    @cached_property
    def predictor(self) -> Predictor:
        """The model as analyses use it."""
        predictor = WeightsPredictor(
            own=self.weights,
            task=self.task,
            trained_here=self.trained_here,
            law_stated=self.trained_here or self.task.states_law,
            doubts=partial(getattr, self, "doubt"),
        )
        vars(self)["weights"] = None  # from now on the predictor has them
        return predictor

    def card(
        self, *, source: str | None = None, licence: str = "mit", verdict: str = "", loss: str = ""
    ) -> str:
        """Model card: architecture, task, training, and how to load the model.

        Args:
            source: Argument for `load` in the card; None: the checkpoint's name.
            licence, verdict, loss: As for `card_of`.
        Example:
            >>> print(load("checkpoints/softmax-h2-s0").card().splitlines()[-9])
            | trained | 500,001 steps of 256 prompts at learning rate 0.001, seed 0 |
        """
        return card_of(
            self.name,
            self.config.model,
            self.task,
            training_in_words(self.config, self.step, self.origin, native=self.format == "native"),
            source=source or self.name,
            licence=licence,
            verdict=verdict,
            loss=loss,
        )

    def save_pretrained(self, folder: str | Path, *, card: str | None = None) -> None:
        """Write a folder with config.json, model.safetensors, history and snapshots if there are
        any, and the model card README.md.

        Args:
            card: Text of the card; None: what the checkpoint itself knows, without a label; empty:
                no card is written.
        Raises:
            CheckpointError: If the folder is not empty or cannot be written.
        """
        if card is None:
            card = self.card(source=Path(folder).absolute().name)
        save(
            folder,
            self.config,
            self.weights,
            step=self.step,
            history=self.history,
            snapshots=self.snapshots,
            assumed=self.assumed_and_doubt,
            origin=self.origin,
            grounds=self.grounds,
        )
        if card:
            with writing(Path(folder)):
                (Path(folder) / CARD).write_text(card, encoding="utf-8")


def checkpoint_of(source: object, purpose: str) -> Checkpoint:
    """The source as a checkpoint.

    Args:
        purpose: What needs the checkpoint; the message begins with it.
    Raises:
        ValueError: If it is another model.
    """
    if not isinstance(source, Checkpoint):
        kind = type(source).__name__
        way = "; torch.save(module.state_dict(), 'weights.pt') writes one, and load('weights.pt') reads it"
        hint = way if hasattr(source, "hooked") else ""
        raise ValueError(f"{purpose} needs a checkpoint, got a {kind}{hint}.")
    return source


def load(path: str | Path) -> Checkpoint:
    """Load a checkpoint of this package from a folder.

    Raises:
        CheckpointError: If the folder is no checkpoint, or its weights are missing, have a
            wrong shape or are not finite.
    Example:
        >>> load("checkpoints/softmax-h2-s0")
        Checkpoint(softmax-h2-s0: 2 heads, d_x=5, context_length=40, step 500001)
    """
    path = Path(path)
    document, config = read_document(document_file(path))
    file = path / WEIGHTS_FILE
    weights = weights_from(read_arrays(file), config, file)
    require_stated(file, document["files"])
    stated = {name: document[name] for name in ("step", "assumed", "origin")}
    return Checkpoint(path, config, weights=weights, **stated, **document["grounds"])


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
    grounds: Mapping[str, Mapping[str, object]] | None = None,
    shared: bool = False,
) -> None:
    """Write a checkpoint folder; config.json is written last, so that a folder with it is complete.

    Args:
        grounds: Settings of a model of other code that are known, proven or stated, by that word.
        shared: True: other files may be in the folder. False: it must be empty.
    Raises:
        CheckpointError: If a file would be overwritten, the folder cannot be written, or the
            weights do not fit the config.
    """
    path = Path(path)
    require_fit(path, weights, config)
    kept = {at: state_dict(snapshot) for at, snapshot in (snapshots or {}).items()}
    if not shared:
        require_new(path)
    names = FILES if shared else None
    with claimed(path, last=CONFIG_FILE, names=names) as claim:
        if kept:
            claim.write(SNAPSHOTS, partial(fill_with_tensors, tensors=stacked_snapshots(kept)))
        claim.write(WEIGHTS_FILE, partial(fill_with_tensors, tensors=state_dict(weights)))
        if history is not None:
            claim.write(HISTORY_FILE, partial(history.to_parquet, index=False))
        files = {name: sha256_of(file) for name, file in claim.waiting.items()}
        document = document_of(
            config, step=step, assumed=assumed, origin=origin, files=files, grounds=grounds
        )
        text = json.dumps(document, indent=2) + "\n"
        claim.write(CONFIG_FILE, lambda file: file.write_text(text, encoding="utf-8"))
