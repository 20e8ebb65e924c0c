"""Weights of a model: tensors by name, stacked over layers, and the architecture that uses them.

Names are HookedTransformer's without the layer; `by_name` and `Weights.of_names` convert from and to files and hooks.
`Weights.circuits` gives a single attention layer in the form that the fast computations take.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.config import SCORES, ModelConfig
from mechinterp.config.model import BIASES, NAMES, of_each_layer, stacked_shapes, tensor_shapes
from mechinterp.icl.prompts import ordinary
from mechinterp.models.heads import AttentionWeights, identity_keys
from mechinterp.models.layers import LINEAR

HEADS = ("W_Q", "W_K", "W_QK", "W_V", "W_O", *BIASES[:3])
"""Attention tensors that have a head axis."""


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights of a model."""

    model: ModelConfig
    d_x: int
    d_y: int
    tensors: Mapping[str, Tensor]
    """Tensors by the names of `stacked_shapes`, e.g. attn.W_Q [layer, head, d_model, d_head]. W_O always has all d_model
    columns."""
    scale: float = math.nan
    """Factor on the scores. NaN, the default, is replaced by 1/sqrt(d_head)."""

    def __post_init__(self) -> None:
        shapes = stacked_shapes(self.model, self.d_x, self.d_y)
        _require_shapes(shapes, self.tensors)
        object.__setattr__(self, "tensors", {name: ordinary(self.tensors[name]) for name in shapes})
        if math.isnan(self.scale):
            width = self.model.head_width(self.d_x, self.d_y)
            object.__setattr__(self, "scale", width**-0.5)

    @classmethod
    def of_names(
        cls,
        model: ModelConfig,
        d_x: int,
        d_y: int,
        tensors: Mapping[str, Tensor],
        scale: float = math.nan,
    ) -> "Weights":
        """Weights from tensors by HookedTransformer's names, as `tensor_shapes` lists them; layer tensors are copied.

        Raises:
            ValueError: If a tensor is missing, not used by the model or of a wrong shape; the message names it.
        """
        _require_shapes(tensor_shapes(model, d_x, d_y), tensors)
        return cls(model, d_x, d_y, stacked(tensors, model.n_layers), scale)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Views of the tensors, by HookedTransformer's names."""
        return by_layer(self.tensors, self.n_layers)

    def __repr__(self) -> str:
        heads, sizes = f"{self.n_layers} x {self.n_heads} heads", f"d_x={self.d_x}, d_y={self.d_y}"
        return f"Weights({heads}, {sizes}, {self.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        return self.W_V.dtype

    @property
    def device(self) -> torch.device:
        return self.W_V.device

    @property
    def n_layers(self) -> int:
        return self.model.n_layers

    @property
    def n_heads(self) -> int:
        """Number of heads per layer, heads that are zero included."""
        return self.model.n_heads

    @property
    def d_model(self) -> int:
        return self.W_O.shape[3]

    @property
    def d_head(self) -> int:
        return self.W_O.shape[2]

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.tensors["attn.W_QK" if self.model.merged_qk else "attn.W_Q"]

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """W_K; the identity for merged heads."""
        if self.model.merged_qk:
            return identity_keys(self.W_Q)
        return self.tensors["attn.W_K"]

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        return self.tensors["attn.W_V"]

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        return self.tensors["attn.W_O"]

    @property
    def reading(self) -> tuple[Float[Tensor, "d_token d_model"], Float[Tensor, "d_model d_y"]]:
        """W_in and W_U. A model without them gets the identity and the matrix that selects the y entries."""
        if "W_in" in self.tensors:
            return self.tensors["W_in"], self.tensors["unembed.W_U"]
        identity = torch.eye(self.d_model, dtype=self.dtype, device=self.device)
        return identity, identity[:, self.d_x :]

    @property
    def heads_per_layer(self) -> tuple[tuple[int, ...], ...]:
        """Heads of each layer that write something: those whose OV circuit, or b_V W_O, is not zero."""
        live = (self.W_V @ self.W_O).flatten(2).any(-1)
        if self.model.biases:
            live |= (self.tensors["attn.b_V"][:, :, None] @ self.W_O).flatten(2).any(-1)
        return tuple(tuple(row.nonzero().flatten().tolist()) for row in live)

    def to(self, target: torch.device | str | torch.dtype) -> "Weights":
        """Copy on another device or in another dtype."""
        return self.with_tensors({name: t.to(target) for name, t in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Weights":
        """Copy with these tensors replaced."""
        return replace(self, tensors={**self.tensors, **tensors})

    def without(self, heads: Iterable[tuple[int, int]]) -> "Weights":
        """Copy in which W_O of these heads is zero; heads are (layer, head), counted from 0."""
        W_O = self.W_O.clone()
        for layer, head in heads:
            W_O[layer, head] = 0
        return self.with_tensors({"attn.W_O": W_O})

    def compact(self) -> "Weights":
        """Equivalent model without zero heads, except those that pad a layer to the widest layer's number."""
        rows = self.heads_per_layer
        n_heads = max(1, *(len(row) for row in rows))
        d_head = self.model.head_width(self.d_x, self.d_y)
        tensors = dict(self.tensors)
        for name in {f"attn.{name}" for name in HEADS} & tensors.keys():
            old = tensors[name]
            tensors[name] = old.new_zeros(self.n_layers, n_heads, *old.shape[2:])
            for layer, row in enumerate(rows):
                tensors[name][layer, : len(row)] = old[layer, list(row)]
        model = replace(self.model, n_heads=n_heads, d_head=d_head)
        return replace(self, model=model, tensors=tensors)

    @property
    def circuits(self) -> AttentionWeights:
        """Heads of a model that is one attention layer on tokens (x, y), with only the y columns of W_O.

        Raises:
            ValueError: If the model has further parts; the message names one.
        """
        if (extra := why_no_circuits(self.model)) is not None:
            raise ValueError(
                f"The circuits of one layer of attention need a model without {extra}."
            )
        tensors = self.attention(0)
        for name in {"W_O", "b_O"} & set(tensors):
            tensors[name] = tensors[name][..., self.d_x :].contiguous()
        return heads_of(self.model, tensors, self.scale)

    def attention(self, layer: int) -> dict[str, Tensor]:
        """Weights and biases of a layer's attention by name. Merged heads have W_Q = W_QK and W_K = identity."""
        tensors = {name: getattr(self, name)[layer] for name in NAMES}
        biases = BIASES if self.model.biases else ()
        return tensors | {name: self.tensors[f"attn.{name}"][layer] for name in biases}

    @property
    def is_linear_map(self) -> bool:
        """True if the model is a linear map of its tokens, given the second moment of the context."""
        return self.model.is_stack and self.model.score in LINEAR


def _require_shapes(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    for name in sorted(shapes.keys() ^ tensors.keys()):
        state = "missing" if name in shapes else "of no use in such a model"
        raise ValueError(f"{name} is {state}.")
    for name, shape in shapes.items():
        if (given := tuple(tensors[name].shape)) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {given}.")


def by_layer(stacked: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Views of stacked tensors, by HookedTransformer's names.

    Example:
        >>> list(by_layer({"attn.W_Q": torch.zeros(2, 1, 3, 3), "W_in": torch.zeros(3, 3)}, 2))
        ['blocks.0.attn.W_Q', 'blocks.1.attn.W_Q', 'W_in']
    """
    return of_each_layer(stacked, n_layers, lambda tensor, layer: tensor[layer])


def stacked(named: Mapping[str, Tensor], n_layers: int) -> dict[str, Tensor]:
    """Inverse of `by_layer`: layer tensors are stacked (copied), all others returned as they are."""
    first = "blocks.0."
    layered = [name.removeprefix(first) for name in named if name.startswith(first)]
    return {
        name: torch.stack([named[f"blocks.{layer}.{name}"] for layer in range(n_layers)])
        for name in layered
    } | {name: tensor for name, tensor in named.items() if not name.startswith("blocks.")}


def circuit_norms(weights: Weights) -> dict[str, Float[Tensor, "layer head"]]:
    """Frobenius norms of every head's QK circuit (scale included) and OV circuit, by their names in a history."""
    return {
        "qk_norm": weights.scale * (weights.W_Q @ weights.W_K.mT).norm(dim=(2, 3)),
        "ov_norm": (weights.W_V @ weights.W_O).norm(dim=(2, 3)),
    }


def heads_of(model: ModelConfig, tensors: Mapping[str, Tensor], scale: float) -> AttentionWeights:
    """Heads with the score settings of an architecture.

    Args:
        tensors: Weights, and biases if there are any, by their names in `AttentionWeights`.
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
    """First part of a model beyond one attention layer on tokens (x, y), in words; None if there is none.

    Example:
        >>> why_no_circuits(ModelConfig(n_layers=4, context_only=True))
        'several layers (4)'
    """
    extras = {
        f"several layers ({model.n_layers})": model.n_layers > 1,
        "layer norms": model.norm is not None or model.final_norm,
        "MLPs": model.d_mlp is not None,
        "a read-in and read-out": model.d_model is not None,
        "positions": (model.n_positions, model.rotary_dim) != (None, None),
    }
    return next((extra for extra, has_it in extras.items() if has_it), None)


def model_of_layer(circuits: AttentionWeights) -> ModelConfig:
    """Architecture of one attention layer, from its heads.

    Rectified scores are allowed only with `context_only`, which does not change the prediction of a single layer at
    the query.
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
    """Model of one attention layer from its heads: the inverse of `Weights.circuits`.

    Args:
        model: Architecture; None: `model_of_layer`.
    Raises:
        ValueError: If W_K of merged heads is not the identity.
    Example:
        >>> from mechinterp.models.constructions.one_layer import zero_head
        >>> weights_of_layer(zero_head(d_x=5))
        Weights(1 x 1 heads, d_x=5, d_y=1, torch.float64)
    """
    model = model_of_layer(circuits) if model is None else model
    tensors = {f"attn.{name}": tensor[None] for name, tensor in circuits.tensors.items()}
    if circuits.merged_qk:
        if not torch.equal(circuits.W_K, identity_keys(circuits.W_Q)):
            raise ValueError("W_K of merged heads must be the identity, got another matrix.")
        del tensors["attn.W_K"]
        tensors["attn.W_QK"] = tensors.pop("attn.W_Q")
    for name in {"attn.W_O", "attn.b_O"} & tensors.keys():
        tensors[name] = pad(tensors[name], (circuits.d_x, 0))
    return Weights(model, circuits.d_x, circuits.d_y, tensors, circuits.scale)


AnyWeights = Weights | AttentionWeights
"""Weights of a model, or of the heads of one attention layer."""


def as_weights(weights: AnyWeights) -> Weights:
    """Weights in either form, as `Weights`."""
    return weights_of_layer(weights) if isinstance(weights, AttentionWeights) else weights
