"""Training of one model of any architecture, with Adam."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.checkpoints.runs import named_by_pairs
from mechinterp.config import ExperimentConfig
from mechinterp.config.model import tensor_shapes
from mechinterp.icl.prompts import generator_for
from mechinterp.memory import require_memory
from mechinterp.models.recurrence import LARGEST_LOGIT
from mechinterp.models.run.general import pass_bytes
from mechinterp.models.run.linear import stack_bytes
from mechinterp.models.weights import Weights, by_layer, circuit_norms
from mechinterp.training.batches import largest_chunk
from mechinterp.training.general.step import loss_and_gradients, loss_of, losses_at_every
from mechinterp.training.run import Batch, TrainingRun, flattened, own, uniform
from mechinterp.training.state import read_state, resumable, stored_origin


def initial_deep_weights(config: ExperimentConfig) -> Weights:
    """Initial weights of a model, a function of its config and seed alone.

    Uniform in +-1/sqrt(fan_in), as in PyTorch's linear layers. fan_in is d_model for W_Q, W_K, W_V and W_U, n_heads * d_head
    for W_O, the input width for W_in and W_read, and d_model and d_mlp for the MLP. Norms start at the identity, biases at 0,
    positions at N(0, 0.02^2) as in GPT-2. Gates start at `gate_start` for every token, strengths of writing at .5.

    Example:
        >>> from mechinterp.presets import preset
        >>> tuple(initial_deep_weights(preset("sparse-h4")).W_Q.shape)
        (4, 4, 64, 16)
    """
    model, task, width, d_head = config.model, config.task, config.d_model, config.d_head
    generator = generator_for(config.seed, "init", 0)
    draw = partial(uniform, generator)
    stack = (model.n_layers, model.n_heads)
    # The order of the draws must not change: it decides which weights a seed gives.
    drawn = {"W_O": draw(model.n_heads * d_head, *stack, d_head, width)}
    for name in ("W_QK", "W_V") if model.merged_qk else ("W_Q", "W_K", "W_V"):
        drawn[name] = draw(width, *stack, width, d_head)
    tensors = by_layer({f"attn.{name}": rows for name, rows in drawn.items()}, model.n_layers)
    shapes = tensor_shapes(model, task.d_x, task.d_y)
    for name in ("W_in", "unembed.W_U", "W_read"):
        if name in shapes:
            tensors[name] = draw(shapes[name][0], *shapes[name])
    for name, shape in shapes.items():
        if name.endswith((".mlp.W_in", ".mlp.W_out")):
            tensors[name] = draw(shape[0], *shape)
        elif name == "pos_embed.W_pos":
            tensors[name] = 0.02 * torch.randn(
                *shape, generator=generator, dtype=torch.float32, device="cpu"
            )
        elif name.endswith(".b_gate"):
            start = torch.tensor(model.gate_start, dtype=torch.float64, device="cpu")
            tensors[name] = start.logit().clamp_max(LARGEST_LOGIT).float().expand(shape).clone()
        elif name not in tensors:
            is_norm = name.endswith(".w")
            tensors[name] = (torch.ones if is_norm else torch.zeros)(
                *shape, dtype=torch.float32, device="cpu"
            )
    if model.reads_y_alone:
        # Only y is read, so the x columns have no effect.
        tensors["blocks.0.attn.W_O"][..., : task.d_x] = 0
    return Weights.of_names(model, task.d_x, task.d_y, tensors)


class DeepRun(TrainingRun[Weights]):
    """Training run of one model of any architecture."""

    def __init__(
        self,
        models: Mapping[str, ExperimentConfig],
        *,
        device: str = "cpu",
        start: Weights | None = None,
        origin: Mapping[str, object] | None = None,
    ):
        """Start a run from the initial weights of the config, or from other weights of the same shapes.

        Args:
            origin: The checkpoint of these other weights, as the trained model names it.
        """
        if len(models) != 1:
            raise ValueError(f"Such a model trains alone, got {len(models)} models.")
        (config,) = models.values()
        weights = initial_deep_weights(config) if start is None else start
        _require_memory(config, weights)
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        super().__init__(models, weights, zero, device=device, rounded_up=False)
        self.origin = dict(origin or {})

    @classmethod
    def restore(cls, file: Path, *, device: str = "cpu") -> "DeepRun":
        """Run restored from a state file, in the precision of its weights."""
        models, step, tensors = read_state(file)
        with resumable(file):
            (config,) = models.values()
            start = initial_deep_weights(config).to(tensors["flat"].dtype)
            run = cls(models, device=device, start=start)
            run._resume(step, tensors)
        run.origin = stored_origin(file)
        return run

    def _loss(self, batch: Batch) -> Float[Tensor, ""]:
        (prompts,) = batch
        return loss_of(self.weights, prompts)

    def _loss_and_gradient(
        self, batch: Batch
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " weight"]]:
        (prompts,) = batch
        first = self.config.train.first_counted
        loss, gradients = loss_and_gradients(self.weights, prompts, first_counted=first)
        return loss, flattened(gradients)

    def _evaluated(self) -> dict[str, Tensor]:
        first = self.config.train.first_counted
        if first is None:
            return super()._evaluated()
        losses = self._eval_mean(lambda batch: losses_at_every(self.weights, *batch))
        return {"eval_loss": losses[first:].mean()} | named_by_pairs(losses)

    def _measured(self) -> dict[str, Tensor]:
        return circuit_norms(self.weights)

    def _model(self, index: int, weights: Weights) -> Weights:
        return replace(own(weights), model=self.config.model)


def _require_memory(config: ExperimentConfig, weights: Weights) -> None:
    """Refuse steps whose activations do not fit into memory."""
    length = config.task.context_length
    n_prompts = min(config.train.batch_size, largest_chunk(config.task))
    per_prompt = (stack_bytes if weights.model.stack == "linear" else pass_bytes)(weights, length)
    require_memory(n_prompts * per_prompt, f"a step on {n_prompts} prompts of {length} pairs")
