"""Packs of one-layer models that train together: loss and gradient on one batch of prompts, and their run.

Heads of all models lie along one axis and get the same prompts. The gradient is hand-written twice: as tensor operations
for any device and precision, and as a compiled kernel for float32 on the CPU.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.config.model import NAMES
from mechinterp.icl.prompts import Numbers, Prompts, draw_prompts, generator_for
from mechinterp.memory import prompt_bytes
from mechinterp.models.heads import attend_at_query, stack
from mechinterp.models.layers import is_normalised
from mechinterp.models.weights import Weights
from mechinterp.training.batches import BATCH_CHUNK_BYTES, WHOLE
from mechinterp.training.run import Batch, TrainingRun, own, uniform, views

LOGGED = ("omega", "mu", "qk_diagonal", "ov_last_entry")
PACK_HEADS = 512
"""Largest number of heads in a pack, except for a single model with more heads."""


def initial_weights(config: ExperimentConfig) -> Weights:
    """Initial weights of one model, a function of its config and seed alone.

    Uniform in +-1/sqrt(fan_in), as in PyTorch's linear layers: fan_in is d_model for W_Q, W_K, W_V and n_heads * d_head for
    W_O, whose x columns are zero. Heads are never merged.

    Raises:
        ValueError: If the model has biases or attend_to_self, which the compiled step does not train.
    Example:
        >>> tuple(initial_weights(ExperimentConfig(seed=3)).W_Q.shape)
        (1, 2, 6, 6)
    """
    for name in ("biases", "attend_to_self"):
        if getattr(config.model, name):
            raise ValueError(f"model.{name} must be false for the compiled step, got true.")
    heads, d_x, d_y = config.model.n_heads, config.task.d_x, config.task.d_y
    d_model, d_head = config.d_model, config.d_head
    generator = generator_for(config.seed, "init", 0)

    # The order of the draws must not change, since it decides which weights a seed gives: W_O, W_Q, W_K, W_V.
    W_O = uniform(generator, heads * d_head, heads, d_head, d_y)
    W_Q, W_K, W_V = (uniform(generator, d_model, heads, d_model, d_head) for _ in range(3))
    model = replace(config.model, merged_qk=False) if config.model.merged_qk else config.model
    return Weights(model, d_x, d_y, _named((W_Q, W_K, W_V, W_O), d_x))


def _named(arrays: Iterable[Tensor], d_x: int) -> dict[str, Tensor]:
    """W_Q, W_K, W_V and the y columns of W_O, [head, ...], by their names in `Weights`; the x columns are zero."""
    tensors = {f"attn.{name}": each[None] for name, each in zip(NAMES, arrays, strict=True)}
    return tensors | {"attn.W_O": pad(tensors["attn.W_O"], (d_x, 0))}


@dataclass(frozen=True, eq=False)
class Membership:
    """Assignment of heads to models."""

    owner: Int[Tensor, " head"]
    """Index of each head's model."""
    slots: Int[Tensor, "model slot"]
    """Indices of each model's heads, padded with n_heads, which is no head."""

    def to(self, device: torch.device | str) -> "Membership":
        """Copy on another device."""
        return Membership(self.owner.to(device), self.slots.to(device))

    def sum(self, outputs: Float[Tensor, "batch head d_y"]) -> Float[Tensor, "batch model d_y"]:
        """Sum over the heads of each model, in a fixed order; a NaN affects its own model only."""
        nothing = torch.zeros_like(outputs[:, :1])
        return torch.cat([outputs, nothing], dim=1)[:, self.slots].sum(2)


def membership(heads_per_model: Sequence[int]) -> Membership:
    """Membership of heads that are stored model after model.

    Example:
        >>> membership([1, 2]).slots
        tensor([[0, 3],
                [1, 2]])
    """
    n_heads = sum(heads_per_model)
    heads = torch.arange(n_heads, device="cpu").split(list(heads_per_model))
    owner = torch.repeat_interleave(
        torch.tensor(heads_per_model, device="cpu"), output_size=n_heads
    )
    slots = torch.nn.utils.rnn.pad_sequence(heads, batch_first=True, padding_value=n_heads)
    return Membership(owner, slots)


def loss_and_gradients(
    weights: Weights, prompts: Prompts, members: Membership
) -> tuple[Float[Tensor, " model"], Weights]:
    """Loss of every model, in units of y^2, and the gradient of each model's loss in its own weights.

    The loss is the mean over prompts and responses of (y_hat - y_query)^2.

    Raises:
        ValueError: If d_x or d_y of the prompts differs from that of the weights.
    """
    gradients = weights.with_tensors({n: torch.zeros_like(t) for n, t in weights.tensors.items()})
    return step_into(gradients, weights, members)(prompts), gradients


def step_into(
    gradients: Weights, weights: Weights, members: Membership
) -> Callable[[Prompts], Float[Tensor, " model"]]:
    """Function that overwrites the gradients on prompts and returns the losses; both weights may change between calls.

    Example:
        >>> weights = initial_weights(ExperimentConfig())
        >>> gradients = initial_weights(ExperimentConfig())
        >>> step_into(gradients, weights, membership([2]))(draw_prompts(TaskConfig(), 8)).shape
        torch.Size([1])
    """
    if uses_kernel(weights):
        _require_kernel()
        return _kernel_step(gradients, weights, members)

    def step(prompts: Prompts) -> Tensor:
        loss, found = by_tensors(weights, prompts, members)
        for name, tensor in gradients.tensors.items():
            tensor.copy_(found.tensors[name])
        return loss

    return step


def uses_kernel(weights: Weights) -> bool:
    """True if the step of these weights is the compiled one."""
    return weights.device.type == "cpu" and weights.dtype == torch.float32


def by_tensors(
    weights: Weights, prompts: Prompts, members: Membership
) -> tuple[Float[Tensor, " model"], Weights]:
    """`loss_and_gradients` by tensor operations; the reference for the kernel."""
    prompts.require_sizes(d_x=weights.d_x, d_y=weights.d_y)
    context, x_query = prompts.context_tokens, prompts.x_query
    batch, d_x, d_y = x_query.shape[0], x_query.shape[1], weights.d_y
    OV = weights.OV.transpose(0, 1).contiguous()  # [m, h, n]
    _, slope, averaged = attend_at_query(weights, context, x_query)  # [b, l, h], [b, m, h]
    # Products and sums are faster than batched matrix products for d_y of one or two, and leave the axes in the order that
    # the large products below need.
    outputs = (averaged[..., None] * OV).sum(1)  # [b, h, n]
    error = members.sum(outputs) - prompts.y_query[:, None]
    loss = error.square().mean((0, 2))

    d_output = error[:, members.owner] * (2 / (batch * d_y))
    d_OV = (averaged[..., None] * d_output[:, None]).sum(0).transpose(0, 1)  # [h, m, n]
    d_averaged = (d_output[:, None] * OV).sum(-1)  # [b, m, h]
    # dp_i/ds_k = slope_k (1[i = k] - p_i) if the p sum to 1; sum_l p_l z_l is `averaged`.
    reading = context @ d_averaged
    if is_normalised(weights.model.score):
        reading -= (averaged * d_averaged).sum(1, keepdim=True)
    d_key_side = context.mT @ reading.mul_(slope)  # [b, m, h]
    d_QK = (x_query.mT @ d_key_side.view(batch, -1)).view(d_x, -1, weights.n_heads)
    d_QK = d_QK.permute(2, 0, 1) * weights.scale  # [h, d_x, m]

    # Only the x rows of W_Q are used: the query's y slot is 0.
    W_Q, W_K, W_V, W_O = (getattr(weights, name)[0] for name in NAMES)
    d_W_Q = torch.zeros_like(W_Q)
    d_W_Q[:, :d_x] = d_QK @ W_K
    gradients = d_W_Q, d_QK.mT @ W_Q[:, :d_x], d_OV @ W_O[..., d_x:].contiguous().mT, W_V.mT @ d_OV
    named = _named(gradients, d_x)
    if weights.model.merged_qk:
        named["attn.W_QK"] = named.pop("attn.W_Q")
        del named["attn.W_K"]
    return loss, weights.with_tensors(named)


@cache
def _require_kernel() -> None:
    """Compare the compiled step, which may come from a folder of the disk, with the tensor operations on one prompt.

    Raises:
        ValueError: If they differ.
    """
    from mechinterp.training.lanes import require_close
    from mechinterp.training.one_layer.kernel import STEP_SCORES

    task = TaskConfig(d_x=2, context_length=3)
    members, prompt = membership([1, 2]), draw_prompts(task, 1)
    for score in STEP_SCORES:
        model = ModelConfig(n_heads=3, score=score, score_slope=0.5)
        weights = initial_weights(ExperimentConfig(task=task, model=model))
        weights = weights.with_tensors({n: 2 * t for n, t in weights.tensors.items()})
        expected_loss, expected = by_tensors(weights, prompt, members)
        gradients = weights.with_tensors({n: t.clone() for n, t in weights.tensors.items()})
        loss = _kernel_step(gradients, weights, members)(prompt)
        found = (loss, *gradients.tensors.values())
        require_close(f"{score} attention", found, (expected_loss, *expected.tensors.values()))


def _kernel_step(
    gradients: Weights, weights: Weights, members: Membership
) -> Callable[[Prompts], Float[Tensor, " model"]]:
    # Imported here, so that reading checkpoints does not load the compiler.
    from mechinterp.training.one_layer.kernel import STEP_SCORES, set_loss_and_gradients

    d_x, d_y, model = weights.d_x, weights.d_y, weights.model
    is_linear = model.score == "linear/L"
    score = STEP_SCORES.index("linear" if is_linear else model.score)
    slots, n_models = members.slots.numpy(), len(members.slots)
    matrices, d_matrices = (_arrays(each) for each in (weights, gradients))

    def step(prompts: Prompts) -> Tensor:
        prompts.require_sizes(d_x=d_x, d_y=d_y)
        for tensor in gradients.tensors.values():
            tensor.zero_()
        loss = np.zeros(n_models, np.float32)
        slope = model.score_slope / prompts.x.shape[1] if is_linear else model.score_slope
        arrays = (t.numpy() for t in (prompts.x, prompts.y, prompts.x_query, prompts.y_query))
        settings = (slots, score, slope, weights.scale, loss)
        set_loss_and_gradients(*arrays, *matrices, *settings, *d_matrices)
        return torch.from_numpy(loss)

    return step


def _arrays(weights: Weights) -> list[np.ndarray]:
    """W_Q, W_K, W_V and the y columns of W_O as arrays [head, ...] that share the memory of the weights."""
    *matrices, W_O = (tensor.detach()[0].numpy() for tensor in weights.tensors.values())
    return [*matrices, W_O[..., weights.d_x :]]


class Pack(TrainingRun[Weights]):
    """One-layer models that train together."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        *,
        device: str = "cpu",
        start: Weights | None = None,
        origin: Mapping[str, object] | None = None,
    ):
        """Start a run from the initial weights of the configs; or, for one model, from other weights.

        Args:
            origin: The checkpoint of these other weights, as the trained model names it.
        """
        if len({pack_key(config) for config in models.values()}) != 1:
            raise ValueError(
                "Models of one pack must differ in seed, model.n_heads and pool of tasks only."
            )
        # Models with the same pool are adjacent and get the same prompts.
        tasks = list(dict.fromkeys(config.task for config in models.values()))
        models = dict(sorted(models.items(), key=lambda named: tasks.index(named[1].task)))
        configs = list(models.values())
        self._sizes = [config.model.n_heads for config in configs]
        self._parts, end = [], 0
        for task in tasks:
            sizes = [config.model.n_heads for config in configs if config.task == task]
            self._parts.append((slice(end, end + sum(sizes)), membership(sizes).to(device)))
            end += sum(sizes)
        initial = stack([initial_weights(config) for config in configs])
        if start is not None:
            arrays = (getattr(start, name)[0] for name in NAMES[:3])
            tensors = _named((*arrays, start.W_O[0, ..., start.d_x :]), start.d_x)
            initial = initial.with_tensors({n: t.to(torch.float32) for n, t in tensors.items()})
        super().__init__(
            models,
            initial,
            torch.zeros(len(configs), dtype=torch.float32, device="cpu"),
            device=device,
            rounded_up=True,
        )
        self.origin = dict(origin or {})

    def _loss(self, batch: Batch) -> Float[Tensor, " model"]:
        # Uses the arithmetic of the step, so that the loss has the same bits in any pack.
        return self._loss_and_gradient(batch)[0]

    def _loss_and_gradient(
        self, batch: Batch
    ) -> tuple[Float[Tensor, " model"], Float[Tensor, " weight"]]:
        written, steps = self._steps
        losses = [step(of_task) for step, of_task in zip(steps, batch, strict=True)]
        return torch.cat(losses), written

    @cached_property
    def _steps(self) -> tuple[Tensor, list[Callable[[Prompts], Tensor]]]:
        """Flat gradient that the steps of the models of each task write, and these steps."""
        written = torch.zeros_like(self.flat)
        gradients = views(written, self.weights)
        parts = ((gradients[heads], self.weights[heads], m) for heads, m in self._parts)
        return written, [step_into(*part) for part in parts]

    @cached_property
    def _numbers(self) -> Numbers | None:
        if self.device.type != "cpu" or self.flat.dtype != torch.float32:
            return None
        from mechinterp.training.normal import normal_numbers  # loads the compiler

        return normal_numbers

    def _measured(self) -> dict[str, Tensor]:
        row = {name: getattr(self.weights, name) for name in LOGGED}
        return row | {name: row[name].mean(1) for name in ("omega", "mu")}

    def _model(self, index: int, weights: Weights) -> Weights:
        model = list(self.models.values())[index].model
        return replace(own(weights[self._heads(index)]), model=model)

    def _measured_of(self, index: int, rows: Tensor) -> Tensor:
        return rows[..., self._heads(index)]

    def _heads(self, index: int) -> slice:
        end = list(accumulate(self._sizes))[index]
        return slice(end - self._sizes[index], end)


def shares_a_pack(config: ExperimentConfig) -> bool:
    """True if the compiled step can train this model together with others.

    Example:
        >>> shares_a_pack(ExperimentConfig())
        True
    """
    return config.train.optimizer == "adam" and config.trains_compiled


def pack_key(config: ExperimentConfig) -> tuple[TaskConfig, ModelConfig, TrainConfig]:
    """Settings that models of one pack must share: all but the seed, n_heads and the pool of tasks."""
    task = replace(config.task, n_tasks=None, task_seed=0)
    return task, replace(config.model, n_heads=1), config.train


def packs(models: Mapping[str, ExperimentConfig]) -> list[dict[str, ExperimentConfig]]:
    """Groups of models that train together, in the order of their names in `models`.

    A model that the compiled step does not train is alone in its group. So is linear attention trained on moments, which
    samples no prompts.

    Example:
        >>> models = {f"{seed}": ExperimentConfig(seed=seed) for seed in range(300)}
        >>> [len(pack) for pack in packs(models)]
        [256, 44]
    """
    full: list[dict[str, ExperimentConfig]] = []
    filling: dict[object, tuple[int, dict[str, ExperimentConfig]]] = {}
    for name, config in models.items():
        key: object = pack_key(config) if shares_a_pack(config) else name
        n_heads, pack = filling.get(key, (PACK_HEADS, {}))
        if n_heads + config.model.n_heads > PACK_HEADS:
            n_heads, pack = 0, {}
            full.append(pack)
        pack[name] = config
        filling[key] = n_heads + config.model.n_heads, pack
    return full


def pack_bytes(models: Mapping[str, ExperimentConfig]) -> int:
    """Upper bound on the memory that training a pack of one-layer models adds to a process on the CPU, in bytes.

    Example:
        >>> models = {f"{seed}": ExperimentConfig(seed=seed) for seed in range(256)}
        >>> f"{pack_bytes(models) / 2**20:.0f} MiB"
        '36 MiB'
    """
    config, n_models = next(iter(models.values())), len(models)
    task, train = config.task, config.train
    n_heads = sum(config.model.n_heads for config in models.values())
    head = 4 * config.d_model * config.d_head
    n_rows = 2 + train.steps // train.log_every
    # Weights, gradients and Adam's moments, and the sums of the compiled step.
    floats = n_heads * (8 * head + WHOLE * config.d_model * (task.d_x + task.d_y))
    # Snapshots exist twice: as trained, and by name with W_O in full width. While a model's snapshots are written, they exist
    # again as one tensor and as the bytes of the file. Rows of the history exist twice.
    named, most = 4 * config.d_model * config.d_head, max(c.model.n_heads for c in models.values())
    floats += len(train.snapshot_steps) * (n_heads * (head + named) + 2 * most * named)
    floats += 2 * n_rows * (2 * n_models + 4 * n_heads)
    # A chunk of prompts, and the random numbers that it is made from.
    batch = max(train.batch_size, train.n_eval_prompts) * prompt_bytes(task)
    n_pools = len({config.task for config in models.values()})
    return 4 * floats + 4 * n_pools * min(batch, BATCH_CHUNK_BYTES)
