"""Training of a pack: models of one layer that share task, batches and step size, as one set of tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.heads import AttentionWeights, stack
from mechinterp.models.weights import weights_of_layer
from mechinterp.training.one_layer.batches import batch_chunks
from mechinterp.training.one_layer.step import initial_weights, loss_and_gradients, membership
from mechinterp.training.run import Run, TrainedModel, own, require_like, views
from mechinterp.training.state import read_state, resumable

LOGGED = ("omega", "mu", "qk_diagonal", "ov_last_entry")
ROUNDED_UP_TO = 64


class Pack(Run[AttentionWeights]):
    """Models of one layer in training."""

    def __init__(self, models: Mapping[str, ExperimentConfig], *, device: str = "cpu"):
        configs = list(models.values())
        if len({pack_key(config) for config in configs}) != 1:
            raise ValueError("Models of one pack must differ in seed and model.n_heads only.")
        heads = [config.model.n_heads for config in configs]
        self.members = membership(heads).to(device)
        start = stack([initial_weights(config) for config in configs]).to(device)
        size = sum(tensor.numel() for tensor in start.tensors.values())
        # Rows filled up with zeros: PyTorch rounds the last few entries of a tensor in another way, and a
        # model's bits should not depend on where in the pack it lies.
        rows = torch.zeros(4, size + -size % ROUNDED_UP_TO, device=device)
        self.adam_rows = rows.unbind()
        flat, self.gradient, exp_avg, exp_avg_sq = rows[:, :size].unbind()
        self._moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        flat.copy_(torch.cat([tensor.flatten() for tensor in start.tensors.values()]))
        self.stepped = views(flat, start)
        self.n_updates = torch.zeros((), device=device)
        super().__init__(models, start, flat, torch.zeros(len(configs), device=device))

    @property
    def moments(self) -> dict[str, Tensor]:
        return self._moments

    @property
    def diverged(self) -> dict[str, int]:
        """The logged step at which a model's loss or weights were first found not to be finite, by name."""
        lost, names = ~torch.isfinite(self.rows["eval_loss"]), list(self.models)
        first = {index: lost[:, index].byte().argmax() for index in lost.any(0).nonzero().flatten()}
        return {names[index]: int(self.rows["step"][row]) for index, row in first.items()}

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "Pack":
        """The pack whose state lies in a file.

        Raises:
            CheckpointError: If the file is cut short or was not written by `save`.
        """
        state = read_state(file)
        with resumable(file):
            pack = cls(state.models, device=device)
            pack._resume(state)
            pack.n_updates.fill_(pack.step)
            for name, moment in pack.moments.items():
                require_like(name, state.moments[name], moment)
                moment.copy_(state.moments[name])
        return pack

    def results(self) -> dict[str, TrainedModel]:
        trained, first = {}, 0
        for index, (name, config) in enumerate(self.models.items()):
            heads = slice(first, first + config.model.n_heads)
            first = heads.stop
            flats = {step: views(flat, self.like) for step, flat in self.snapshots.items()}
            cut = {
                step: weights_of_layer(own(found[heads]), model=config.model)
                for step, found in flats.items()
            }
            weights = weights_of_layer(own(self.weights[heads]), model=config.model)
            history = _history(self.rows, index, heads)
            trained[name] = TrainedModel(config, weights, self.step, history, cut)
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

    def _update(self, step: int) -> None:
        self._set_gradient(step)
        self.update()

    def _row(self) -> dict[str, Tensor]:
        row = {"eval_loss": self._eval_loss()}
        row |= {name: getattr(self.stepped, name) for name in LOGGED}
        return row | {name: row[name].mean(1) for name in ("omega", "mu")}

    def _set_gradient(self, step: int) -> None:
        """Set the gradient of the mean loss on the batch of a step, and add that loss to its sum."""
        self.gradient.zero_()
        n_prompts = self.config.train.batch_size
        for prompts in self._chunks("train", step, n_prompts):
            loss, gradients = loss_and_gradients(self.stepped, prompts, self.members)
            flat = torch.cat([tensor.flatten() for tensor in gradients.tensors.values()])
            share = len(prompts) / n_prompts
            self.gradient.add_(flat, alpha=share)
            self.loss_sum.add_(loss, alpha=share)

    def _eval_loss(self) -> Float[Tensor, " model"]:
        n_prompts, size = self.config.train.n_eval_prompts, self.config.train.batch_size
        total = torch.zeros_like(self.loss_sum)
        for prompts in self._chunks("eval", 0, n_prompts):
            for part in (prompts[i : i + size] for i in range(0, len(prompts), size)):
                # The step's own arithmetic, though its gradient is not needed: the same in any pack.
                loss, _ = loss_and_gradients(self.stepped, part, self.members)
                total += loss * len(part)
        return total / n_prompts

    def _chunks(self, stream: str, step: int, n_prompts: int) -> Iterator[Prompts]:
        seed = self.config.train.data_seed
        generator = generator_for(seed, stream, step, device=self.device)
        return batch_chunks(self.config.task, n_prompts, generator=generator)


def pack_key(config: ExperimentConfig) -> tuple[TaskConfig, ModelConfig, TrainConfig]:
    """What must be equal in models that train in one pack: all but the seed and n_heads."""
    return config.task, replace(config.model, n_heads=1), config.train


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
