"""Models in training as one flat tensor with Adam's moments, stopped and resumed through one file.

All that a resumed run needs lies in that file, written atomically: weights, moments, the rows logged so far and the
snapshots. A run that was killed and resumed ends with the same bits as one that was not.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from mechinterp.config import ExperimentConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.weights import Weights
from mechinterp.training.batches import batch_chunks
from mechinterp.training.flat import Form, flattened, require_like, views
from mechinterp.training.state import State, read_state, resumable, write_state
from mechinterp.training.trained import Progress, TrainedModel, history_of

SAVE_SECONDS = 30.0
ROUNDED_UP_TO = 64
Batch = tuple[Prompts, ...]
"""The same covariates and noise for every task of a run."""


class Run(ABC, Generic[Form]):
    """Models in training by Adam: weights, gradient and moments as flat tensors, and the rows logged so far."""

    models: dict[str, ExperimentConfig]
    config: ExperimentConfig
    """Of the first model, for what all share."""
    tasks: tuple[TaskConfig, ...]
    """Every task of these models."""
    weights: Form
    """Views of `flat`."""
    flat: Tensor
    """All weights."""
    gradient: Tensor
    """Of the mean loss on the last batch."""
    moments: dict[str, Tensor]
    """What Adam keeps."""
    loss_sum: Tensor
    """Of the steps since the last row."""
    step: int
    rows: dict[str, Tensor]
    """The history, [row, ...] by column."""
    snapshots: dict[int, Tensor]
    """`flat` at earlier steps."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        start: Form,
        loss_sum: Tensor,
        *,
        device: torch.device | str,
        rounded_up: bool,
    ):
        """A run at its start.

        Args:
            models: Configs by name; all but seeds, heads and pools of tasks are those of the first.
            start: Initial weights.
            loss_sum: Zero, or a zero for each of several models.
            rounded_up: Whether zeros fill the flat tensors up to a multiple of ROUNDED_UP_TO: PyTorch rounds the last
                few entries of a tensor in another way, and a model's bits should not depend on what lies behind it.
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
        self._record()

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "Run[Form]":
        """The run whose state lies in a file.

        Raises:
            CheckpointError: If the file is cut short or was not written by `save`.
        """
        state = read_state(file)
        with resumable(file):
            run = cls(state.models, device=device)  # type: ignore[call-arg]
            run._resume(state)
        return run

    @abstractmethod
    def _loss(self, batch: Batch) -> Tensor:
        """The mean squared error on prompts, or that of each model."""

    @abstractmethod
    def _loss_and_gradient(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The same, and its gradient in the flat tensor."""

    @abstractmethod
    def _measured(self) -> dict[str, Tensor]:
        """What a row of the history holds beside step and losses: a number per head, heads as the last axis."""

    @abstractmethod
    def _model(self, index: int, weights: Form) -> Weights:
        """One model of the weights of all."""

    def _heads(self, index: int) -> slice:
        """Its heads along the last axis of what is measured."""
        return slice(None)

    @property
    def device(self) -> torch.device:
        return self.flat.device

    @property
    def diverged(self) -> dict[str, int]:
        """The logged step at which a model's loss was first found not to be finite, by name."""
        lost, names = ~torch.isfinite(self._losses("eval_loss")), list(self.models)
        first = {index: lost[:, index].byte().argmax() for index in lost.any(0).nonzero().flatten()}
        return {names[index]: int(self.rows["step"][row]) for index, row in first.items()}

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
            self.update(step)
            if step + 1 in snapshot_steps and step + 1 < end:
                self.snapshots[step + 1] = self.flat.clone()
        self.step = end
        return self._record(n_steps)

    def update(self, step: int) -> None:
        """Train on the prompts of a step by torch.optim.Adam with fused=True, whose class spends ten times as long."""
        self._set_gradient(step)
        train, rate = self.config.train, self.config.train.learning_rate
        if train.clip_norm is not None:
            norm = torch.linalg.vector_norm(self.gradient)
            self.gradient.mul_((train.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if train.cosine:
            rate *= 0.5 * (1 + math.cos(math.pi * step / train.steps))
        if train.warm_up is not None:
            rate *= min(1.0, (step + 1) / train.warm_up)
        flat, gradient, exp_avg, exp_avg_sq = self._adam_rows
        self._n_updates += 1
        torch._fused_adam_(
            *([flat], [gradient], [exp_avg], [exp_avg_sq], [], [self._n_updates]),
            lr=rate,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def save(self, file: Path) -> None:
        """Write the whole state to one file.

        Raises:
            CheckpointError: If it cannot be written; a state that was there before is kept.
        """
        parts = (self.models, self.step, self.flat, self.moments, self.rows, self.snapshots)
        write_state(file, State(*parts))

    def results(self) -> dict[str, TrainedModel]:
        """Weights, history and snapshots of every model, by name; later steps do not reach them."""
        trained = {}
        for index, (name, config) in enumerate(self.models.items()):
            heads = self._heads(index)
            history = history_of(
                self.rows["step"],
                {loss: self._losses(loss)[:, index] for loss in ("loss", "eval_loss")},
                {name: self.rows[name][..., heads] for name in self._measured()},
            )
            snapshots = {
                step: self._model(index, views(self.snapshots[step], self.weights))
                for step in sorted(self.snapshots)
            }
            weights = self._model(index, self.weights)
            trained[name] = TrainedModel(config, weights, self.step, history, snapshots)
        return trained

    def _set_gradient(self, step: int) -> None:
        """Set the gradient of the mean loss on the batch of a step, and add that loss to its sum."""
        self.gradient.zero_()
        n_prompts = self.config.train.batch_size
        for prompts in self._prompts("train", step, n_prompts):
            loss, gradient = self._loss_and_gradient(prompts)
            share = len(prompts[0]) / n_prompts
            self.gradient.add_(gradient, alpha=share)
            self.loss_sum.add_(loss, alpha=share)

    @torch.no_grad()
    def _eval_loss(self) -> Tensor:
        n_prompts, size = self.config.train.n_eval_prompts, self.config.train.batch_size
        total = torch.zeros_like(self.loss_sum)
        for prompts in self._prompts("eval", 0, n_prompts):
            for start in range(0, len(prompts[0]), size):
                part = tuple(each[start : start + size] for each in prompts)
                total += self._loss(part) * len(part[0])
        return total / n_prompts

    def _prompts(self, stream: str, step: int, n_prompts: int) -> Iterator[Batch]:
        """Fresh prompts of every task, a function of (data seed, stream, step): pools differ in task vectors only."""
        every, seed, dtype = [], self.config.train.data_seed, self.flat.dtype
        for task in self.tasks:
            draw = generator_for(seed, stream, step, device=self.device)
            length = self._length(step, draw) if stream == "train" else None
            chunks = batch_chunks(
                task, n_prompts, generator=draw, context_length=length, dtype=dtype
            )
            every.append(chunks)
        return zip(*every, strict=True)

    def _length(self, step: int, generator: torch.Generator) -> int:
        """Pairs per prompt in a step, the same on any device; drawn on the processor, so that no step waits."""
        train, longest = self.config.train, self.config.task.context_length
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
        """A loss of the history, [row, model]."""
        return self.rows[name].reshape(len(self.rows[name]), -1)

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
        for name, moment in self.moments.items():
            require_like(name, state.moments[name], moment)
            moment.copy_(state.moments[name])
        self.flat.copy_(state.flat)
        self._n_updates.fill_(state.step)
        self.step, self.rows = state.step, state.rows
        self.snapshots = {step: flat.to(self.device) for step, flat in state.snapshots.items()}

    def _record(self, n_steps: int = 0) -> float:
        """Append a row of the history; the mean loss since the last row, over models that have one."""
        if self.step in self.config.train.snapshot_steps:
            self.snapshots[self.step] = self.flat.clone()
        loss = self.loss_sum / n_steps if n_steps else torch.full_like(self.loss_sum, torch.nan)
        row = {
            "step": torch.tensor(self.step, device="cpu"),
            "loss": loss,
            "eval_loss": self._eval_loss(),
        }
        for name, value in (row | self._measured()).items():
            value = value.cpu()[None]
            self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value
        self.loss_sum.zero_()
        return loss[torch.isfinite(loss)].mean().item()


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
