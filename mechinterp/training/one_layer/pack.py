"""Packs: one-layer models with the same task, batches and step size, trained as one set of tensors."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ExperimentConfig, ModelConfig, TaskConfig, TrainConfig
from mechinterp.memory import prompt_bytes
from mechinterp.models.heads import AttentionWeights, stack
from mechinterp.models.weights import Weights, weights_of_layer
from mechinterp.training.one_layer.step import initial_weights, loss_and_gradients, membership
from mechinterp.training.run import CHUNK_BYTES, Batch, Run, flattened, own

LANES = 32
"""Number of sums that the compiled step keeps side by side; equals `kernel.LANES`, which is not imported here."""
LOGGED = ("omega", "mu", "qk_diagonal", "ov_last_entry")
PACK_HEADS = 512
"""Largest number of heads in a pack, except for a single model with more heads."""


class Pack(Run[AttentionWeights]):
    """One-layer models that train together."""

    def __init__(self, models: Mapping[str, ExperimentConfig], *, device: str = "cpu"):
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
        start = stack([initial_weights(config) for config in configs])
        super().__init__(
            models,
            start,
            torch.zeros(len(configs), dtype=torch.float32, device="cpu"),
            device=device,
            rounded_up=True,
        )

    def _loss(self, batch: Batch) -> Float[Tensor, " model"]:
        # Uses the arithmetic of the step, so that the loss has the same bits in any pack.
        return torch.cat([loss for loss, _ in self._by_task(batch)])

    def _loss_and_gradient(
        self, batch: Batch
    ) -> tuple[Float[Tensor, " model"], Float[Tensor, " weight"]]:
        losses, gradients = zip(*self._by_task(batch), strict=True)
        return torch.cat(losses), flattened(stack(gradients))

    def _by_task(self, batch: Batch) -> list[tuple[Tensor, AttentionWeights]]:
        """Losses and gradients of the models of each task."""
        return [
            loss_and_gradients(self.weights[heads], of_task, members)
            for (heads, members), of_task in zip(self._parts, batch, strict=True)
        ]

    def _measured(self) -> dict[str, Tensor]:
        row = {name: getattr(self.weights, name) for name in LOGGED}
        return row | {name: row[name].mean(1) for name in ("omega", "mu")}

    def _model(self, index: int, weights: AttentionWeights) -> Weights:
        model = list(self.models.values())[index].model
        return weights_of_layer(own(weights[self._heads(index)]), model=model)

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
        '35 MiB'
    """
    config, n_models = next(iter(models.values())), len(models)
    task, train = config.task, config.train
    n_heads = sum(config.model.n_heads for config in models.values())
    head = config.d_model * 3 * config.d_head + config.d_head * task.d_y
    n_rows = 2 + train.steps // train.log_every
    # Weights, gradients and Adam's moments, and the sums of the compiled step.
    floats = n_heads * (8 * head + LANES * config.d_model * (task.d_x + task.d_y))
    # Snapshots exist twice: as trained, and by name with W_O in full width. While a model's snapshots are written, they exist
    # again as one tensor and as the bytes of the file. Rows of the history exist twice.
    named, most = 4 * config.d_model * config.d_head, max(c.model.n_heads for c in models.values())
    floats += len(train.snapshot_steps) * (n_heads * (head + named) + 2 * most * named)
    floats += 2 * n_rows * (2 * n_models + 4 * n_heads)
    # A chunk of prompts, and the random numbers that it is made from.
    batch = max(train.batch_size, train.n_eval_prompts) * prompt_bytes(task)
    n_pools = len({config.task for config in models.values()})
    return 4 * floats + 4 * n_pools * min(batch, CHUNK_BYTES)
