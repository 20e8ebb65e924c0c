"""Training step: loss and gradient of many independent one-layer models on one batch of prompts.

Heads of all models lie along one axis and get the same prompts. The gradient is hand-written twice: as tensor operations
for any device and precision, and as a compiled kernel for float32 on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechinterp.config import SCORES, ExperimentConfig
from mechinterp.icl.prompts import Prompts, generator_for
from mechinterp.models.heads import AttentionWeights, attend
from mechinterp.models.scores import is_normalised
from mechinterp.models.shapes import NAMES


def initial_weights(config: ExperimentConfig) -> AttentionWeights:
    """Initial weights of one model, a function of its config and seed alone.

    Uniform in +-1/sqrt(fan_in), as in PyTorch's linear layers: fan_in is d_model for W_Q, W_K, W_V and n_heads * d_head for
    W_O.

    Raises:
        ValueError: If the model has biases or attend_to_self, which the compiled step does not train.
    Example:
        >>> tuple(initial_weights(ExperimentConfig(seed=3)).W_Q.shape)
        (2, 6, 6)
    """
    for name in ("biases", "attend_to_self"):
        if getattr(config.model, name):
            raise ValueError(f"model.{name} must be false for the compiled step, got true.")
    heads, d_y = config.model.n_heads, config.task.d_y
    d_model, d_head = config.d_model, config.d_head
    generator = generator_for(config.seed, "init", 0)

    # The order of the draws must not change, since it decides which weights a seed gives: W_O, W_Q, W_K, W_V.
    W_O = _uniform(generator, heads * d_head, heads, d_head, d_y)
    W_Q, W_K, W_V = (_uniform(generator, d_model, heads, d_model, d_head) for _ in range(3))
    score, slope = config.model.score, config.model.score_slope
    return AttentionWeights(W_Q, W_K, W_V, W_O, d_head**-0.5, score, slope)


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
    weights: AttentionWeights, prompts: Prompts, members: Membership
) -> tuple[Float[Tensor, " model"], AttentionWeights]:
    """Loss of every model, in units of y^2, and the gradient of each model's loss in its own weights.

    The loss is the mean over prompts and responses of (y_hat - y_query)^2.

    Raises:
        ValueError: If d_x or d_y of the prompts differs from that of the weights.
    """
    sizes = (prompts.x_query.shape[1], prompts.y_query.shape[1])
    if sizes != (weights.d_x, weights.d_y):
        raise ValueError(
            f"prompts must have d_x, d_y = {weights.d_x}, {weights.d_y} as the weights have, got {sizes}."
        )
    if weights.W_Q.device.type == "cpu" and weights.W_Q.dtype == torch.float32:
        return _by_kernel(weights, prompts, members)
    return by_tensors(weights, prompts, members)


def by_tensors(
    weights: AttentionWeights, prompts: Prompts, members: Membership
) -> tuple[Float[Tensor, " model"], AttentionWeights]:
    """`loss_and_gradients` by tensor operations; the reference for the kernel."""
    context, x_query = prompts.context_tokens, prompts.x_query
    batch, d_x, d_y = x_query.shape[0], x_query.shape[1], weights.d_y
    OV = weights.OV.transpose(0, 1).contiguous()  # [m, h, n]
    _, slope, averaged = attend(weights, context, x_query)  # [b, l, h], [b, m, h]
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
    if is_normalised(weights.score):
        reading -= (averaged * d_averaged).sum(1, keepdim=True)
    d_key_side = context.mT @ reading.mul_(slope)  # [b, m, h]
    d_QK = (x_query.mT @ d_key_side.view(batch, -1)).view(d_x, -1, weights.n_heads)
    d_QK = d_QK.permute(2, 0, 1) * weights.scale  # [h, d_x, m]

    # Only the x rows of W_Q are used: the query's y slot is 0.
    d_W_Q = torch.zeros_like(weights.W_Q)
    d_W_Q[:, :d_x] = d_QK @ weights.W_K
    gradients = {
        "W_Q": d_W_Q,
        "W_K": d_QK.mT @ weights.W_Q[:, :d_x],
        "W_V": d_OV @ weights.W_O.mT,
        "W_O": weights.W_V.mT @ d_OV,
    }
    return loss, weights.with_tensors(gradients)


def _by_kernel(
    weights: AttentionWeights, prompts: Prompts, members: Membership
) -> tuple[Float[Tensor, " model"], AttentionWeights]:
    # Imported here, so that reading checkpoints does not load the compiler.
    from mechinterp.training.one_layer.kernel import set_loss_and_gradients

    score, slope = weights.score, weights.score_slope
    if score == "linear/L":
        score, slope = "linear", slope / prompts.x.shape[1]
    loss = np.zeros(len(members.slots), np.float32)
    gradients = {name: np.zeros(getattr(weights, name).shape, np.float32) for name in NAMES}
    set_loss_and_gradients(
        *(t.numpy() for t in (prompts.x, prompts.y, prompts.x_query, prompts.y_query)),
        *(getattr(weights, name).detach().numpy() for name in NAMES),
        *(members.slots.numpy(), SCORES.index(score), slope, weights.scale, loss),
        *gradients.values(),
    )
    tensors = {name: torch.from_numpy(gradient) for name, gradient in gradients.items()}
    return torch.from_numpy(loss), weights.with_tensors(tensors)


def _uniform(generator: torch.Generator, fan_in: int, *shape: int) -> Tensor:
    return (
        2 * torch.rand(*shape, generator=generator, dtype=torch.float32, device="cpu") - 1
    ) / fan_in**0.5
