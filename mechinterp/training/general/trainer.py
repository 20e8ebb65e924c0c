"""Training of one model of any architecture, by Adam and automatic gradients."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechinterp.config import ExperimentConfig
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.memory import layers_bytes, require_memory
from mechinterp.models.run.general import predictions
from mechinterp.models.shapes import tensor_shapes
from mechinterp.models.stacks import DeepWeights, deep_bytes, predict_deep
from mechinterp.models.weights import Weights, as_weights, circuit_norms
from mechinterp.training.general.attention import attend
from mechinterp.training.general.step import loss_and_gradients
from mechinterp.training.run import Run, TrainedModel, own, require_like, views
from mechinterp.training.state import read_state, resumable

ADAM = ("exp_avg", "exp_avg_sq", "step")


def initial_deep_weights(config: ExperimentConfig) -> Weights:
    """Initial weights of a model, a function of its config and seed alone.

    Uniform in +-1/sqrt(fan_in), as PyTorch's linear layers start: fan_in is d_model for W_Q, W_K, W_V and W_U,
    the width of what they act on for W_in and W_read, n_heads * d_head for W_O, d_model and d_mlp for the MLP's.
    Norms start at the identity, biases at 0, positions at N(0, 0.02^2) as GPT-2's.

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
    drawn = {"W_O": uniform(model.n_heads * d_head, *stack, d_head, width)}
    for name in ("W_QK", "W_V") if model.merged_qk else ("W_Q", "W_K", "W_V"):
        drawn[name] = uniform(width, *stack, width, d_head)
    tensors = {
        f"blocks.{layer}.attn.{name}": rows[layer]
        for name, rows in drawn.items()
        for layer in range(model.n_layers)
    }
    shapes = tensor_shapes(model, task.d_x, task.d_y)
    for name in ("W_in", "unembed.W_U", "W_read"):
        if name in shapes:
            tensors[name] = uniform(shapes[name][0], *shapes[name])
    for name, shape in shapes.items():
        if name.endswith((".mlp.W_in", ".mlp.W_out")):
            tensors[name] = uniform(shape[0], *shape)
        elif name == "pos_embed.W_pos":
            tensors[name] = 0.02 * torch.randn(*shape, generator=generator)
        elif name not in tensors:
            is_norm = name.endswith(".w")
            tensors[name] = torch.ones(*shape) if is_norm else torch.zeros(*shape)
    if model.one_attention:
        # Only y is read: the x columns never count.
        tensors["blocks.0.attn.W_O"][..., : task.d_x] = 0
    return Weights(model, task.d_x, task.d_y, tensors)


class DeepRun(Run[DeepWeights | Weights]):
    """A model in training with PyTorch's Adam: attention alone by a step that is written out, others by automatic gradients."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        *,
        device: str = "cpu",
        start: Weights | DeepWeights | None = None,
    ):
        """A run at its start: with the initial weights of the config, or others of their shapes."""
        if len(models) != 1:
            raise ValueError(f"Such a model trains alone, got {len(models)} models.")
        ((self.name, config),) = models.items()
        named = initial_deep_weights(config) if start is None else as_weights(start)
        like = named.stack if named.has_stack else named
        _require_memory(config, named)
        flat = torch.cat([tensor.flatten() for tensor in like.tensors.values()])
        flat = flat.to(device).requires_grad_()
        self.adam = torch.optim.Adam([flat], lr=config.train.learning_rate, fused=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.is_stack = named.has_stack
        super().__init__(models, like, flat, loss_sum)

    @property
    def moments(self) -> Mapping[str, Tensor]:
        return self.adam.state[self.flat]

    @property
    def diverged(self) -> dict[str, int]:
        """The logged step at which the loss was first found not to be finite, by name; empty as long as it is."""
        lost = ~torch.isfinite(self.rows["eval_loss"])
        return {self.name: int(self.rows["step"][lost.byte().argmax()])} if lost.any() else {}

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "DeepRun":
        """The run whose state lies in a file.

        Raises:
            CheckpointError: If the file is cut short or was not written by `save`.
        """
        state = read_state(file)
        with resumable(file), torch.no_grad():
            run = cls(state.models, device=device)
            run._resume(state)
            if run.step:
                for name in ("exp_avg", "exp_avg_sq"):
                    require_like(name, state.moments[name], run.flat)
                if state.moments["step"].tolist() != run.step:
                    raise ValueError(f"Adam must have made {run.step} steps")
                run.adam.state[run.flat] = {n: state.moments[n].to(run.device) for n in ADAM}
        return run

    def results(self) -> dict[str, TrainedModel]:
        cut = {step: self._own(flat) for step, flat in sorted(self.snapshots.items())}
        weights, history = self._own(self.flat), _history(self.rows)
        return {self.name: TrainedModel(self.config, weights, self.step, history, cut)}

    def _own(self, flat: Tensor) -> Weights:
        found = as_weights(own(views(flat, self.like)))
        return replace(found, model=self.config.model)

    def _predict(self, prompts: Prompts) -> Tensor:
        """Predictions with the weights as they are now."""
        weights = self.weights
        if self.is_stack:
            return predict_deep(weights, prompts)  # type: ignore[arg-type]
        return predictions(weights, prompts, attend=attend)  # type: ignore[arg-type]

    def _gradient(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient in the flat tensor."""
        weights = self.weights
        if self.is_stack:
            loss, gradients = loss_and_gradients(weights, prompts)  # type: ignore[arg-type]
            return loss, torch.cat([tensor.flatten() for tensor in gradients.tensors.values()])
        loss = (self._predict(prompts) - prompts.y_query).square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.flat])
        return loss.detach(), gradient

    def _update(self, step: int) -> None:
        """One step of Adam on fresh prompts, which are a function of (data seed, step)."""
        task, train = self.config.task, self.config.train
        generator = generator_for(train.data_seed, "train", step, device=self.device)
        prompts = sample_prompts(
            task,
            train.batch_size,
            generator=generator,
            context_length=self._length(step, generator),
            dtype=self.flat.dtype,
        )
        loss, self.flat.grad = self._gradient(prompts)
        if train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([self.flat], train.clip_norm)
        if train.cosine:
            part = 0.5 * (1 + math.cos(math.pi * step / train.steps))
            self.adam.param_groups[0]["lr"] = part * train.learning_rate
        self.adam.step()
        self.loss_sum += loss

    def _length(self, step: int, generator: torch.Generator) -> int:
        """Pairs per prompt in a step, the same on any device; drawn on the processor, so that no step waits."""
        train, longest = self.config.train, self.config.task.context_length
        if train.shortest_context is None:
            return longest
        if self.device.type != "cpu":
            generator = generator_for(train.data_seed, "train", step)
        return int(torch.randint(train.shortest_context, longest + 1, (), generator=generator))

    def _row(self) -> dict[str, Tensor]:
        return {"eval_loss": self._eval_loss(), **circuit_norms(as_weights(self.weights))}

    def _eval_loss(self) -> Tensor:
        train = self.config.train
        generator = generator_for(train.data_seed, "eval", 0, device=self.device)
        prompts = sample_prompts(
            self.config.task, train.n_eval_prompts, generator=generator, dtype=self.flat.dtype
        )
        squares = []
        for start in range(0, len(prompts), train.batch_size):
            part = prompts[start : start + train.batch_size]
            error = self._predict(part) - part.y_query
            squares.append(error.square().mean(1))
        return torch.cat(squares).double().mean()


def _require_memory(config: ExperimentConfig, named: Weights) -> None:
    """Refuse steps that do not fit into memory, whatever else a step keeps for its gradient."""
    n_prompts, length = config.train.batch_size, config.task.context_length
    if named.has_stack:
        per_prompt = deep_bytes(named.stack, length + 1)
    else:
        model = config.model
        per_prompt = layers_bytes(
            n_layers=model.n_layers,
            n_heads=model.n_heads,
            d_head=config.d_head,
            d_model=config.d_model,
            d_mlp=model.d_mlp or 0,
            n_tokens=model.n_tokens(length),
            width=4,
        )
    require_memory(n_prompts * per_prompt, f"a step on {n_prompts} prompts of {length} pairs")


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
