"""Training runs: weights as one flat tensor with Adam's moments, resumable from one file.

The file contains weights, moments, the rows logged so far and the snapshots, and is written atomically. A run that was
killed and resumed ends with the same bits as an uninterrupted run. Large batches are drawn and used chunk by chunk; the
chunk size follows from the task alone, so that results do not depend on the machine.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mechinterp.checkpoints.checkpoint import fill_with_tensors, save
from mechinterp.checkpoints.io.files import CheckpointError, one_line, size_of, write_atomically
from mechinterp.config import ExperimentConfig, TaskConfig, TrainConfig, from_dict
from mechinterp.icl.prompts import Numbers, Prompts, draw_prompts, generator_for
from mechinterp.interrupts import uninterrupted
from mechinterp.memory import prompt_bytes
from mechinterp.models.weights import Weights

_FAULTS = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError, MemoryError)
ORDER = "stacked"
"""Order of weights in a flat tensor: tensor by tensor, each with all layers."""

SAVE_SECONDS = 30.0
"""Seconds between two writes of the state file."""
ROUNDED_UP_TO = 64
BATCH_CHUNK_BYTES = 2**24
"""Random numbers per chunk of a batch, in bytes; at least one prompt is drawn. 16,710 prompts of the default task."""
_LOSSES = ("loss", "eval_loss")
"""First parts of the names of the history's losses; each has one number per model."""


def write_state(
    file: Path,
    models: Mapping[str, ExperimentConfig],
    step: int,
    tensors: Mapping[str, Tensor],
    *,
    origin: Mapping[str, object] | None = None,
) -> None:
    """Write the state of a run to a file.

    Args:
        models: Configs by name.
        tensors: "flat", "moment.NAME", "row.COLUMN" and "snapshot.STEP".
        origin: The checkpoint that the run started from; None or empty: random weights.
    Raises:
        CheckpointError: If the file cannot be written; an earlier state is kept.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    documents = json.dumps({name: asdict(config) for name, config in models.items()})
    metadata = {"step": str(step), "models": documents, "order": ORDER}
    if origin:
        metadata["origin"] = json.dumps(dict(origin))
    metadata["checksum"] = _checksum(metadata, own)
    try:
        write_atomically(file, partial(fill_with_tensors, tensors=own, metadata=metadata))
    except (OSError, SafetensorError) as error:
        kept = "; the state saved before it is kept" if file.exists() else ""
        raise CheckpointError(
            f"{file}: cannot be written at step {step} ({one_line(error)}){kept}."
        ) from None


def read_state(file: Path) -> tuple[dict[str, ExperimentConfig], int, dict[str, Tensor]]:
    """Configs, step and tensors in a state file, as `write_state` got them; on the CPU.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        metadata = stored.metadata()
        # safe_open's result has keys() but is not iterable.
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        if metadata["checksum"] != _checksum(metadata, tensors):
            raise ValueError("its checksum is not that of what it holds")
        if metadata["order"] != ORDER:
            raise ValueError(f"the order of its weights must be {ORDER!r}")
        models, step = _models(metadata), int(metadata["step"])
        _require_range(next(iter(models.values())).train, step, tensors)
        return models, step, tensors


def stored_models(file: Path) -> dict[str, ExperimentConfig]:
    """Configs of the models in a state file, read without the tensors.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        return _models(stored.metadata())


def stored_origin(file: Path) -> dict[str, object]:
    """The checkpoint that the run in a state file started from; empty: random weights.

    Raises:
        CheckpointError: If the file is truncated or was not written by `write_state`.
    """
    with _opened(file) as stored:
        return dict(json.loads(stored.metadata().get("origin", "{}")))


@contextmanager
def resumable(file: Path) -> Iterator[None]:
    """Context that turns any failure with a state file into a one-line error.

    Raises:
        CheckpointError: If the state in the file cannot be resumed.
    """
    try:
        yield
    except _FAULTS as error:
        reason = one_line(error) if file.exists() else "does not exist"
        raise CheckpointError(
            f"{file}: not a training state that can be resumed ({reason}). Delete it, and its models begin anew "
            "with --resume."
        ) from None


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    if file.exists():
        size_of(file)  # raises for a pipe, which would block
    with resumable(file), torch.device("cpu"), safe_open(file, framework="pt") as stored:
        yield stored


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Digest of the step, the configs, the origin if there is one, and all tensors of a state."""
    stated = [metadata[name] for name in ("step", "models", "origin") if name in metadata]
    digest = hashlib.sha256(json.dumps(stated).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _require_range(train: TrainConfig, step: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse steps outside the run, and tensors whose sizes do not fit together."""
    if not 0 <= step <= train.steps:
        raise ValueError(f"step must lie in 0 to {train.steps}, got {step}")
    rows = with_prefix(tensors, "row.")
    steps = rows["step"].tolist()
    logged = range(0, step, train.log_every)
    if steps != [*logged[: len(steps)], step]:
        raise ValueError(f"rows must be those of the steps up to {step}")
    for name, row in rows.items():
        if len(row) != len(steps):
            raise ValueError(f"rows of {name} must be {len(steps)}, got {len(row)}")
    for at, flat in with_prefix(tensors, "snapshot.").items():
        if int(at) > step or int(at) not in train.snapshot_steps:
            raise ValueError(f"a snapshot must be of a step of the run, got {at}")
        if flat.shape != tensors["flat"].shape:
            raise ValueError(f"snapshot {at} must have the shape of the weights")


def _models(metadata: Mapping[str, str]) -> dict[str, ExperimentConfig]:
    documents = json.loads(metadata["models"])
    if not isinstance(documents, dict) or not documents:
        raise ValueError("models must be a JSON object that is not empty")
    return {name: from_dict(document) for name, document in documents.items()}


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Tensors whose names begin with a prefix, by the rest of the name."""
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


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


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, ready to be saved as a checkpoint."""

    config: ExperimentConfig
    weights: Weights
    step: int
    history: pd.DataFrame
    snapshots: dict[int, Weights]
    origin: Mapping[str, object] = field(default_factory=dict)
    """The checkpoint that the training started from; empty: random weights."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint, beside other files of its run.

        Raises:
            CheckpointError: If a file with the same name exists, or the folder cannot be written.
        """
        save(
            folder,
            self.config,
            self.weights,
            step=self.step,
            history=self.history,
            snapshots=self.snapshots,
            origin=self.origin,
            shared=True,
        )


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


def history_of(
    steps: Tensor, losses: Mapping[str, Tensor], measured: Mapping[str, Tensor]
) -> pd.DataFrame:
    """One row per logged step, layer (if it is an axis) and head.

    Args:
        losses: One number per step, by name.
        measured: Arrays [step, head] or [step, layer, head], by name.
    """
    row, *axes = (each.ravel() for each in np.indices(next(iter(measured.values())).shape))
    columns = {"step": steps.numpy()[row]}
    columns |= dict(zip(("layer", "head")[-len(axes) :], axes, strict=True))
    columns |= {name: values.numpy()[row] for name, values in losses.items()}
    columns |= {name: values.flatten().numpy() for name, values in measured.items()}
    return pd.DataFrame(columns)


def batch_chunks(
    task: TaskConfig,
    n_prompts: int,
    *,
    generator: torch.Generator,
    context_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    numbers: Numbers | None = None,
) -> Iterator[Prompts]:
    """Fresh prompts of a batch, in chunks of at most CHUNK_BYTES.

    Args:
        context_length: Pairs per prompt; None: the task's own.
        numbers: Function that draws standard normal numbers; None: torch.
    Example:
        >>> from mechinterp.icl.prompts import generator_for
        >>> [len(c) for c in batch_chunks(TaskConfig(), 20_000, generator=generator_for(0, "train", 0))]
        [16710, 3290]
    """
    size = largest_chunk(task)
    for start in range(0, n_prompts, size):
        n = min(size, n_prompts - start)
        yield draw_prompts(
            *(task, n),
            generator=generator,
            context_length=context_length,
            dtype=dtype,
            numbers=numbers,
        )


def largest_chunk(task: TaskConfig) -> int:
    """Largest number of prompts of a batch that are drawn at once."""
    return max(1, BATCH_CHUNK_BYTES // prompt_bytes(task))


def narrowed(prompts: Prompts, d_x: int) -> Prompts:
    """Prompts whose coordinates of x beyond the first `d_x` are 0, and whose y no longer depends on them.

    Example:
        >>> from mechinterp.icl.prompts import generator_for
        >>> prompts = draw_prompts(TaskConfig(noise_var=0.0), 4, generator=generator_for(0, "train", 0))
        >>> narrow = narrowed(prompts, 2)
        >>> torch.allclose(narrow.y, prompts.x[..., :2] @ prompts.beta[:, :2], atol=1e-6)
        True
    """
    beta = prompts.task_vectors("A curriculum")[:, d_x:]
    gone = prompts.x[..., d_x:] @ beta
    at_query = (prompts.x_query[:, None, d_x:] @ beta)[:, 0]
    x, x_query = prompts.x.clone(), prompts.x_query.clone()
    x[..., d_x:], x_query[..., d_x:] = 0, 0
    changed = {name: getattr(prompts, name) - at_query for name in ("y_query", "y_query_clean")}
    return replace(prompts, x=x, y=prompts.y - gone, x_query=x_query, **changed)


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
