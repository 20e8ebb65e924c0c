"""Layered models of somebody else, with norms and MLPs: weights in, predictions out.

A GPT-2 that reads x and y in turn, and a stack of torch's encoder layers that reads tokens (x, y). The
layers are the libraries' own modules; heads are masked without anything being changed in them.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from mechinterp.icl.prompts import Prompts

GPT2, ENCODER = "gpt2", "torch-encoder"


@dataclass(frozen=True)
class LayerLaw:
    """What decides a layer's output and no weight shows."""

    n_heads: int
    activation: str
    layer_norm_eps: float = 1e-5
    norm_first: bool = True
    """Whether a layer norms its input (pre-norm) or what it adds to the stream and the stream (post-norm)."""
    attend_to_self: bool = True
    """Whether the query is among the keys."""


@dataclass(frozen=True, eq=False)
class LayeredModel:
    """Layers between a way in and a way out; the prediction is read at the last position."""

    d_x: int
    d_y: int
    n_heads: int
    max_context: int | None
    """Most pairs that its positions have room for; None: any number."""
    layers: tuple[nn.Module, ...]
    projection: str
    """Name, inside a layer, of the weight through which the heads' outputs go."""
    head_axis: int
    """That weight's axis of the heads, n_heads blocks of equal width."""
    mask: Callable[[int], dict[str, Tensor]]
    """Number of positions to the layers' keyword with the attention mask; empty: every key is seen."""
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
            >>> layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
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
        return self._from_layer(0, self._stream(prompts), masked_heads)

    def predict_each_masked(
        self, prompts: Prompts
    ) -> tuple[Float[Tensor, "batch d_y"], Float[Tensor, "batch layer head d_y"]]:
        """The prediction with no head masked, and with each head masked alone.

        What comes before a masked head does not depend on it and is computed once.
        """
        stream = self._stream(prompts)
        masked = []
        for layer in range(self.n_layers):
            heads = range(self.n_heads)
            alone = [self._from_layer(layer, stream, [(layer, head)]) for head in heads]
            masked.append(torch.stack(alone, dim=1))
            stream = self._layer(layer, stream, [])
        return self.read(stream[:, -1]), torch.stack(masked, dim=1)

    def _stream(self, prompts: Prompts) -> Tensor:
        found = (prompts.x.shape[2], prompts.y.shape[2])
        if found != (self.d_x, self.d_y):
            raise ValueError(
                f"The prompts' (d_x, d_y) must be the model's, {(self.d_x, self.d_y)}, got {found}."
            )
        length = prompts.x.shape[1]
        if self.max_context is not None and length > self.max_context:
            raise ValueError(too_long(length, self.max_context))
        return self.embed(prompts)

    def _from_layer(
        self, first: int, stream: Tensor, masked_heads: Collection[tuple[int, int]]
    ) -> Tensor:
        for layer in range(first, self.n_layers):
            heads = [head for at, head in masked_heads if at == layer]
            stream = self._layer(layer, stream, heads)
        return self.read(stream[:, -1])

    def _layer(self, index: int, stream: Tensor, masked: Collection[int]) -> Tensor:
        layer, mask = self.layers[index], self.mask(stream.shape[1])
        if not masked:
            return layer(stream, **mask)
        weight = layer.get_parameter(self.projection).clone()
        width = weight.shape[self.head_axis] // self.n_heads
        for head in masked:
            weight.narrow(self.head_axis, head * width, width).zero_()
        return functional_call(layer, {self.projection: weight}, (stream,), mask)


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
    from transformers import GPT2Config, GPT2Model

    weights = _one_dtype(tensors)
    n_positions, width = weights["wpe.weight"].shape
    config = GPT2Config(
        vocab_size=1,
        bos_token_id=None,
        eos_token_id=None,
        n_positions=n_positions,
        n_embd=width,
        n_layer=n_layers(weights),
        n_head=law.n_heads,
        n_inner=weights["h.0.mlp.c_fc.weight"].shape[1],
        # The same function in one kernel, where transformers' takes eight passes.
        activation_function={"gelu_new": "gelu_pytorch_tanh"}.get(law.activation, law.activation),
        layer_norm_epsilon=law.layer_norm_eps,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        backbone = GPT2Model(config)
    inner = {name: tensor for name, tensor in weights.items() if not name.startswith("read_")}
    _fill(backbone, inner | {"wte.weight": weights["wpe.weight"].new_zeros(1, width)})
    positions = weights["wpe.weight"]

    def embed(prompts: Prompts) -> Tensor:
        tokens = interleaved(prompts).to(positions)
        return _linear(tokens, weights, "read_in") + positions[: tokens.shape[1]]

    def read(last: Tensor) -> Tensor:
        return _linear(backbone.ln_f(last), weights, "read_out")

    return LayeredModel(
        d_x=weights["read_in.weight"].shape[1],
        d_y=weights["read_out.weight"].shape[0],
        n_heads=law.n_heads,
        max_context=(n_positions - 1) // 2,
        layers=tuple(backbone.h),
        projection="attn.c_proj.weight",
        head_axis=0,
        mask=lambda n: {"attention_mask": _barred(positions, n).triu(1)[None, None]},
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
        _encoder_layer(weights, f"layers.{layer}.", law) for layer in range(n_layers(weights))
    )

    def embed(prompts: Prompts) -> Tensor:
        tokens = prompts.tokens.to(first)
        return _linear(tokens, weights, "read_in") if "read_in.weight" in weights else tokens

    def read(last: Tensor) -> Tensor:
        if "norm.weight" in weights:
            scale, shift = weights["norm.weight"], weights.get("norm.bias")
            last = F.layer_norm(last, last.shape[-1:], scale, shift, law.layer_norm_eps)
        return _linear(last, weights, "read_out") if "read_out.weight" in weights else last[:, d_x:]

    def mask(n: int) -> dict[str, Tensor]:
        if law.attend_to_self:
            return {}
        query = torch.arange(n) == n - 1
        return {"src_mask": torch.where(query, _barred(first, n), 0)}

    return LayeredModel(
        d_x=d_x,
        d_y=d_y,
        n_heads=law.n_heads,
        max_context=None,
        layers=layers,
        projection="self_attn.out_proj.weight",
        head_axis=1,
        mask=mask,
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


def _encoder_layer(weights: Mapping[str, Tensor], prefix: str, law: LayerLaw) -> nn.Module:
    inner, width = weights[f"{prefix}linear1.weight"].shape
    layer = nn.TransformerEncoderLayer(
        width,
        law.n_heads,
        inner,
        dropout=0.0,
        activation=law.activation,
        layer_norm_eps=law.layer_norm_eps,
        batch_first=True,
        norm_first=law.norm_first,
        bias=f"{prefix}linear1.bias" in weights,
        device="meta",
    )
    here = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return _fill(layer, {name.removeprefix(prefix): tensor for name, tensor in here.items()})


def _fill(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A module made without numbers, with these; nothing random is drawn for it."""
    module.load_state_dict(weights, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def _one_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in the widest dtype among them, at least float32."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors.values()), torch.float32)
    return {name: tensor.detach().to("cpu", dtype) for name, tensor in tensors.items()}


def _linear(stream: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    return F.linear(stream, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _barred(like: Tensor, n: int) -> Tensor:
    return like.new_full((n, n), -torch.inf)
