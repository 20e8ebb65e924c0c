"""Training of one context-only model, of any number of layers, by Adam and automatic gradients."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from mechinterp.config import ExperimentConfig
from mechinterp.icl.prompts import generator_for, sample_prompts
from mechinterp.models.deep import DeepWeights, predict_deep
from mechinterp.training.run import Run, TrainedModel, own, require_like, views
from mechinterp.training.state import read_state, resumable

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


class DeepRun(Run[DeepWeights]):
    """A context-only model in training, with PyTorch's Adam."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        *,
        device: str = "cpu",
        start: DeepWeights | None = None,
    ):
        """A run at its start: with the initial weights of the config, or others of their shapes."""
        if len(models) != 1:
            raise ValueError(f"A context-only model trains alone, got {len(models)} models.")
        ((self.name, config),) = models.items()
        start = initial_deep_weights(config) if start is None else start
        flat = torch.cat([tensor.flatten() for tensor in start.tensors.values()])
        flat = flat.to(device).requires_grad_()
        self.adam = torch.optim.Adam([flat], lr=config.train.learning_rate, fused=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        super().__init__(models, start, flat, loss_sum)

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

    def results(self) -> dict[str, TrainedModel[DeepWeights]]:
        cut = {step: own(views(flat, self.like)) for step, flat in sorted(self.snapshots.items())}
        weights, history = own(self.weights), _history(self.rows)
        return {self.name: TrainedModel(self.config, weights, self.step, history, cut)}

    def _update(self, step: int) -> None:
        """One step of Adam on fresh prompts, which are a function of (data seed, step)."""
        task, train = self.config.task, self.config.train
        generator = generator_for(train.data_seed, "train", step, device=self.device)
        length = task.context_length
        if train.shortest_context is not None:
            bounds = (train.shortest_context, length + 1)
            drawn = torch.randint(*bounds, (), generator=generator, device=self.device)
            length = int(drawn)
        prompts = sample_prompts(
            task,
            train.batch_size,
            generator=generator,
            context_length=length,
            dtype=self.flat.dtype,
        )
        loss = (predict_deep(self.weights, prompts) - prompts.y_query).square().mean()
        (self.flat.grad,) = torch.autograd.grad(loss, [self.flat])
        if train.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([self.flat], train.clip_norm)
        if train.cosine:
            part = 0.5 * (1 + math.cos(math.pi * step / train.steps))
            self.adam.param_groups[0]["lr"] = part * train.learning_rate
        self.adam.step()
        self.loss_sum += loss.detach()

    def _row(self) -> dict[str, Tensor]:
        weights = self.weights
        return {
            "eval_loss": self._eval_loss(),
            "qk_norm": weights.scale * (weights.W_Q @ weights.W_K.mT).norm(dim=(2, 3)),
            "ov_norm": (weights.W_V @ weights.W_O).norm(dim=(2, 3)),
        }

    def _eval_loss(self) -> Tensor:
        train = self.config.train
        generator = generator_for(train.data_seed, "eval", 0, device=self.device)
        prompts = sample_prompts(
            self.config.task, train.n_eval_prompts, generator=generator, dtype=self.flat.dtype
        )
        weights, squares = self.weights, []
        for start in range(0, len(prompts), train.batch_size):
            part = prompts[start : start + train.batch_size]
            error = predict_deep(weights, part) - part.y_query
            squares.append(error.square().mean(1))
        return torch.cat(squares).double().mean()


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
