"""Training of one context-only model, of any number of layers, by Adam and automatic gradients.

It is trained, stopped and resumed as a pack of one-layer models is: all that a resumed run needs lies in one
file, and a run that was killed and resumed ends with the same bits as one that was not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechinterp.checkpoints.deep import save_deep
from mechinterp.config import ExperimentConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.deep import DeepWeights, predict_deep
from mechinterp.training.state import State, read_state, resumable, write_state

ADAM = ("exp_avg", "exp_avg_sq", "step")


def initial_deep_weights(config: ExperimentConfig) -> DeepWeights:
    """Initial weights of a context-only model, a function of its config and seed alone.

    Uniform in +-1/sqrt(fan_in), as PyTorch's linear layers start: fan_in is d_model for W_Q, W_K, W_V and W_U,
    d_x + d_y for W_in and n_heads * d_head for W_O.

    Example:
        >>> from mechinterp.presets import preset
        >>> tuple(initial_deep_weights(preset("sparse-h4")).W_Q.shape)
        (4, 4, 64, 16)
    """
    model, task, width, d_head = config.model, config.task, config.d_model, config.d_head
    generator = generator_for(config.seed, "init", 0)

    def uniform(fan_in: int, *shape: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) / fan_in**0.5

    stack = (model.n_layers, model.n_heads)
    # The order of the draws is part of what a seed means.
    W_O = uniform(model.n_heads * d_head, *stack, d_head, width)
    W_Q, W_K, W_V = (uniform(width, *stack, width, d_head) for _ in range(3))
    d_token, reads = task.d_x + task.d_y, model.d_model is not None
    return DeepWeights(
        W_Q=W_Q,
        W_K=W_K,
        W_V=W_V,
        W_O=W_O,
        W_in=uniform(d_token, d_token, width) if reads else None,
        W_U=uniform(width, width, task.d_y) if reads else None,
        d_y=task.d_y,
        scale=d_head**-0.5,
        score=model.score,
        score_slope=model.score_slope,
    )


@dataclass(frozen=True, eq=False)
class TrainedDeepModel:
    """A trained context-only model, ready to be saved as a checkpoint."""

    config: ExperimentConfig
    weights: DeepWeights
    step: int
    history: pd.DataFrame
    snapshots: dict[int, DeepWeights]

    def save(self, folder: Path) -> None:
        """Write the checkpoint."""
        save_deep(
            folder,
            self.config,
            self.weights,
            step=self.step,
            history=self.history,
            snapshots=self.snapshots,
        )


class DeepRun:
    """A context-only model in training: weights in one flat tensor, Adam's state and the rows logged so far."""

    def __init__(self, models: Mapping[str, ExperimentConfig], *, device: str = "cpu"):
        if len(models) != 1:
            raise ValueError(f"A context-only model trains alone, got {len(models)} models.")
        self.models = dict(models)
        ((self.name, self.config),) = self.models.items()
        self.device = torch.device(device)
        self._start = initial_deep_weights(self.config)
        self.flat = torch.cat([tensor.flatten() for tensor in self._start.tensors.values()])
        self.flat = self.flat.to(self.device).requires_grad_()
        self.adam = torch.optim.Adam([self.flat], lr=self.config.train.learning_rate, fused=True)
        self.step = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.rows: dict[str, Tensor] = {}
        self.snapshots: dict[int, Tensor] = {}
        self._record()

    def advance(self) -> float:
        """Train up to the next logged step; the mean loss since the last one."""
        train = self.config.train
        end = min(self.step + train.log_every, train.steps)
        n_steps, snapshot_steps = end - self.step, set(train.snapshot_steps)
        for step in range(self.step, end):
            self._update(step)
            if step + 1 in snapshot_steps and step + 1 < end:
                self.snapshots[step + 1] = self.flat.detach().clone()
        self.step = end
        return self._record(n_steps)

    @property
    def weights(self) -> DeepWeights:
        """The weights as they are now; gradients in them reach the flat tensor."""
        return _views(self.flat, self._start)

    @property
    def diverged(self) -> dict[str, int]:
        """The logged step at which the loss was first found not to be finite, by name; empty as long as it is."""
        lost = ~torch.isfinite(self.rows["eval_loss"])
        return {self.name: int(self.rows["step"][lost.byte().argmax()])} if lost.any() else {}

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train: all updates are made, or the model has diverged."""
        return self.step == self.config.train.steps or bool(self.diverged)

    def save(self, file: Path) -> None:
        """Write the whole state to one file.

        Raises:
            CheckpointError: If it cannot be written; a state that was there before is kept.
        """
        moments = self.adam.state[self.flat]
        parts = (self.models, self.step, self.flat, moments, self.rows, self.snapshots)
        write_state(file, State(*parts))

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "DeepRun":
        """The run whose state lies in a file.

        Raises:
            CheckpointError: If the file is cut short or was not written by `save`.
        """
        state = read_state(file)
        with resumable(file), torch.no_grad():
            run = cls(state.models, device=device)
            run.step, run.rows = state.step, state.rows
            run.flat.copy_(state.flat)
            if run.step:
                run.adam.state[run.flat] = {n: state.moments[n].to(run.device) for n in ADAM}
        run.snapshots = {step: flat.to(run.device) for step, flat in state.snapshots.items()}
        return run

    def results(self) -> dict[str, TrainedDeepModel]:
        """Weights, history and snapshots of the model, by its name."""
        cut = {
            step: _own(_views(flat, self._start)) for step, flat in sorted(self.snapshots.items())
        }
        history = _history(self.rows)
        weights = _own(self.weights)
        return {self.name: TrainedDeepModel(self.config, weights, self.step, history, cut)}

    def _update(self, step: int) -> None:
        """One step of Adam on fresh prompts, which are a function of (data seed, step)."""
        task, train = self.config.task, self.config.train
        generator = generator_for(train.data_seed, "train", step, device=self.device)
        length = task.context_length
        if train.shortest_context is not None:
            bounds = (train.shortest_context, length + 1)
            drawn = torch.randint(*bounds, (), generator=generator, device=self.device)
            length = int(drawn)
        prompts = sample_prompts(task, train.batch_size, generator=generator, context_length=length)
        loss = (predict_deep(self.weights, prompts) - prompts.y_query).square().mean()
        (self.flat.grad,) = torch.autograd.grad(loss, [self.flat])
        if train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([self.flat], train.clip_norm)
        if train.cosine:
            part = 0.5 * (1 + math.cos(math.pi * step / train.steps))
            self.adam.param_groups[0]["lr"] = part * train.learning_rate
        self.adam.step()
        self.loss_sum += loss.detach()

    @torch.no_grad()
    def _record(self, n_steps: int = 0) -> float:
        """Append a row of the history; the mean loss since the last row."""
        if self.step in self.config.train.snapshot_steps:
            self.snapshots[self.step] = self.flat.detach().clone()
        loss = self.loss_sum / n_steps if n_steps else torch.full_like(self.loss_sum, torch.nan)
        weights = self.weights
        row = {"step": torch.tensor(self.step), "loss": loss, "eval_loss": self._eval_loss()}
        row["qk_norm"] = weights.scale * (weights.W_Q @ weights.W_K.mT).norm(dim=(2, 3))
        row["ov_norm"] = (weights.W_V @ weights.W_O).norm(dim=(2, 3))
        for name, value in row.items():
            value = value.cpu()[None]
            self.rows[name] = torch.cat([self.rows[name], value]) if name in self.rows else value
        self.loss_sum.zero_()
        return loss.item()

    def _eval_loss(self) -> Tensor:
        train = self.config.train
        generator = generator_for(train.data_seed, "eval", 0, device=self.device)
        prompts = sample_prompts(self.config.task, train.n_eval_prompts, generator=generator)
        weights, squares = self.weights, []
        for start in range(0, len(prompts), train.batch_size):
            part = prompts[start : start + train.batch_size]
            error = predict_deep(weights, part) - part.y_query
            squares.append(error.square().mean(1))
        return torch.cat(squares).double().mean()


def _views(flat: Tensor, like: DeepWeights) -> DeepWeights:
    """Weights that are views of a flat tensor, with the shapes of `like`."""
    shapes = {name: tensor.shape for name, tensor in like.tensors.items()}
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return like.with_tensors(
        {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    )


def _own(weights: DeepWeights) -> DeepWeights:
    return weights.with_tensors(
        {name: tensor.detach().cpu().clone() for name, tensor in weights.tensors.items()}
    )


def _history(rows: Mapping[str, Tensor]) -> pd.DataFrame:
    """One row per logged step, layer and head."""
    n_rows, n_layers, n_heads = rows["qk_norm"].shape
    _, layer, head = np.indices((n_rows, n_layers, n_heads))
    columns = {"step": rows["step"].repeat_interleave(n_layers * n_heads).numpy()}
    columns |= {"layer": layer.ravel(), "head": head.ravel()}
    for name in ("loss", "eval_loss"):
        columns[name] = rows[name].repeat_interleave(n_layers * n_heads).numpy()
    return pd.DataFrame(
        columns | {name: rows[name].flatten().numpy() for name in ("qk_norm", "ov_norm")}
    )
