"""Weights of attention-only models of several layers, each weight of all layers in one tensor.

Every token reads the tokens of the context, itself among them, and none reads the query:

    H_0 = tokens W_in,   H_l = H_{l-1} + sum_h P_lh H_{l-1} W_V,lh W_O,lh,   y_hat = H_n[query] W_U
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.models.shapes import NAMES

LINEAR = ("linear", "linear/L")
READING = {"W_in": "W_in", "W_U": "unembed.W_U"}


@dataclass(frozen=True, eq=False)
class DeepWeights:
    """Weights of a context-only model of any number of layers."""

    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer head d_model d_head"]
    W_V: Float[Tensor, "layer head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    d_y: int
    scale: float
    """Factor on the scores, 1/sqrt(d_head) unless told otherwise."""
    W_in: Float[Tensor, "d_token d_model"] | None = None
    """The read-in; None: the tokens (x, y) are the residual stream."""
    W_U: Float[Tensor, "d_model d_y"] | None = None
    """The read-out; None: the y entries of the stream. There is a W_U where there is a W_in."""
    score: str = "softmax"
    score_slope: float = 1.0

    def __post_init__(self) -> None:
        if (self.W_in is None) != (self.W_U is None):
            raise ValueError("W_in and W_U must both be given or both be None, got one of them.")

    @property
    def n_layers(self) -> int:
        return self.W_Q.shape[0]

    @property
    def n_heads(self) -> int:
        """Heads per layer, zero heads among them."""
        return self.W_Q.shape[1]

    @property
    def d_model(self) -> int:
        return self.W_Q.shape[2]

    @property
    def d_head(self) -> int:
        return self.W_Q.shape[3]

    @property
    def d_x(self) -> int:
        d_token = self.d_model if self.W_in is None else self.W_in.shape[0]
        return d_token - self.d_y

    @property
    def reading(self) -> tuple[Tensor, Tensor]:
        """W_in and W_U; where there are none, what the tokens are to the stream and the y entries to the prediction."""
        if self.W_in is not None and self.W_U is not None:
            return self.W_in, self.W_U
        identity = torch.eye(self.d_model, dtype=self.W_O.dtype, device=self.W_O.device)
        return identity, identity[:, self.d_x :]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights by name, those of all layers in one tensor."""
        named = {name: getattr(self, name) for name in (*NAMES, *READING)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The weights by their names in the hooked model, layer by layer."""
        layers = {
            f"blocks.{layer}.attn.{name}": getattr(self, name)[layer]
            for layer in range(self.n_layers)
            for name in NAMES
        }
        reading = {READING[name]: self.tensors[name] for name in READING if name in self.tensors}
        return layers | reading

    @property
    def heads_per_layer(self) -> tuple[tuple[int, ...], ...]:
        """The heads of each layer that write anything: those whose OV circuit is not zero."""
        live = (self.W_V @ self.W_O).flatten(2).any(-1)
        return tuple(tuple(row.nonzero().flatten().tolist()) for row in live)

    def to(self, target: torch.device | str | torch.dtype) -> "DeepWeights":
        """The same weights on another device or in another dtype."""
        return self.with_tensors({name: t.to(target) for name, t in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "DeepWeights":
        """The same but for these tensors."""
        return replace(self, **tensors)  # type: ignore[arg-type]
