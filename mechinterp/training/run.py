"""Models in training as one flat tensor, stopped and resumed through one file.

All that a resumed run needs lies in that file, written atomically: weights, the optimizer's moments, the rows logged
so far and the snapshots. A run that was killed and resumed ends with the same bits as one that was not.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

import pandas as pd
import torch
from torch import Tensor

from mechinterp.checkpoints.checkpoint import save
from mechinterp.config import ExperimentConfig
from mechinterp.models.weights import Weights
from mechinterp.training.state import State, write_state

SAVE_SECONDS = 30.0

Form = TypeVar("Form", bound="Named")
"""The form in which weights are trained."""


@runtime_checkable
class Named(Protocol):
    """Weights of any form: heads of one layer, a stack of layers, or by name."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def with_tensors(self: Form, tensors: Mapping[str, Tensor]) -> Form: ...


@dataclass(frozen=True, eq=False)
class Progress:
    """What a caller learns at every logged step."""

    step: int
    steps: int
    n_models: int
    loss: float
    """Mean training loss since the last logged step, averaged over the models that have not diverged; unit y^2."""
    steps_per_second: float
    """Updates of the whole pack per second since training began or was resumed."""
    diverged: tuple[str, ...] = ()
    """Models found at this row to have diverged, and not before."""

    @property
    def seconds_left(self) -> float:
        return (self.steps - self.step) / self.steps_per_second


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, ready to be saved as a checkpoint."""

    config: ExperimentConfig
    weights: Weights
    step: int
    history: pd.DataFrame
    snapshots: dict[int, Weights]

    def save(self, folder: Path, *, shared: bool = False) -> None:
        """Write the checkpoint.

        Args:
            shared: Whether other files may be in the folder, such as those of the run.
        Raises:
            CheckpointError: If a file is in the way, or the folder cannot be written.
        """
        save(
            folder,
            self.config,
            self.weights,
            step=self.step,
            history=self.history,
            snapshots=self.snapshots,
            shared=shared,
        )


class Run(ABC, Generic[Form]):
    """Models in training: their weights in one flat tensor and the rows logged so far."""

    models: dict[str, ExperimentConfig]
    config: ExperimentConfig
    """Of the first model, for what all share."""
    like: Form
    flat: Tensor
    """All weights."""
    loss_sum: Tensor
    """Of the steps since the last row."""
    device: torch.device
    step: int
    rows: dict[str, Tensor]
    """The history, [row, ...] by column."""
    snapshots: dict[int, Tensor]
    """`flat` at earlier steps."""

    def __init__(
        self, models: Mapping[str, ExperimentConfig], like: Form, flat: Tensor, loss_sum: Tensor
    ):
        """A run at its start.

        Args:
            models: Configs by name; all but seeds and heads are those of the first.
            like: Weights with the shapes that `flat` is cut into.
            flat: The weights that are trained.
            loss_sum: Zero, or zeros for several models; what `_update` adds each step's loss to.
        """
        self.models, self.config = dict(models), next(iter(models.values()))
        self.like, self.flat, self.loss_sum = like, flat, loss_sum
        self.device, self.step = flat.device, 0
        self.rows, self.snapshots = {}, {}
        self._record()

    @property
    @abstractmethod
    def moments(self) -> Mapping[str, Tensor]:
        """What the optimizer keeps."""

    @property
    @abstractmethod
    def diverged(self) -> dict[str, int]:
        """The logged step at which a model was first found to hold a loss that is not finite, by name."""

    @abstractmethod
    def results(self) -> dict[str, TrainedModel]:
        """Weights, history and snapshots of every model, by name."""

    @abstractmethod
    def _update(self, step: int) -> None:
        """Train on the prompts of a step, and add its loss to the sum."""

    @abstractmethod
    def _row(self) -> dict[str, Tensor]:
        """What a row of the history holds beside step and loss; `eval_loss` at least."""

    @property
    def weights(self) -> Form:
        """The weights as they are now: views of the flat tensor."""
        return views(self.flat, self.like)

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all updates are made, or every model has diverged."""
        return self.step == self.config.train.steps or len(self.diverged) == len(self.models)

    def advance(self) -> float:
        """Train up to the next logged step; the mean loss since the last one, over steps and models."""
        train = self.config.train
        end = min(self.step + train.log_every, train.steps)
        n_steps, snapshot_steps = end - self.step, set(train.snapshot_steps)
        for step in range(self.step, end):
            self._update(step)
            if step + 1 in snapshot_steps and step + 1 < end:
                self.snapshots[step + 1] = self.flat.detach().clone()
        self.step = end
        return self._record(n_steps)

    def save(self, file: Path) -> None:
        """Write the whole state to one file.

        Raises:
            CheckpointError: If it cannot be written; a state that was there before is kept.
        """
        parts = (self.models, self.step, self.flat, self.moments, self.rows, self.snapshots)
        write_state(file, State(*parts))

    @torch.no_grad()
    def _resume(self, state: State) -> None:
        """Go on from a state of the same models, this run being at its start.

        Raises:
            ValueError: If what it holds does not have the shapes of this run.
        """
        require_like("weights", state.flat, self.flat)
        if state.rows.keys() != self.rows.keys():
            raise ValueError(f"rows must be of {', '.join(self.rows)}, got {', '.join(state.rows)}")
        for name, rows in state.rows.items():
            require_like(f"rows of {name}", rows[0], self.rows[name][0])
        self.flat.copy_(state.flat)
        self.step, self.rows = state.step, state.rows
        self.snapshots = {step: flat.to(self.device) for step, flat in state.snapshots.items()}

    @torch.no_grad()
    def _record(self, n_steps: int = 0) -> float:
        """Append a row of the history; the mean loss since the last row, over models that have one."""
        if self.step in self.config.train.snapshot_steps:
            self.snapshots[self.step] = self.flat.detach().clone()
        loss = self.loss_sum / n_steps if n_steps else torch.full_like(self.loss_sum, torch.nan)
        row = {"step": torch.tensor(self.step), "loss": loss} | self._row()
        for name, value in row.items():
            value = value.cpu()[None]
            self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value
        self.loss_sum.zero_()
        return loss[torch.isfinite(loss)].mean().item()


def views(flat: Tensor, like: Form) -> Form:
    """Weights that are views of a flat tensor, with the shapes of `like`."""
    shapes = {name: tensor.shape for name, tensor in like.tensors.items()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return like.with_tensors(
        {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    )


def require_like(what: str, found: Tensor, expected: Tensor) -> None:
    """Refuse a tensor of another dtype or shape."""
    for name in ("dtype", "shape"):
        if getattr(found, name) != getattr(expected, name):
            raise ValueError(
                f"{what} must have {name} {getattr(expected, name)}, got {getattr(found, name)}"
            )


def own(weights: Form) -> Form:
    """A copy of weights on the CPU, which later steps do not reach."""
    return weights.with_tensors(
        {name: tensor.detach().cpu().clone() for name, tensor in weights.tensors.items()}
    )


def train_run(run: Run, file: Path, *, on_log: Callable[[Progress], None] | None = None) -> float:
    """Train to the end, saving the state every half minute; seconds spent in steps.

    Args:
        file: Where the state lies; the run can be resumed from it with its `restore`.
        on_log: Called at every logged step.
    Raises:
        CheckpointError: If the state cannot be written.
    """
    first_step, steps = run.step, run.config.train.steps
    start = saved = time.monotonic()
    while not run.finished:
        loss = run.advance()
        if on_log is not None:
            rate = (run.step - first_step) / (time.monotonic() - start)
            lost = tuple(name for name, step in run.diverged.items() if step == run.step)
            on_log(Progress(run.step, steps, len(run.models), loss, rate, lost))
        if run.finished or time.monotonic() - saved > SAVE_SECONDS:
            run.save(file)
            saved = time.monotonic()
    return time.monotonic() - start
