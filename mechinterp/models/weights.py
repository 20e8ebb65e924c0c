"""The weights of a model: named tensors, and the architecture that says how they are used.

Names and shapes are HookedTransformer's. `Weights.circuits` and `Weights.stack` show the same numbers in the
form that the fast ways of computing take; a model that has no such form is refused in one line.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import SCORES, ModelConfig
from mechinterp.models.heads import AttentionWeights, identity_keys, unmerged
from mechinterp.models.shapes import BIASES, NAMES, tensor_shapes
from mechinterp.models.stacks import DeepWeights

HEADS = ("W_Q", "W_K", "W_QK", "W_V", "W_O")
"""Weights with an axis of heads."""


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a model, by their names in HookedTransformer."""

    model: ModelConfig
    d_x: int
    d_y: int
    tensors: Mapping[str, Tensor]
    """Those that `tensor_shapes` lists. Where tokens are the stream, W_O has full width."""
    scale: float | None = None
    """Factor on the scores; None: 1/sqrt(d_head)."""

    def __post_init__(self) -> None:
        shapes = tensor_shapes(self.model, self.d_x, self.d_y)
        for name in sorted(shapes.keys() ^ self.tensors.keys()):
            state = "missing" if name in shapes else "of no use in such a model"
            raise ValueError(f"{name} is {state}.")
        for name, shape in shapes.items():
            shape_here = tuple(self.tensors[name].shape)
            if shape_here != shape:
                raise ValueError(f"{name} must have shape {shape}, got {shape_here}.")
        if self.scale is None:
            width = self.model.head_width(self.d_x, self.d_y)
            object.__setattr__(self, "scale", width**-0.5)

    def __repr__(self) -> str:
        layers, heads = self.model.n_layers, self.model.n_heads
        return f"Weights({layers} x {heads} heads, d_x={self.d_x}, d_y={self.d_y}, {self.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["blocks.0.attn.W_V"].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors["blocks.0.attn.W_V"].device

    @property
    def n_layers(self) -> int:
        return self.model.n_layers

    @property
    def n_heads(self) -> int:
        """Heads per layer, zero heads among them."""
        return self.model.n_heads

    @property
    def heads_per_layer(self) -> tuple[tuple[int, ...], ...]:
        """The heads of each layer that write anything: those whose OV circuit is not zero."""
        rows = []
        for layer in range(self.n_layers):
            W_V, W_O = (self.tensors[f"blocks.{layer}.attn.{name}"] for name in ("W_V", "W_O"))
            live = (W_V @ W_O).flatten(1).any(-1)
            if self.model.biases:
                live |= (self.tensors[f"blocks.{layer}.attn.b_V"][:, None] @ W_O).flatten(1).any(-1)
            rows.append(tuple(live.nonzero().flatten().tolist()))
        return tuple(rows)

    def to(self, target: torch.device | str | torch.dtype) -> "Weights":
        """The same weights on another device or in another dtype."""
        return self.with_tensors({name: t.to(target) for name, t in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Weights":
        """The same but for these tensors."""
        return replace(self, tensors={**self.tensors, **tensors})

    def without(self, heads: Iterable[tuple[int, int]]) -> "Weights":
        """The same with W_O of these heads at zero; (layer, head), from 0."""
        changed: dict[str, Tensor] = {}
        for layer, head in heads:
            name = f"blocks.{layer}.attn.W_O"
            W_O = changed.get(name, self.tensors[name]).clone()
            W_O[head] = 0
            changed[name] = W_O
        return self.with_tensors(changed)

    def compact(self) -> "Weights":
        """The same model with as few heads as its fullest layer has live ones, zero heads behind them."""
        rows = self.heads_per_layer
        n_heads = max(1, *(len(row) for row in rows))
        d_head = self.model.head_width(self.d_x, self.d_y)
        model = replace(self.model, n_heads=n_heads, d_head=d_head)
        tensors = dict(self.tensors)
        for layer, row in enumerate(rows):
            for name in (*HEADS, *BIASES[:3]):
                full = f"blocks.{layer}.attn.{name}"
                if full in tensors:
                    old = tensors[full]
                    tensors[full] = old.new_zeros(n_heads, *old.shape[1:])
                    tensors[full][: len(row)] = old[list(row)]
        return replace(self, model=model, tensors=tensors)

    @property
    def circuits(self) -> AttentionWeights:
        """The heads of a model that is one layer of attention on tokens (x, y), of W_O what is read.

        Raises:
            ValueError: If there is more to the model, naming what.
        """
        extra = why_no_circuits(self.model)
        if extra is not None:
            raise ValueError(
                f"The circuits of one layer of attention need a model without {extra}."
            )
        tensors = {
            name: self.tensors[f"blocks.0.attn.{name}"]
            for name in (*HEADS, *BIASES)
            if f"blocks.0.attn.{name}" in self.tensors
        }
        for name in {"W_O", "b_O"} & set(tensors):
            tensors[name] = tensors[name][..., self.d_x :].contiguous()
        assert self.scale is not None
        return heads_of(self.model, unmerged(tensors), self.scale)

    @property
    def has_stack(self) -> bool:
        """Whether `stack` answers: attention alone, and every token reads the context."""
        model = self.model
        variants = (model.biases, model.merged_qk, model.attend_to_self, model.layout == "in_turn")
        return model.context_only and model.attention_only and not any(variants)

    @property
    def stack(self) -> DeepWeights:
        """The layers of a context-only model of attention alone, each weight in one tensor.

        Raises:
            ValueError: If the model has anything else.
        """
        if not self.has_stack:
            raise ValueError("A stack of layers needs attention alone that reads the context only.")
        assert self.scale is not None
        return DeepWeights(
            **{name: torch.stack(self.layers(name)) for name in NAMES},
            W_in=self.tensors.get("W_in"),
            W_U=self.tensors.get("unembed.W_U"),
            d_y=self.d_y,
            scale=self.scale,
            score=self.model.score,
            score_slope=self.model.score_slope,
        )

    def layers(self, name: str) -> list[Tensor]:
        """A weight of the attention of every layer; W_Q and W_K of merged heads are W_QK and the identity."""
        if self.model.merged_qk and name in ("W_Q", "W_K"):
            merged = self.layers("W_QK")
            return merged if name == "W_Q" else [identity_keys(W_QK) for W_QK in merged]
        return [self.tensors[f"blocks.{layer}.attn.{name}"] for layer in range(self.n_layers)]

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack(self.layers("W_Q"))

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack(self.layers("W_K"))

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return torch.stack(self.layers("W_V"))

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return torch.stack(self.layers("W_O"))


def circuit_norms(weights: Weights) -> dict[str, Float[Tensor, "layer head"]]:
    """Frobenius norms of every head's QK circuit, with the scale in it, and OV circuit, by their names in a history."""
    return {
        "qk_norm": weights.scale * (weights.W_Q @ weights.W_K.mT).norm(dim=(2, 3)),
        "ov_norm": (weights.W_V @ weights.W_O).norm(dim=(2, 3)),
    }


def heads_of(model: ModelConfig, tensors: Mapping[str, Tensor], scale: float) -> AttentionWeights:
    """Heads with the scores of an architecture.

    Args:
        tensors: Weights, and biases where there are any, by their names in `AttentionWeights`.
    """
    return AttentionWeights(
        **tensors,
        scale=scale,
        score=model.score,
        score_slope=model.score_slope,
        attend_to_self=model.attend_to_self,
        merged_qk=model.merged_qk,
    )


def why_no_circuits(model: ModelConfig) -> str | None:
    """What a model has beyond one layer of attention on tokens (x, y), in words; None: nothing.

    Example:
        >>> why_no_circuits(ModelConfig(n_layers=4, context_only=True))
        'several layers (4)'
    """
    extras = {
        f"several layers ({model.n_layers})": model.n_layers > 1,
        "layer norms": model.norm is not None or model.final_norm,
        "MLPs": model.d_mlp is not None,
        "a read-in and read-out": model.d_model is not None,
        "positions": model.n_positions is not None,
    }
    return next((extra for extra, there in extras.items() if there), None)


def model_of_layer(circuits: AttentionWeights) -> ModelConfig:
    """The architecture of one layer of attention, as its heads say it.

    Only models that read the context on both sides may have rectified scores; what a single layer predicts at the
    query is the same.
    """
    _, d_model, d_head = circuits.W_Q.shape
    both_sides = circuits.score not in SCORES
    return ModelConfig(
        n_heads=circuits.n_heads,
        d_head=None if d_head == d_model and not both_sides else d_head,
        score=circuits.score,
        score_slope=circuits.score_slope,
        attend_to_self=circuits.attend_to_self,
        biases=circuits.b_O is not None,
        merged_qk=circuits.merged_qk,
        context_only=both_sides,
    )


def weights_of_layer(circuits: AttentionWeights, *, model: ModelConfig | None = None) -> Weights:
    """A model of one layer of attention from its heads: the inverse of `Weights.circuits`.

    Args:
        model: The architecture, where it is known; else what the weights say.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> weights_of_layer(zero_head(d_x=5))
        Weights(1 x 1 heads, d_x=5, d_y=1, torch.float64)
    """
    model = model_of_layer(circuits) if model is None else model
    tensors = {f"blocks.0.attn.{name}": tensor for name, tensor in circuits.parameters.items()}
    for name in ("blocks.0.attn.W_O", "blocks.0.attn.b_O"):
        if name in tensors:
            tensors[name] = pad(tensors[name], (circuits.d_x, 0))
    return Weights(model, circuits.d_x, circuits.d_y, tensors, circuits.scale)


def weights_of_stack(stack: DeepWeights) -> Weights:
    """A context-only model from its stacked layers: the inverse of `Weights.stack`."""
    model = ModelConfig(
        n_layers=stack.n_layers,
        n_heads=stack.n_heads,
        d_head=stack.d_head,
        score=stack.score,
        score_slope=stack.score_slope,
        context_only=True,
        d_model=None if stack.W_in is None else stack.d_model,
    )
    return Weights(model, stack.d_x, stack.d_y, stack.parameters, stack.scale)


AnyWeights = Weights | AttentionWeights | DeepWeights
"""Weights of any form."""


def as_weights(weights: AnyWeights) -> Weights:
    """Weights of any form as those of a model."""
    if isinstance(weights, AttentionWeights):
        return weights_of_layer(weights)
    return weights_of_stack(weights) if isinstance(weights, DeepWeights) else weights
