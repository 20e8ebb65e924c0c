"""Packs of models of several layers: models that differ in seed and pool of tasks, trained side by side.

torch.func maps one model's loss and gradient over all of them. On a GPU the step is compiled, recorded once and then
replayed, because launching its many small operations takes longer than computing them. Results agree with training alone
to rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mechinterp.checkpoints.runs import named_by_pairs
from mechinterp.config import ExperimentConfig
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.general import predict_deep
from mechinterp.models.weights import Weights, circuit_norms
from mechinterp.training.general.step import attend_for_training, losses_at_every
from mechinterp.training.general.trainer import initial_deep_weights
from mechinterp.training.run import Batch, TrainingRun, flattened, own, views

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Stacked:
    """Weights of several models of one architecture, by name, with the model as the first axis."""

    tensors: Mapping[str, Tensor]

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Stacked":
        """Copy with these tensors."""
        return Stacked(tensors)


class DeepPack(TrainingRun[Stacked]):
    """Models of several layers that train together."""

    def __init__(self, models: Mapping[str, ExperimentConfig], *, device: str = "cpu"):
        if len({deep_pack_key(config) for config in models.values()}) != 1:
            raise ValueError("Models of one pack must differ in seed and pool of tasks only.")
        each = [initial_deep_weights(config) for config in models.values()]
        self._like = each[0]
        start = {n: torch.stack([w.tensors[n] for w in each]) for n in self._like.tensors}
        zeros = torch.zeros(len(each), dtype=torch.float64, device="cpu")
        tasks = list(dict.fromkeys(config.task for config in models.values()))
        task_of = [tasks.index(config.task) for config in models.values()]
        self._task_of = torch.tensor(task_of, device=device)
        super().__init__(models, Stacked(start), zeros, device=device, rounded_up=False)
        self._gradients_of = self._losses_and_gradients
        self._rate = torch.zeros((), device=device)
        state = (self.flat, *self.moments.values(), self._n_updates, self.loss_sum)
        self._replayed = _Replayed(self._step_on, state)

    def update(self, step: int) -> None:
        (batch,) = self._prompts("train", step, self.config.train.batch_size)
        prompts = self._prompts_of(batch)
        if self.device.type == "cuda" and self._gradients_of == self._losses_and_gradients:
            traced = make_fx(self._losses_and_gradients)(self.flat, *prompts)
            self._gradients_of = torch.compile(traced, fullgraph=True)
        self._rate.fill_(self.config.train.step_size(step))
        self._replayed(*prompts)

    def _step_on(self, *prompts: Tensor) -> None:
        """One step of Adam on prompts of every model, without reading a number back from the device."""
        train = self.config.train
        loss, gradient = self._gradients_of(self.flat, *prompts)
        self.loss_sum.add_(loss)
        self.gradient.copy_(gradient)
        if train.clip_norm is not None:
            self._clip(train.clip_norm)
        self._adam(self._rate)

    def _loss(self, batch: Batch) -> Float[Tensor, " model"]:
        return self._each(self._loss_of_one, batch)

    def _loss_and_gradient(
        self, batch: Batch
    ) -> tuple[Float[Tensor, " model"], Float[Tensor, " weight"]]:
        return self._losses_and_gradients(self.flat, *self._prompts_of(batch))

    def _losses_and_gradients(self, flat: Tensor, *prompts: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.func.grad_and_value(self._loss_of_one)
        gradients, loss = torch.func.vmap(both)(dict(views(flat, self.weights).tensors), *prompts)
        return loss, flattened(Stacked(gradients))

    def _loss_of_one(self, tensors: Tensors, *prompts: Tensor) -> Float[Tensor, ""]:
        first = self.config.train.first_counted
        weights, batch = self._like.with_tensors(tensors), prompts_from(prompts)
        if first is not None:
            return losses_at_every(weights, batch)[first:].mean()
        return (
            (predict_deep(weights, batch, attend=attend_for_training) - batch.y_query)
            .square()
            .mean()
        )

    def _evaluated(self) -> dict[str, Tensor]:
        first = self.config.train.first_counted
        if first is None:
            return super()._evaluated()

        def of_one(tensors: Tensors, *prompts: Tensor) -> Float[Tensor, " n_pairs"]:
            return losses_at_every(self._like.with_tensors(tensors), prompts_from(prompts))

        losses = self._eval_mean(lambda batch: self._each(of_one, batch))
        return {"eval_loss": losses[:, first:].mean(1)} | named_by_pairs(losses)

    def _each(self, function: Callable[..., Tensor], batch: Batch) -> Tensor:
        """A function of the tensors and prompts of one model, for every model."""
        return torch.func.vmap(function)(dict(self.weights.tensors), *self._prompts_of(batch))

    def _prompts_of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Tensors of `PARTS` of every model, [model, batch, ...]."""
        by_task = (torch.stack([getattr(prompts, name) for prompts in batch]) for name in PARTS)
        return tuple(each[self._task_of] for each in by_task)

    def _clip(self, limit: float) -> None:
        gradients = views(self.gradient, self.weights).tensors
        norms = [each.flatten(1).square().sum(1) for each in gradients.values()]
        factor = (limit / (torch.stack(norms).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
        for each in gradients.values():
            each.mul_(factor.view(-1, *[1] * (each.ndim - 1)))

    def _measured(self) -> dict[str, Tensor]:
        each = [circuit_norms(self._of(index, self.weights)) for index in range(len(self.models))]
        return {name: torch.stack([norms[name] for norms in each]) for name in each[0]}

    def _measured_of(self, index: int, rows: Tensor) -> Tensor:
        return rows[:, index]

    def _model(self, index: int, weights: Stacked) -> Weights:
        return replace(own(self._of(index, weights)), model=self.config.model)

    def of(self, index: int) -> Weights:
        """Current weights of a model; views."""
        return self._of(index, self.weights)

    def _of(self, index: int, weights: Stacked) -> Weights:
        return self._like.with_tensors({n: t[index] for n, t in weights.tensors.items()})


def deep_pack_key(config: ExperimentConfig) -> ExperimentConfig:
    """Settings that models of several layers must share to train together: all but seed and pool."""
    return replace(config, seed=0, task=replace(config.task, n_tasks=None, task_seed=0))


PARTS = ("x", "y", "x_query", "y_query", "y_query_clean")
"""Tensors of prompts that a loss may need."""


def prompts_from(tensors: Sequence[Tensor]) -> Prompts:
    """Prompts from the tensors of `PARTS`."""
    return Prompts(**dict(zip(PARTS, tensors, strict=True)), beta=None)


class _Replayed:
    """A function of tensors that changes a state, recorded at its first call on a GPU and replayed after it."""

    def __init__(self, function: Callable[..., None], state: Sequence[Tensor]) -> None:
        self.function, self.state = function, state
        self._recorded: dict[tuple, tuple] = {}

    def __call__(self, *inputs: Tensor) -> None:
        if inputs[0].device.type != "cuda":
            return self.function(*inputs)
        shapes = tuple(each.shape for each in inputs)
        if shapes not in self._recorded:
            self._recorded[shapes] = self._record([each.clone() for each in inputs])
        graph, into = self._recorded[shapes]
        for target, each in zip(into, inputs, strict=True):
            target.copy_(each)
        graph.replay()

    def _record(self, inputs: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        before, side = [each.clone() for each in self.state], torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries prepare themselves in the first calls
            for _ in range(3):
                self.function(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.function(*inputs)
        for each, value in zip(self.state, before, strict=True):
            each.copy_(value)
        return graph, inputs
