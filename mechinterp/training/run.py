"""Training runs: weights as one flat tensor with Adam's moments, resumable from one file (`training.state`).

A run that was killed and resumed ends with the same bits as an uninterrupted run.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import Numbers, Prompts, generator_for
from mechinterp.interrupts import uninterrupted
from mechinterp.models.weights import Weights
from mechinterp.training.batches import batch_chunks, narrowed
from mechinterp.training.state import read_state, resumable, stored_origin, with_prefix, write_state
from mechinterp.training.trained import TrainedModel, history_of

SAVE_SECONDS = 30.0
"""Seconds between two writes of the state file."""
ROUNDED_UP_TO = 64
_LOSSES = ("loss", "eval_loss")
"""First parts of the names of the history's losses; each has one number per model."""


Batch = tuple[Prompts, ...]
"""One set of prompts per task of a run, with the same covariates and noise."""


@runtime_checkable
class NamedTensors(Protocol):
    """Weights by name."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copy with these tensors."""


Trained = TypeVar("Trained", bound=NamedTensors)
"""Type of the trained weights."""


@dataclass(frozen=True, eq=False)
class Progress:
    """Progress of a pack, reported at every logged step."""

    step: int
    steps: int
    n_models: int
    loss: float
    """Mean training loss since the last logged step, over the models that have not diverged; unit y^2."""
    steps_per_second: float
    """Updates of the whole pack per second since training began or was resumed."""
    diverged: tuple[str, ...] = ()
    """Models whose divergence was noticed at this row."""

    @property
    def seconds_left(self) -> float:
        return (self.steps - self.step) / self.steps_per_second


OnLog = Callable[[Progress], None]
"""Function that is called with the progress at every logged step."""


class TrainingRun(ABC, Generic[Trained]):
    """Models in training with Adam: weights, gradient and moments as flat tensors, and the rows logged so far."""

    models: dict[str, ExperimentConfig]
    config: ExperimentConfig
    """Config of the first model; the models share all settings that are read from it."""
    tasks: tuple[TaskConfig, ...]
    """Distinct tasks of these models."""
    weights: Trained
    """Weights by name, as views of `flat`."""
    flat: Tensor
    """All weights, concatenated."""
    gradient: Tensor
    """Gradient of the mean loss on the last batch."""
    moments: dict[str, Tensor]
    """Adam's first and second moments."""
    loss_sum: Tensor
    """Sum of the losses since the last logged row."""
    step: int
    rows: dict[str, Tensor]
    """History, [row, ...] by column."""
    snapshots: dict[int, Tensor]
    """`flat` at earlier steps, by step."""
    origin: Mapping[str, object]
    """The checkpoint that the run started from; empty: random weights."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        start: Trained,
        loss_sum: Tensor,
        *,
        device: torch.device | str,
        rounded_up: bool,
    ):
        """Start a run.

        Args:
            models: Configs by name. They share all settings with the first except seeds, heads and pools of tasks.
            start: Initial weights.
            loss_sum: Zero, or one zero per model.
            rounded_up: True: pad the flat tensors with zeros to a multiple of ROUNDED_UP_TO. PyTorch rounds the last few
                entries of a tensor differently, and a model's bits must not depend on its position in the tensor.
        """
        self.models, self.config = dict(models), next(iter(models.values()))
        self.tasks = tuple(dict.fromkeys(config.task for config in models.values()))
        self.loss_sum = loss_sum.to(device)
        flat = flattened(start)
        filled_up = len(flat) + (-len(flat) % ROUNDED_UP_TO if rounded_up else 0)
        rows = flat.new_zeros(4, filled_up, device=device)
        self._adam_rows = rows.unbind()
        self.flat, self.gradient, exp_avg, exp_avg_sq = rows[:, : len(flat)].unbind()
        self.moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.flat.copy_(flat)
        self.weights = views(self.flat, start)
        self._n_updates = torch.zeros((), dtype=torch.float32, device=device)
        self.step, self.rows, self.snapshots = 0, {}, {}
        self.origin = {}
        self._record()

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "TrainingRun[Trained]":
        """Run restored from a state file.

        Raises:
            CheckpointError: If the file is truncated or was not written by `save`.
        """
        models, step, tensors = read_state(file)
        with resumable(file):
            run = cls(models, device=device)  # type: ignore[call-arg]
            run._resume(step, tensors)
        run.origin = stored_origin(file)
        return run

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """Mean squared error on prompts, a scalar or one number per model."""

    @abstractmethod
    def _loss_and_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mean squared error on prompts, and its gradient in the flat tensor."""

    @abstractmethod
    def _measured(self) -> dict[str, Tensor]:
        """Further columns of a history row beside step and losses: one number per head, with heads as the last axis."""

    @abstractmethod
    def _model(self, index: int, weights: Trained) -> Weights:
        """Weights of the model with this index, from the weights of all models."""

    def _measured_of(self, index: int, rows: Tensor) -> Tensor:
        """Rows of a measured column, [row, ..., head], of the model with this index."""
        return rows

    @property
    def _numbers(self) -> Numbers | None:
        """Function that draws standard normal numbers; None: torch."""
        return None

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def diverged(self) -> dict[str, int]:
        """First logged step with a loss that is not finite, by name of the model."""
        lost, names = ~torch.isfinite(self._losses("eval_loss")), list(self.models)
        first = {index: lost[:, index].byte().argmax() for index in lost.any(0).nonzero().flatten()}
        return {names[index]: int(self.rows["step"][row]) for index, row in first.items()}

    @property
    def finished(self) -> bool:
        """True if all updates are made or every model has diverged."""
        return self.step == self.config.train.steps or len(self.diverged) == len(self.models)

    def advance(self) -> float:
        """Train up to the next logged step; returns the mean loss since the last one, over steps and models."""
        train = self.config.train
        end = min(self.step + train.log_every, train.steps)
        n_steps, snapshot_steps = end - self.step, set(train.snapshot_steps)
        for step in range(self.step, end):
            self.update(step)
            if step + 1 in snapshot_steps and step + 1 < end:
                self.snapshots[step + 1] = self.flat.clone()
        self.step = end
        return self._record(n_steps)

    def update(self, step: int) -> None:
        """Train on the prompts of one step with Adam, called as a function (torch.optim.Adam takes ten times as long)."""
        self._set_gradient(step)
        train = self.config.train
        if train.clip_norm is not None:
            self._clip(train.clip_norm)
        self._adam(train.step_size(step))

    def _adam(self, step_size: float | Tensor) -> None:
        flat, gradient, exp_avg, exp_avg_sq = self._adam_rows
        self._n_updates += 1
        decay = self.config.train.weight_decay
        (torch._fused_adam_ if decay is None else torch._fused_adamw_)(
            *([flat], [gradient], [exp_avg], [exp_avg_sq], [], [self._n_updates]),
            lr=step_size,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=decay or 0.0,
            amsgrad=False,
            maximize=False,
        )

    def save(self, file: Path) -> None:
        """Write the whole state to one file.

        Raises:
            CheckpointError: If the file cannot be written; an earlier state is kept.
        """
        write_state(file, self.models, self.step, self._stored(), origin=self.origin)

    def _stored(self) -> dict[str, Tensor]:
        """Tensors of the state file, by name."""
        stored = {"flat": self.flat}
        stored |= {f"moment.{name}": moment for name, moment in self.moments.items()}
        stored |= {f"row.{name}": rows for name, rows in self.rows.items()}
        return stored | {f"snapshot.{step}": flat for step, flat in self.snapshots.items()}

    def results(self) -> dict[str, TrainedModel]:
        """Weights, history and snapshots of every model, by name; later steps do not change them."""
        trained = {}
        # Rows restored from a file have another order: loss, eval_loss, and then by number of pairs.
        losses = sorted((n for n in self.rows if n.startswith(_LOSSES)), key=lambda n: (len(n), n))
        for index, (name, config) in enumerate(self.models.items()):
            history = history_of(
                self.rows["step"],
                {name: self._losses(name)[:, index] for name in losses},
                {n: self._measured_of(index, self.rows[n]) for n in self._measured()},
            )
            snapshots = {
                step: self._model(index, views(self.snapshots[step], self.weights))
                for step in sorted(self.snapshots)
            }
            weights = self._model(index, self.weights)
            trained[name] = TrainedModel(
                config, weights, self.step, history, snapshots, self.origin
            )
        return trained

    def _set_gradient(self, step: int) -> None:
        """Set the gradient of the mean loss on the batch of a step, and add the loss to `loss_sum`."""
        self.gradient.zero_()
        n_prompts = self.config.train.batch_size
        for prompts in self._prompts("train", step, n_prompts):
            loss, gradient = self._loss_and_gradient(prompts)
            share = len(prompts[0]) / n_prompts
            self.gradient.add_(gradient, alpha=share)
            self.loss_sum.add_(loss, alpha=share)

    def _clip(self, limit: float) -> None:
        """Scale the gradient down to this norm if it is longer."""
        norm = torch.linalg.vector_norm(self.gradient)
        self.gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))

    def _evaluated(self) -> dict[str, Tensor]:
        """Losses on the fixed evaluation prompts by name, `eval_loss` among them."""
        return {"eval_loss": self._eval_mean(self._loss)}

    @torch.no_grad()
    def _eval_mean(self, losses: Callable[[Batch], Tensor]) -> Tensor:
        """Mean over the evaluation prompts of losses of a batch."""
        n_prompts, size = self.config.train.n_eval_prompts, self.config.train.batch_size
        total = self.loss_sum.new_zeros(())
        for prompts in self._prompts("eval", 0, n_prompts):
            for start in range(0, len(prompts[0]), size):
                part = tuple(each[start : start + size] for each in prompts)
                total = total + losses(part).to(total) * len(part[0])
        return total / n_prompts

    def _prompts(self, stream: str, step: int, n_prompts: int) -> Iterator[Batch]:
        """Fresh prompts of every task, from (data seed, stream, step) alone; pools change task vectors only."""
        every, seed, dtype = [], self.config.train.data_seed, self.flat.dtype
        for task in self.tasks:
            draw = generator_for(seed, stream, step, device=self.device)
            d_x, length = task.d_x, None
            if stream == "train":
                d_x, longest = self.config.train.stage(
                    step, d_x=task.d_x, context_length=task.context_length
                )
                length = self._length(step, draw, longest)
            chunks = batch_chunks(
                *(task, n_prompts),
                generator=draw,
                context_length=length,
                dtype=dtype,
                numbers=self._numbers,
            )
            every.append(chunks if d_x == task.d_x else (narrowed(each, d_x) for each in chunks))
        return zip(*every, strict=True)

    def _length(self, step: int, generator: torch.Generator, longest: int) -> int:
        """Pairs per prompt in a step. Drawn on the CPU, so that it is equal on all devices and no step waits for a GPU."""
        train = self.config.train
        if train.shortest_context is None:
            return longest
        if self.device.type != "cpu":
            generator = generator_for(train.data_seed, "train", step)
        return int(
            torch.randint(
                train.shortest_context, longest + 1, (), generator=generator, device="cpu"
            )
        )

    def _losses(self, name: str) -> Tensor:
        """One of the losses in the history, [row, model]."""
        return self.rows[name].reshape(len(self.rows[name]), -1)

    def _resume(self, step: int, stored: Mapping[str, Tensor]) -> None:
        """Restore a state of the same models into a new run.

        Raises:
            ValueError: If the shapes in the state differ from those of this run.
        """
        rows, snapshots = with_prefix(stored, "row."), with_prefix(stored, "snapshot.")
        if rows.keys() != self.rows.keys():
            raise ValueError(f"rows must be of {', '.join(self.rows)}, got {', '.join(rows)}")
        for name, row in rows.items():
            _require_like(f"rows of {name}", row[0], self.rows[name][0])
        own = {"weights": ("flat", self.flat)}
        own |= {name: (f"moment.{name}", moment) for name, moment in self.moments.items()}
        for label, (name, tensor) in own.items():
            _require_like(label, stored[name], tensor)
            tensor.copy_(stored[name])
        self._n_updates.fill_(step)
        self.step, self.rows = step, rows
        self.snapshots = {int(at): flat.to(self.device) for at, flat in snapshots.items()}

    def _record(self, n_steps: int = 0) -> float:
        """Append a row to the history; returns the mean loss since the last row, over models with a finite loss."""
        if self.step in self.config.train.snapshot_steps:
            self.snapshots[self.step] = self.flat.clone()
        loss = self.loss_sum / n_steps if n_steps else torch.full_like(self.loss_sum, torch.nan)
        row = {
            "step": torch.tensor(self.step, device="cpu"),
            "loss": loss,
        }
        for name, value in (row | self._evaluated() | self._measured()).items():
            value = value.cpu()[None]
            self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value
        self.loss_sum.zero_()
        return loss[torch.isfinite(loss)].mean().item()


def train_run(
    run: TrainingRun, file: Path, *, on_log: Callable[[Progress], None] | None = None
) -> float:
    """Train to the end, saving the state every SAVE_SECONDS; returns the seconds spent.

    A first Ctrl-C waits for the next logged step, whose state is then saved; a second one ends the training at once.

    Args:
        file: State file, from which `restore` can resume the run.
        on_log: Called at every logged step.
    Raises:
        CheckpointError: If the state cannot be written.
    """
    first_step, steps = run.step, run.config.train.steps
    start = saved = time.monotonic()
    while not run.finished:
        whole = False  # between steps, so that the state can be saved
        try:
            with uninterrupted(once=True):
                loss = run.advance()
                whole = True
            if on_log is not None:
                rate = (run.step - first_step) / (time.monotonic() - start)
                lost = tuple(name for name, step in run.diverged.items() if step == run.step)
                on_log(Progress(run.step, steps, len(run.models), loss, rate, lost))
        except KeyboardInterrupt:
            if whole:
                run.save(file)
            raise
        if run.finished or time.monotonic() - saved > SAVE_SECONDS:
            run.save(file)
            saved = time.monotonic()
    return time.monotonic() - start


def uniform(generator: torch.Generator, fan_in: int, *shape: int) -> Tensor:
    """Random numbers, uniform in +-1/sqrt(fan_in), in float32 on the CPU."""
    drawn = torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu")
    return (2 * drawn - 1) / fan_in**0.5


def flattened(weights: NamedTensors) -> Tensor:
    """All weights, concatenated."""
    return torch.cat([tensor.flatten() for tensor in weights.tensors.values()])


def views(flat: Tensor, like: Trained) -> Trained:
    """Weights that are views of a flat tensor, with the names and shapes of `like`."""
    shapes = {name: tensor.shape for name, tensor in like.tensors.items()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    named_parts = zip(shapes.items(), parts, strict=True)
    return like.with_tensors({name: part.view(shape) for (name, shape), part in named_parts})


def own(weights: Trained) -> Trained:
    """Copy of weights on the CPU, not changed by later steps."""
    return weights.with_tensors({name: t.cpu().clone() for name, t in weights.tensors.items()})


def _require_like(what: str, tensor: Tensor, expected: Tensor) -> None:
    """Refuse a tensor of another dtype or shape."""
    for name in ("dtype", "shape"):
        given, wanted = getattr(tensor, name), getattr(expected, name)
        if given != wanted:
            raise ValueError(f"{what} must have {name} {wanted}, got {given}")
