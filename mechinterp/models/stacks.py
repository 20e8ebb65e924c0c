"""Attention-only models of several layers as functions of their weights, computed where it counts.

Every token reads the tokens of the context, itself among them, and none reads the query:

    H_0 = tokens W_in,   H_l = H_{l-1} + sum_h P_lh H_{l-1} W_V,lh W_O,lh,   y_hat = H_n[query] W_U

so that the context goes its way without the query, and in the last layer only the query counts. Linear
attention never forms P, nor H: see `LinearPass`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import layers_bytes, token_map_bytes
from mechinterp.models.scores import attention_pattern
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


def deep_bytes(weights: DeepWeights, n_tokens: int) -> int:
    """What a prompt takes while it runs through the layers.

    Example:
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> deep_bytes(DeepWeights(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0), 41)
        49200
    """
    sizes = {"n_layers": weights.n_layers, "n_heads": weights.n_heads, "d_head": weights.d_head}
    sizes |= {"d_model": weights.d_model, "n_tokens": n_tokens}
    sizes["width"] = weights.W_O.element_size()
    if weights.score in LINEAR:
        return token_map_bytes(d_token=weights.d_x + weights.d_y, **sizes)
    return layers_bytes(d_mlp=0, **sizes)


def predict_deep(weights: DeepWeights, prompts: Prompts) -> Float[Tensor, "batch d_y"]:
    """The prediction at the query, in units of y.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = DeepWeights(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> predict_deep(weights, prompts).any()
        tensor(False)
    """
    if weights.score in LINEAR:
        return linear_pass(weights, prompts).prediction()
    W_in, W_U = weights.reading
    stream = prompts.tokens @ W_in
    for layer in range(weights.n_layers - 1):
        stream = stream + _layer(weights, layer, stream)
    return _last_layer(weights, stream, W_U)


@dataclass(frozen=True, eq=False)
class LinearPass:
    """One pass of linear attention over prompts, at each layer of which a masked one can set in.

    Its cost does not grow with the context: every layer is linear in the tokens, given the second moment M of the
    context. H_l = tokens T_l with T_0 = W_in and, q, k and v being T_l times W_Q, W_K and W_V,
    T_{l+1} = T_l + sum_h q_h (k_h^T M v_h) W_O,h.
    """

    weights: DeepWeights
    x_query: Float[Tensor, "batch d_x"]
    moment: Float[Tensor, "batch d_token d_token"]
    """M, with the factor on the scores."""
    T: list[Tensor]
    """Before each layer, [batch, d_token, d_model]; W_in before the first, the same for all prompts."""
    z: list[Tensor]
    """q_h (k_h^T M v_h) of each layer but the last, heads side by side, [batch, d_token, columns]."""

    def prediction(
        self, masked: Mapping[int, Collection[int]] | None = None
    ) -> Float[Tensor, "batch d_y"]:
        """The prediction at the query with heads masked, in units of y; `masked` has them by layer."""
        masked, last = masked or {}, self.weights.n_layers - 1
        first = min(masked, default=last)
        T = self.T[first]
        for layer in range(first, last):
            z = self.z[layer] if layer == first else _linear_heads(self.weights, layer, T, self.moment)  # fmt: skip
            T = T + z @ self._kept(masked, layer).flatten(0, 1)
        T = T.expand(len(self.x_query), -1, -1)
        query = (self.x_query[:, None] @ T[:, : self.weights.d_x])[:, 0]
        key_side = _key_side(self.weights, query) @ T.mT  # [batch, head, d_token]
        reads = key_side @ self.moment @ T  # [batch, head, d_model]
        _, W_U = self.weights.reading
        written = self.weights.W_V[-1] @ (self._kept(masked, last) @ W_U)
        return query @ W_U + reads.flatten(1) @ written.flatten(0, 1)

    def maps(
        self, masked: Mapping[int, Collection[int]] | None = None
    ) -> list[Float[Tensor, "_batch d_token d_model"]]:
        """T before each layer and after the last: the stream is the tokens times it, whether the tokens are the
        prompt's or others before the same context."""
        T = self.T[:1]
        for layer in range(self.weights.n_layers):
            z = _linear_heads(self.weights, layer, T[-1], self.moment)
            T.append(T[-1] + z @ self._kept(masked or {}, layer).flatten(0, 1))
        return T

    def _kept(
        self, masked: Mapping[int, Collection[int]], layer: int
    ) -> Float[Tensor, "head d_head d_model"]:
        """W_O of a layer, zero for masked heads."""
        W_O = self.weights.W_O[layer]
        if layer not in masked:
            return W_O
        gone = torch.zeros(self.weights.n_heads, dtype=torch.bool, device=W_O.device)
        gone[list(masked[layer])] = True
        return W_O.masked_fill(gone[:, None, None], 0)


def linear_pass(weights: DeepWeights, prompts: Prompts) -> LinearPass:
    """Linear attention run over prompts.

    Raises:
        ValueError: If the scores are not linear.
    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> ones = torch.ones(2, 1, 6, 3)
        >>> weights = DeepWeights(ones, ones, ones, ones.mT, d_y=1, scale=1.0, score="linear/L")
        >>> linear_pass(weights, prompts).prediction({0: [0], 1: [0]}).any()
        tensor(False)
    """
    if weights.score not in LINEAR:
        raise ValueError(f"score must be one of {', '.join(LINEAR)}, got {weights.score!r}.")
    tokens = prompts.context_tokens
    factor = weights.scale * weights.score_slope
    if weights.score == "linear/L":
        factor = factor / tokens.shape[1]
    moment = factor * (tokens.mT @ tokens)
    T, z = [weights.reading[0][None]], []
    for layer in range(weights.n_layers - 1):
        z.append(_linear_heads(weights, layer, T[-1], moment))
        T.append(T[-1] + z[-1] @ weights.W_O[layer].flatten(0, 1))
    return LinearPass(weights, prompts.x_query, moment, T, z)


def _linear_heads(
    weights: DeepWeights, layer: int, T: Tensor, moment: Tensor
) -> Float[Tensor, "batch d_token columns"]:
    """q_h (k_h^T M v_h) of all heads of a layer, side by side."""
    q, k, v = (T @ _wide(weights, layer)).chunk(3, dim=-1)
    heads = (weights.n_heads, weights.d_head)
    q, k, Mv = (part.unflatten(-1, heads).transpose(1, 2) for part in (q, k, moment @ v))
    return (q @ (k.mT @ Mv)).transpose(1, 2).flatten(2)


def _wide(weights: DeepWeights, layer: int) -> Float[Tensor, "d_model columns"]:
    """W_Q, W_K and W_V of all heads of a layer side by side, in this order."""
    stacked = torch.stack([weights.W_Q[layer], weights.W_K[layer], weights.W_V[layer]])
    return stacked.permute(2, 0, 1, 3).flatten(1)


def _layer(
    weights: DeepWeights, layer: int, stream: Float[Tensor, "batch pos d_model"]
) -> Float[Tensor, "batch pos d_model"]:
    """What a layer adds to the stream, at every position."""
    projected = (stream @ _wide(weights, layer)).unflatten(-1, (3, weights.n_heads, -1))
    q, k, v = projected.permute(2, 0, 3, 1, 4)  # [batch, head, pos, d_head]
    scores = weights.scale * (q @ k[:, :, :-1].mT)
    pattern = attention_pattern(scores, score=weights.score, slope=weights.score_slope)
    return (pattern @ v[:, :, :-1]).transpose(1, 2).flatten(2) @ weights.W_O[layer].flatten(0, 1)


def _last_layer(
    weights: DeepWeights, stream: Float[Tensor, "batch pos d_model"], W_U: Tensor
) -> Float[Tensor, "batch d_y"]:
    """The prediction: of the last layer's outputs only that at the query, as it is read out, is formed."""
    context, query = stream[:, :-1], stream[:, -1]
    scores = weights.scale * (_key_side(weights, query) @ context.mT)  # [batch, head, key]
    pattern = attention_pattern(scores, score=weights.score, slope=weights.score_slope)
    written = weights.W_V[-1] @ (weights.W_O[-1] @ W_U)
    return query @ W_U + (pattern @ context).flatten(1) @ written.flatten(0, 1)


def _key_side(
    weights: DeepWeights, query: Float[Tensor, "batch d_model"]
) -> Float[Tensor, "batch head d_model"]:
    """What the last layer's heads look for in the stream: W_K W_Q^T query."""
    q = query @ weights.W_Q[-1].transpose(0, 1).flatten(1)
    q = q.unflatten(1, (weights.n_heads, weights.d_head))
    return (q.transpose(0, 1) @ weights.W_K[-1].mT).transpose(0, 1)
