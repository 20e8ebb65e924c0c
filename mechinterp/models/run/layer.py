"""One layer of a model from its weights alone, the read-in before the first and the read-out after the last."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.config.model import MLP_NORM
from mechinterp.icl.prompts import Prompts
from mechinterp.models.layers import (
    ACTIVATION_FUNCTIONS,
    affine,
    normed,
    tokens_of,
    turned_by_position,
)
from mechinterp.models.recurrence import Memory, memory_of, written_before
from mechinterp.models.run.attend import Attend, Keys, Queries
from mechinterp.models.weights import GATE_TENSORS, Weights

ALL, LAST, X = slice(0, None), slice(-1, None), slice(0, None, 2)
"""Positions that a layer computes: all, the query, and every x of tokens in turn."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a model, from the stream before it to the stream after it."""

    weights: Weights
    number: int
    """Its index in the model, from 0."""
    attend: Attend
    last: slice
    """Positions that are read after the last layer."""

    def named(self, name: str) -> Tensor | None:
        """A weight of this layer; None if the model does not have it."""
        stacked = self.weights.tensors.get(name)
        return None if stacked is None else stacked[self.number]

    @cached_property
    def rows(self) -> slice:
        """Positions that later computation reads."""
        return self.last if self.number == self.weights.n_layers - 1 else ALL

    def z(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch row head d"]:
        """Weighted averages of the heads' values, at the rows."""
        read = self.read(stream)
        q, k, v = self.projections(read)
        model = self.weights.model
        if not model.recurrent:
            return self.averages(q, k, v)
        n_written = written_before(stream.shape[1], model)[self.rows]
        q, k = self._placed(q, k)
        return self._memory(k, v, read).read(q, n_written)

    def projections(self, read: Float[Tensor, "batch pos d_model"]) -> tuple[Queries, Keys, Keys]:
        """Queries at the rows, and keys and values at all positions, before positions turn them.

        Args:
            read: The stream as the heads read it.
        """
        if self.rows == ALL:
            q, k, v = self._projected(read, "QKV")
            return q, k, v
        (q,), (k, v) = self._projected(read[:, self.rows], "Q"), self._projected(read, "KV")
        return q, k, v

    def averages(self, q: Queries, k: Keys, v: Keys) -> Float[Tensor, "batch row head d"]:
        """Weighted averages of the values, from `projections`; the layer is not recurrent."""
        return self.attend(*self._placed(q, k), v, self.weights.model, self.rows)

    def _placed(self, q: Queries, k: Keys) -> tuple[Queries, Keys]:
        """Queries times the scale, and keys, both turned by their positions."""
        model = self.weights.model
        first, _, step = self.rows.indices(k.shape[1])
        q = self.weights.scale * turned_by_position(q, model, first=first, step=step)
        return q, turned_by_position(k, model)

    def z_beside(
        self, asking: Float[Tensor, "batch row d_model"], pairs: Float[Tensor, "batch key d_model"]
    ) -> Float[Tensor, "batch row head d"]:
        """Outputs of the heads of a recurrent layer for queries beside the pairs: query n reads the state after n pairs."""
        (q,), read = self._projected(self.read(asking), "Q"), self.read(pairs)
        k, v = self._projected(read, "KV")
        return self._memory(k, v, read).read(self.weights.scale * q, range(asking.shape[1]))

    def read(self, stream: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Stream as the heads read it."""
        return self._normed("ln1", stream) if self.weights.model.norm == "before" else stream

    def _memory(self, k: Keys, v: Keys, read: Tensor) -> Memory:
        """Writes of the tokens into the states of a recurrent layer."""
        gates = {name: self.named(f"attn.{name}") for name in GATE_TENSORS}
        own = {name: tensor for name, tensor in gates.items() if tensor is not None}
        return memory_of(self.weights.model.score, k, v, read, own)

    def written(
        self, z: Float[Tensor, "batch row head d"], heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch row d_model"]:
        """Sum of the heads' outputs and the bias; of some heads: without the bias."""
        W_O = self.weights.W_O[self.number]
        if heads is not None:
            return z[:, :, heads].flatten(2) @ W_O[heads].flatten(0, 1)
        return affine(z.flatten(2), W_O.flatten(0, 1), self.named("attn.b_O"))

    def after(
        self, stream: Float[Tensor, "batch pos d_model"], added: Float[Tensor, "batch row d_model"]
    ) -> Float[Tensor, "batch row d_model"]:
        """Stream after the layer, from the stream before it and the sum of its heads' outputs."""
        model = self.weights.model
        stream = stream[:, self.rows] + added
        if model.norm == "after":
            stream = self._normed("ln1", stream)
        W_in, W_out = self.named("mlp.W_in"), self.named("mlp.W_out")
        if W_in is None or W_out is None:
            return stream
        read = self._normed("ln2", stream) if model.norm in ("before", MLP_NORM) else stream
        hidden = ACTIVATION_FUNCTIONS[model.activation](affine(read, W_in, self.named("mlp.b_in")))
        stream = stream + affine(hidden, W_out, self.named("mlp.b_out"))
        return self._normed("ln2", stream) if model.norm == "after" else stream

    def _projected(self, read: Tensor, names: str) -> list[Float[Tensor, "batch pos head d"]]:
        """Queries, keys or values of all heads, from one matrix product."""
        heads = [getattr(self.weights, f"W_{name}")[self.number] for name in names]
        biases = [b.flatten() for n in names if (b := self.named(f"attn.b_{n}")) is not None]
        W = torch.cat([each.transpose(0, 1).flatten(1) for each in heads], dim=1)
        b = torch.cat(biases) if biases else None
        sizes = [each.shape[0] * each.shape[2] for each in heads]
        split = affine(read, W, b).split(sizes, dim=-1)
        return [own.unflatten(-1, (len(each), -1)) for own, each in zip(split, heads, strict=True)]

    def _normed(self, norm: str, stream: Tensor) -> Tensor:
        tensors = self.weights.tensors
        w, b = tensors[f"{norm}.w"][self.number], tensors[f"{norm}.b"][self.number]
        return normed(stream, w, b, self.weights.model)


def embedded(weights: Weights, prompts: Prompts) -> Float[Tensor, "batch pos d_model"]:
    """Stream before the first layer."""
    tokens = tokens_of(prompts, weights.model, d_x=weights.d_x, d_y=weights.d_y)
    return read_in(weights, tokens)


def read_in(
    weights: Weights, stream: Float[Tensor, "batch pos d_token"]
) -> Float[Tensor, "batch pos d_model"]:
    """Tokens after the read-in, with positions added, where the model has them."""
    tensors = weights.tensors
    if "W_read" in tensors:
        hidden = affine(stream, tensors["W_read"], tensors.get("b_read"))
        stream = ACTIVATION_FUNCTIONS[weights.model.activation](hidden)
    if "W_in" in tensors:
        stream = affine(stream, tensors["W_in"], tensors.get("b_in"))
    positions = tensors.get("pos_embed.W_pos")
    return stream if positions is None else stream + positions[: stream.shape[1]]


def read_out(
    weights: Weights, stream: Float[Tensor, "batch row d_model"]
) -> Float[Tensor, "batch row d_y"]:
    """The model's own read-out of a stream, last norm included."""
    tensors, model = weights.tensors, weights.model
    if model.final_norm:
        stream = normed(stream, tensors["ln_final.w"], tensors["ln_final.b"], model)
    if "unembed.W_U" not in tensors:
        return stream[..., weights.d_x :]
    return affine(stream, tensors["unembed.W_U"], tensors.get("unembed.b_U"))
