"""Training of a pack: models that share task, batches and step size, trained as one set of tensors.

All that a resumed run needs lies in one file, written atomically: weights, Adam's state, the rows logged
so far and the snapshots. A run that was killed and resumed ends with the same bits as one that was not.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.functional import NAMES, AttentionWeights, stack
from mechinterp.training.batches import batch_chunks
from mechinterp.training.deep import DeepRun
from mechinterp.training.state import State, read_state, resumable, write_state
from mechinterp.training.step import initial_weights, loss_and_gradients, membership

LOGGED = ("omega", "mu", "qk_diagonal", "ov_last_entry")
SAVE_SECONDS = 30.0
ROUNDED_UP_TO = 64


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


class Pack:
    """Models in training: their weights in one flat tensor, Adam's state and the rows logged so far."""

    def __init__(self, models: Mapping[str, ExperimentConfig], *, device: str = "cpu"):
        self.models = dict(models)
        configs = list(self.models.values())
        if len({pack_key(config) for config in configs}) != 1:
            raise ValueError("Models of one pack must differ in seed and model.n_heads only.")
        self.config, self.device = configs[0], torch.device(device)
        self.heads = [config.model.n_heads for config in configs]
        self.members = membership(self.heads).to(self.device)
        start = stack([initial_weights(config) for config in configs]).to(self.device)
        size = sum(getattr(start, name).numel() for name in NAMES)
        # Rows filled up with zeros: PyTorch rounds the last few entries of a tensor in another way, and a
        # model's bits should not depend on where in the pack it lies.
        rows = torch.zeros(4, size + -size % ROUNDED_UP_TO, device=self.device)
        self.adam_rows = rows.unbind()
        self.flat, self.gradient, exp_avg, exp_avg_sq = rows[:, :size].unbind()
        self.moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.flat.copy_(torch.cat([getattr(start, name).flatten() for name in NAMES]))
        self.weights = _views(self.flat, start)
        self.step, self.n_updates = 0, torch.zeros((), device=self.device)
        self.loss_sum = torch.zeros(len(configs), device=self.device)
        self.rows: dict[str, Tensor] = {}
        self.snapshots: dict[int, Tensor] = {}
        self._record()

    def advance(self) -> float:
        """Train up to the next logged step; the mean loss since the last one, over steps and models."""
        train = self.config.train
        end = min(self.step + train.log_every, train.steps)
        n_steps, snapshot_steps = end - self.step, set(train.snapshot_steps)
        for step in range(self.step, end):
            self._set_gradient(step)
            self.update()
            if step + 1 in snapshot_steps and step + 1 < end:
                self.snapshots[step + 1] = self.flat.clone()
        self.step = end
        return self._record(n_steps)

    @property
    def diverged(self) -> dict[str, int]:
        """The logged step at which a model's loss or weights were first found not to be finite, by name."""
        lost, names = ~torch.isfinite(self.rows["eval_loss"]), list(self.models)
        first = {index: lost[:, index].byte().argmax() for index in lost.any(0).nonzero().flatten()}
        return {names[index]: int(self.rows["step"][row]) for index, row in first.items()}

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all updates are made, or every model has diverged."""
        return self.step == self.config.train.steps or len(self.diverged) == len(self.models)

    def save(self, file: Path) -> None:
        """Write the whole state to one file.

        Raises:
            CheckpointError: If it cannot be written; a state that was there before is kept.
        """
        parts = (self.models, self.step, self.flat, self.moments, self.rows, self.snapshots)
        write_state(file, State(*parts))

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "Pack":
        """The pack whose state lies in a file.

        Raises:
            CheckpointError: If the file is cut short or was not written by `save`.
        """
        state = read_state(file)
        with resumable(file):
            pack = cls(state.models, device=device)
            pack.step, pack.rows = state.step, state.rows
            pack.n_updates.fill_(pack.step)
            pack.flat.copy_(state.flat)
            for name, moment in pack.moments.items():
                moment.copy_(state.moments[name])
        pack.snapshots = {step: flat.to(pack.device) for step, flat in state.snapshots.items()}
        return pack

    def results(self) -> dict[str, "TrainedModel"]:
        """Weights, history and snapshots of every model, by name."""
        trained, first = {}, 0
        for index, (name, config) in enumerate(self.models.items()):
            heads = slice(first, first + config.model.n_heads)
            first = heads.stop
            cut = {
                step: _own(_views(flat, self.weights)[heads])
                for step, flat in self.snapshots.items()
            }
            history = _history(self.rows, index, heads)
            trained[name] = TrainedModel(config, _own(self.weights[heads]), self.step, history, cut)
        return trained

    def update(self) -> None:
        """One step of torch.optim.Adam with fused=True; its class spends ten times as long around this call."""
        flat, gradient, exp_avg, exp_avg_sq = self.adam_rows
        self.n_updates += 1
        torch._fused_adam_(
            *([flat], [gradient], [exp_avg], [exp_avg_sq], [], [self.n_updates]),
            lr=self.config.train.learning_rate,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            amsgrad=False,
            maximize=False,
        )

    def _record(self, n_steps: int = 0) -> float:
        """Append a row of the history; the mean loss since the last row."""
        if self.step in self.config.train.snapshot_steps:
            self.snapshots[self.step] = self.flat.clone()
        loss = self.loss_sum / n_steps if n_steps else torch.full_like(self.loss_sum, torch.nan)
        row = {"step": torch.tensor(self.step), "loss": loss, "eval_loss": self._eval_loss()}
        row |= {name: getattr(self.weights, name) for name in LOGGED}
        row["omega"], row["mu"] = row["omega"].mean(1), row["mu"].mean(1)
        for name, value in row.items():
            value = value.cpu()[None]
            self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value
        self.loss_sum.zero_()
        return loss[torch.isfinite(loss)].mean().item()

    def _set_gradient(self, step: int) -> None:
        """Set the gradient of the mean loss on the batch of a step, and add that loss to its sum."""
        self.gradient.zero_()
        n_prompts = self.config.train.batch_size
        for prompts in self._chunks("train", step, n_prompts):
            loss, gradients = loss_and_gradients(self.weights, prompts, self.members)
            flat, share = (
                [getattr(gradients, name).flatten() for name in NAMES],
                len(prompts) / n_prompts,
            )
            self.gradient.add_(torch.cat(flat), alpha=share)
            self.loss_sum.add_(loss, alpha=share)

    def _eval_loss(self) -> Float[Tensor, " model"]:
        n_prompts, size = self.config.train.n_eval_prompts, self.config.train.batch_size
        total = torch.zeros_like(self.loss_sum)
        for prompts in self._chunks("eval", 0, n_prompts):
            for part in (prompts[i : i + size] for i in range(0, len(prompts), size)):
                # The step's own arithmetic, though its gradient is not needed: the same in any pack.
                loss, _ = loss_and_gradients(self.weights, part, self.members)
                total += loss * len(part)
        return total / n_prompts

    def _chunks(self, stream: str, step: int, n_prompts: int) -> Iterator[Prompts]:
        seed = self.config.train.data_seed
        generator = generator_for(seed, stream, step, device=self.device)
        return batch_chunks(self.config.task, n_prompts, generator=generator)


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """One model of a pack, ready to be saved as a checkpoint."""

    config: ExperimentConfig
    weights: AttentionWeights
    step: int
    history: pd.DataFrame
    snapshots: dict[int, AttentionWeights]


def pack_key(config: ExperimentConfig) -> tuple[TaskConfig, ModelConfig, TrainConfig]:
    """What must be equal in models that train in one pack: all but the seed and n_heads."""
    return config.task, replace(config.model, n_heads=1), config.train


def train_pack(
    pack: Pack | DeepRun, file: Path, *, on_log: Callable[[Progress], None] | None = None
) -> float:
    """Train a pack to its end, saving its state every half minute; seconds spent in steps.

    Args:
        file: Where the state lies; the run can be resumed from it with `Pack.restore`.
        on_log: Called at every logged step.
    Raises:
        CheckpointError: If the state cannot be written.
    """
    first_step, steps = pack.step, pack.config.train.steps
    start = saved = time.monotonic()
    while not pack.finished:
        loss = pack.advance()
        if on_log is not None:
            rate = (pack.step - first_step) / (time.monotonic() - start)
            lost = tuple(name for name, step in pack.diverged.items() if step == pack.step)
            on_log(Progress(pack.step, steps, len(pack.models), loss, rate, lost))
        if pack.finished or time.monotonic() - saved > SAVE_SECONDS:
            pack.save(file)
            saved = time.monotonic()
    return time.monotonic() - start


def _views(flat: Tensor, like: AttentionWeights) -> AttentionWeights:
    """Weights that are views of a flat tensor, with the shapes of `like`."""
    shapes = [getattr(like, name).shape for name in NAMES]
    parts = flat.split([shape.numel() for shape in shapes])
    views = {name: part.view(shape) for name, part, shape in zip(NAMES, parts, shapes, strict=True)}
    return replace(like, **views)


def _own(weights: AttentionWeights) -> AttentionWeights:
    return replace(
        weights, **{name: getattr(weights, name).detach().cpu().clone() for name in NAMES}
    )


def _history(rows: Mapping[str, Tensor], model: int, heads: slice) -> pd.DataFrame:
    """Rows of one model, one per logged step and head."""
    n_rows, n_heads = len(rows["step"]), heads.stop - heads.start
    columns = {
        "step": rows["step"].repeat_interleave(n_heads),
        "head": torch.arange(n_heads).repeat(n_rows),
        "loss": rows["loss"][:, model].repeat_interleave(n_heads),
        "eval_loss": rows["eval_loss"][:, model].repeat_interleave(n_heads),
    }
    columns |= {name: rows[name][:, heads].flatten() for name in LOGGED}
    return pd.DataFrame({name: column.numpy() for name, column in columns.items()})
