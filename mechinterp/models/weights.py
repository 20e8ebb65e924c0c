"""Weights of a model: tensors by name, stacked over layers, and the architecture that uses them.

Names are HookedTransformer's without the layer; `by_name` and `Weights.of_names` convert from and to files and hooks.
The weights of a single attention layer also have QK and OV circuits.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config import ModelConfig
from mechinterp.config.model import BIASES, of_each_layer, stacked_shapes, tensor_shapes
from mechinterp.icl.prompts import ordinary
from mechinterp.memory import require_memory

GATE_TENSORS = ("W_gate", "b_gate", "W_beta", "b_beta", "b_ridge")
"""Attention tensors of recurrent layers."""
HEADS = ("W_Q", "W_K", "W_QK", "W_V", "W_O", *BIASES[:3], *GATE_TENSORS)
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
        tensors = {name: t.to(target, copy=True) for name, t in self.tensors.items()}
        return self.with_tensors(tensors)

    def copied(self) -> "Weights":
        """Detached copy that shares no memory with these weights."""
        return self.with_tensors({name: t.detach().clone() for name, t in self.tensors.items()})

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Weights":
        """Copy with these tensors in place of those of the same name; the others are copied."""
        others = {name: t.clone() for name, t in self.tensors.items() if name not in tensors}
        return replace(self, tensors={**others, **tensors})

    def with_model(self, **settings: object) -> "Weights":
        """Copy with these settings of the architecture replaced, such as the score."""
        model = replace(self.model, d_head=self.d_head, **settings)  # type: ignore[arg-type]
        return replace(self, model=model, tensors={n: t.clone() for n, t in self.tensors.items()})

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
        tensors = {name: t.clone() for name, t in self.tensors.items()}
        for name in {f"attn.{name}" for name in HEADS} & tensors.keys():
            old = tensors[name]
            tensors[name] = old.new_zeros(self.n_layers, n_heads, *old.shape[2:])
            for layer, row in enumerate(rows):
                tensors[name][layer, : len(row)] = old[layer, list(row)]
        return self.of_heads(tensors)

    def __getitem__(self, heads: slice) -> "Weights":
        """Model of these heads of every layer."""
        tensors = dict(self.tensors)
        for name in {f"attn.{name}" for name in HEADS} & tensors.keys():
            tensors[name] = tensors[name][:, heads]
        return self.of_heads(tensors)

    def of_heads(self, tensors: Mapping[str, Tensor]) -> "Weights":
        """Model of the same architecture with these tensors, which may have another number of heads."""
        n_heads = tensors["attn.W_O"].shape[1]
        model = replace(self.model, n_heads=n_heads, d_head=self.d_head)
        return replace(self, model=model, tensors=tensors)

    @property
    def QK(self) -> Float[Tensor, "head d_model d_model"]:
        """scale * W_Q W_K^T of one attention layer, [query coordinate, key coordinate]; the papers' KQ is its transpose.

        Raises:
            ValueError: If the model has further parts; the message names one.
        """
        self.require_one_layer("weights.QK")
        needed = 2 * self.n_heads * self.d_model**2 * self.W_V.element_size()
        require_memory(needed, f"QK circuits of {self.n_heads} heads of width {self.d_model}")
        return self.scale * self.W_Q[0] @ self.W_K[0].mT

    @property
    def OV(self) -> Float[Tensor, "head d_model d_y"]:
        """W_V W_O of one attention layer, [token coordinate, response].

        Raises:
            ValueError: If the model has further parts; the message names one.
        """
        self.require_one_layer("weights.OV")
        return self.W_V[0] @ self.W_O[0, ..., self.d_x :].contiguous()

    @property
    def omega(self) -> Float[Tensor, "head d_x"]:
        """Diagonal of each QK circuit's x block, unit 1/x^2."""
        return self.QK[:, : self.d_x, : self.d_x].diagonal(dim1=1, dim2=2)

    @property
    def mu(self) -> Float[Tensor, "head d_y"]:
        """Diagonal of each OV circuit's y block: the weight of y_n in prediction n."""
        return self.OV[:, self.d_x :].diagonal(dim1=1, dim2=2)

    @property
    def qk_diagonal(self) -> Float[Tensor, " head"]:
        """Norm of the diagonal of the QK x block divided by the norm of the whole block; 1 for a diagonal block."""
        block = self.QK[:, : self.d_x, : self.d_x]
        return part_of(self.omega, block)

    @property
    def ov_last_entry(self) -> Float[Tensor, " head"]:
        """Norm of mu divided by the norm of the whole OV circuit; 1 if only y_n contributes to prediction n."""
        return part_of(self.mu, self.OV)

    @property
    def output_bias(self) -> Float[Tensor, " d_y"]:
        """The y entries of b_O of one attention layer, which are added to the prediction; zeros without biases."""
        if not self.model.biases:
            return self.W_O.new_zeros(self.d_y)
        return self.tensors["attn.b_O"][0, self.d_x :]

    def require_one_layer(self, what: str) -> None:
        """Refuse a model that is more than one attention layer on tokens (x, y).

        Args:
            what: What needs one layer, for the error message.
        Raises:
            ValueError: If the model has further parts; the message names one.
        """
        if more := self.model.beyond_one_layer:
            raise ValueError(
                f"{what} needs one layer of attention with nothing around it, got {more}."
            )


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


def identity_keys(
    W_QK: Float[Tensor, "*heads d_model d_model"],
) -> Float[Tensor, "*heads d_model d_model"]:
    """W_K of merged heads: one identity matrix per head."""
    identity = torch.eye(W_QK.shape[-1], dtype=W_QK.dtype, device=W_QK.device)
    return identity.repeat(*W_QK.shape[:-2], 1, 1)


def part_of(
    part: Float[Tensor, "..."], whole: Float[Tensor, "*heads row column"]
) -> Float[Tensor, "*heads"]:
    """Norm of a part of each head's circuit, divided by that of the circuit; 0 for a zero circuit."""
    norm = whole.flatten(-2).norm(dim=-1)
    return part.flatten(norm.ndim).norm(dim=-1) / norm.masked_fill(norm == 0, 1)
