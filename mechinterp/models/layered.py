"""Layered models of somebody else, with norms and MLPs: weights in, predictions out.

A GPT-2 that reads x and y in turn, and a stack of torch's encoder layers that reads tokens (x, y). A layer is
computed in two halves, what its heads average and what it makes of that, so that heads are masked in between.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch
import torch.nn.functional as F  # noqa: N812
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

GPT2, ENCODER = "gpt2", "torch-encoder"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}

Affine = tuple[Tensor, Tensor | None]
"""Weight and bias, as F.linear and F.layer_norm take them."""


@dataclass(frozen=True)
class LayerLaw:
    """What decides a layer's output and no weight shows."""

    n_heads: int
    activation: str
    """One of `ACTIVATIONS`."""
    layer_norm_eps: float = 1e-5
    norm_first: bool = True
    """Whether a layer norms its input (pre-norm) or what it adds to the stream and the stream (post-norm)."""
    attend_to_self: bool = True
    """Whether the query is among the keys."""


@dataclass(frozen=True, eq=False)
class Layer:
    """Heads, then an MLP, which add to the stream: `after_heads(stream, heads(stream, reads))`."""

    law: LayerLaw
    heads_in: Affine
    """To q of all heads, k of all heads, v of all heads."""
    heads_out: Affine
    mlp_in: Affine
    mlp_out: Affine
    norms: tuple[Affine, Affine]
    """Of the heads and of the MLP."""

    def heads(
        self, stream: Float[Tensor, "batch pos width"], reads: Bool[Tensor, "pos pos"] | None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """z: what each head has averaged, before the output projection.

        Args:
            reads: Which keys a query attends to, [query, key]; None: all.
        """
        seen = self._norm(0, stream) if self.law.norm_first else stream
        q, k, v = rearrange(
            F.linear(seen, *self.heads_in),
            "batch pos (qkv head d_head) -> qkv batch head pos d_head",
            qkv=3,
            head=self.law.n_heads,
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=reads).transpose(1, 2)

    def after_heads(
        self, stream: Float[Tensor, "batch pos width"], z: Float[Tensor, "batch pos head d_head"]
    ) -> Float[Tensor, "batch pos width"]:
        """The stream after the layer; what stands at one position depends on that position alone."""
        stream = stream + F.linear(z.flatten(2), *self.heads_out)
        if self.law.norm_first:
            return stream + self._mlp(self._norm(1, stream))
        stream = self._norm(0, stream)
        return self._norm(1, stream + self._mlp(stream))

    def _mlp(self, stream: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.law.activation](F.linear(stream, *self.mlp_in))
        return F.linear(inner, *self.mlp_out)

    def _norm(self, which: int, stream: Tensor) -> Tensor:
        return F.layer_norm(stream, stream.shape[-1:], *self.norms[which], self.law.layer_norm_eps)


@dataclass(frozen=True, eq=False)
class LayeredModel:
    """Layers between a way in and a way out; the prediction is read at the last position."""

    d_x: int
    d_y: int
    n_heads: int
    max_context: int | None
    """Most pairs that its positions have room for; None: any number."""
    layers: tuple[Layer, ...]
    reads: Callable[[int], Tensor | None]
    """Number of positions to which keys a query attends to, [query, key]; None: to all."""
    embed: Callable[[Prompts], Tensor]
    """Prompts to the stream before the first layer, [batch, pos, width]."""
    read: Callable[[Tensor], Tensor]
    """The stream at the last position [batch, width] to the prediction [batch, d_y]."""

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def predict(
        self, prompts: Prompts, *, masked_heads: Collection[tuple[int, int]] = ()
    ) -> Float[Tensor, "batch d_y"]:
        """The prediction at the query, unit y, in the dtype of the weights.

        Args:
            masked_heads: (layer, head) pairs, from 0, whose share of the output projection is taken as
                zero; its bias stays.
        Raises:
            ValueError: If there is no such head, or the prompts are too long or of another d_x or d_y.
        Example:
            >>> from mechinterp.config import TaskConfig
            >>> from mechinterp.icl.prompts import generator_for, sample_prompts
            >>> layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
            >>> tensors = {f"layers.0.{name}": weight for name, weight in layer.state_dict().items()}
            >>> law = LayerLaw(n_heads=2, activation="relu", norm_first=False)
            >>> model = encoder_model(tensors, law, d_x=5, d_y=1)
            >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
            >>> tuple(model.predict(prompts, masked_heads=[(0, 1)]).shape)
            (8, 1)
        """
        for layer, head in masked_heads:
            if not (0 <= layer < self.n_layers and 0 <= head < self.n_heads):
                raise ValueError(
                    f"masked_heads must lie in {self.n_layers} layers of {self.n_heads} heads, got {(layer, head)}."
                )
        return self._finish(0, *self._enter(prompts), masked_heads)

    def predict_each_masked(
        self, prompts: Prompts
    ) -> tuple[Float[Tensor, "batch d_y"], Float[Tensor, "batch layer head d_y"]]:
        """The prediction with no head masked, and with each head masked alone.

        What comes before a masked head does not depend on it and is computed once.
        """
        stream, z = self._enter(prompts)
        masked = []
        for layer in range(self.n_layers):
            stream, z = self._advance(layer, stream, z) if layer else (stream, z)
            heads = range(self.n_heads)
            alone = [self._finish(layer, stream, z, [(layer, head)]) for head in heads]
            masked.append(torch.stack(alone, dim=1))
        return self._finish(self.n_layers - 1, stream, z, []), torch.stack(masked, dim=1)

    def stream(self, prompts: Prompts) -> Float[Tensor, "batch pos width"]:
        """The stream before the first layer.

        Raises:
            ValueError: If the prompts are too long or of another d_x or d_y.
        """
        found = (prompts.x.shape[2], prompts.y.shape[2])
        if found != (self.d_x, self.d_y):
            raise ValueError(
                f"The prompts' (d_x, d_y) must be the model's, {(self.d_x, self.d_y)}, got {found}."
            )
        length = prompts.x.shape[1]
        if self.max_context is not None and length > self.max_context:
            raise ValueError(too_long(length, self.max_context))
        return self.embed(prompts)

    def _enter(self, prompts: Prompts) -> tuple[Tensor, Tensor]:
        """The stream before the first layer, and z of its heads."""
        stream = self.stream(prompts)
        return stream, self.layers[0].heads(stream, self.reads(stream.shape[1]))

    def _advance(self, layer: int, stream: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """The stream before a layer and z of its heads, from those of the layer before it."""
        stream = self.layers[layer - 1].after_heads(stream, z)
        return stream, self.layers[layer].heads(stream, self.reads(stream.shape[1]))

    def _finish(
        self, first: int, stream: Tensor, z: Tensor, masked_heads: Collection[tuple[int, int]]
    ) -> Float[Tensor, "batch d_y"]:
        """The prediction from the stream before a layer and z of its heads."""
        for layer in range(first, self.n_layers):
            stream, z = self._advance(layer, stream, z) if layer > first else (stream, z)
            gone = [head for at, head in masked_heads if at == layer]
            z = _without(z, gone) if gone else z
        # Behind the last heads nothing but the query is read.
        return self.read(self.layers[-1].after_heads(stream[:, -1:], z[:, -1:])[:, -1])


def too_long(context_length: int, max_context: int) -> str:
    """What to say of a context that has no room among the positions."""
    return (
        f"context_length must be <= {max_context}, as 2 * {max_context} + 1 positions are all that "
        f"n_positions has room for, got {context_length}."
    )


def gpt2_model(tensors: Mapping[str, Tensor], law: LayerLaw) -> LayeredModel:
    """The regression GPT-2 with these weights: tokens x_1, y_1, x_2, ..., y padded with zeros to d_x.

    Args:
        tensors: GPT2Model's names, and read_in, read_out (biases may lack); checked by the reader.
    Source:
        Garg et al. 2022, arXiv 2208.01066, with Hugging Face's GPT2Model.
    """
    weights = _one_dtype(tensors)
    positions = weights["wpe.weight"]

    def transposed(name: str) -> Affine:
        weight, bias = _affine(weights, name)  # [in, out]
        return weight.mT, bias

    layers = tuple(
        Layer(
            law=law,
            heads_in=transposed(f"h.{layer}.attn.c_attn"),
            heads_out=transposed(f"h.{layer}.attn.c_proj"),
            mlp_in=transposed(f"h.{layer}.mlp.c_fc"),
            mlp_out=transposed(f"h.{layer}.mlp.c_proj"),
            norms=(_affine(weights, f"h.{layer}.ln_1"), _affine(weights, f"h.{layer}.ln_2")),
        )
        for layer in range(n_layers(weights))
    )

    def embed(prompts: Prompts) -> Tensor:
        tokens = interleaved(prompts).to(positions)
        return F.linear(tokens, *_affine(weights, "read_in")) + positions[: tokens.shape[1]]

    def read(last: Tensor) -> Tensor:
        normed = F.layer_norm(last, last.shape[-1:], *_affine(weights, "ln_f"), law.layer_norm_eps)
        return F.linear(normed, *_affine(weights, "read_out"))

    return LayeredModel(
        d_x=weights["read_in.weight"].shape[1],
        d_y=weights["read_out.weight"].shape[0],
        n_heads=law.n_heads,
        max_context=(len(positions) - 1) // 2,
        layers=layers,
        reads=lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
        embed=embed,
        read=read,
    )


def encoder_model(
    tensors: Mapping[str, Tensor], law: LayerLaw, *, d_x: int, d_y: int
) -> LayeredModel:
    """The stack of torch.nn.TransformerEncoderLayer with these weights, on tokens (x, y).

    Args:
        tensors: layers.{l}.self_attn..., a last norm if there is one, read_in and read_out if there are
            any; checked by the reader. Without read_out the prediction is the y entries of the stream.
    """
    weights = _one_dtype(tensors)
    first = weights["layers.0.linear1.weight"]
    layers = tuple(
        Layer(
            law=law,
            heads_in=_affine(weights, f"layers.{layer}.self_attn.in_proj", "_"),
            heads_out=_affine(weights, f"layers.{layer}.self_attn.out_proj"),
            mlp_in=_affine(weights, f"layers.{layer}.linear1"),
            mlp_out=_affine(weights, f"layers.{layer}.linear2"),
            norms=(
                _affine(weights, f"layers.{layer}.norm1"),
                _affine(weights, f"layers.{layer}.norm2"),
            ),
        )
        for layer in range(n_layers(weights))
    )

    def embed(prompts: Prompts) -> Tensor:
        tokens = prompts.tokens.to(first)
        return (
            F.linear(tokens, *_affine(weights, "read_in"))
            if "read_in.weight" in weights
            else tokens
        )

    def read(last: Tensor) -> Tensor:
        if "norm.weight" in weights:
            norm = _affine(weights, "norm")
            last = F.layer_norm(last, last.shape[-1:], *norm, law.layer_norm_eps)
        return (
            F.linear(last, *_affine(weights, "read_out"))
            if "read_out.weight" in weights
            else last[:, d_x:]
        )

    def reads(n: int) -> Tensor | None:
        return None if law.attend_to_self else (torch.arange(n) < n - 1).expand(n, n)

    return LayeredModel(
        d_x=d_x,
        d_y=d_y,
        n_heads=law.n_heads,
        max_context=None,
        layers=layers,
        reads=reads,
        embed=embed,
        read=read,
    )


def interleaved(prompts: Prompts) -> Float[Tensor, "batch pos d_x"]:
    """x_1, y_1, ..., x_L, y_L, x_query, each y padded with zeros to d_x.

    Example:
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 8, generator=generator_for(0, "eval", 0))
        >>> tuple(interleaved(prompts).shape)
        (8, 81, 5)
    """
    padded = F.pad(prompts.y, (0, prompts.x.shape[2] - prompts.y.shape[2]))
    pairs = torch.stack([prompts.x, padded], dim=2).flatten(1, 2)
    return torch.cat([pairs, prompts.x_query[:, None]], dim=1)


def n_layers(tensors: Mapping[str, Tensor]) -> int:
    """Number of layers among names such as h.0.ln_1.weight or layers.0.norm1.weight."""
    numbered = (name.split(".") for name in tensors)
    return len({parts[1] for parts in numbered if parts[0] in ("h", "layers")})


def _affine(weights: Mapping[str, Tensor], name: str, between: str = ".") -> Affine:
    return weights[f"{name}{between}weight"], weights.get(f"{name}{between}bias")


def _without(z: Float[Tensor, "batch pos head d_head"], heads: list[int]) -> Tensor:
    z = z.clone()
    z[:, :, heads] = 0
    return z


def _one_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in the widest dtype among them, at least float32."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors.values()), torch.float32)
    return {name: tensor.detach().to("cpu", dtype) for name, tensor in tensors.items()}
