"""The model as a plain module of nn.Linear, for tools that decompose or replace linear layers."""

import copy
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.blocks import MLP, Block
from mechinterp.models.layers import ACTIVATIONS, rotated
from mechinterp.models.scores import attention_pattern, readable_keys
from mechinterp.models.tokens import tokens_of

if TYPE_CHECKING:
    from mechinterp.models.hooked.transformer import ICLTransformer


class LinearAttention(nn.Module):
    """Attention heads with q, k, v and o as nn.Linear; the heads lie side by side."""

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.cfg = attn.cfg
        biases = [getattr(attn, f"b_{name}", None) for name in "QKVO"]
        q, k, v = (_heads(getattr(attn, f"W_{name}")) for name in "QKV")
        flat = [None if bias is None else bias.flatten() for bias in biases]
        self.q, self.k, self.v = _linear(q, flat[0]), _linear(k, flat[1]), _linear(v, flat[2])
        self.o = _linear(attn.W_O.flatten(0, 1), flat[3])

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        model, n_heads = self.cfg.model, self.cfg.n_heads
        q, k, v = (each(x).unflatten(-1, (n_heads, -1)) for each in (self.q, self.k, self.v))
        if model.rotary_dim is not None:
            q, k = rotated(q, model), rotated(k, model)
        scores = self.cfg.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        reads = readable_keys(scores.shape[-1], model, device=scores.device)
        scores = scores.masked_fill(~reads, -torch.inf)
        pattern = attention_pattern(scores, score=self.cfg.score, slope=self.cfg.score_slope)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", pattern, v).flatten(2))


class LinearMLP(nn.Module):
    """MLP with two nn.Linear."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.activation = mlp.activation
        self.up, self.down = _linear(mlp.W_in, mlp.b_in), _linear(mlp.W_out, mlp.b_out)

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        return self.down(self.activation(self.up(x)))


class LinearBlock(nn.Module):
    """Attention and an optional MLP, both added to the stream, with norms before or after them."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm = block.cfg.model.norm
        self.attn = LinearAttention(block.attn)
        self.mlp = LinearMLP(block.mlp) if block.cfg.d_mlp is not None else None
        self.ln1: nn.Module = copy.deepcopy(getattr(block, "ln1", nn.Identity()))
        self.ln2: nn.Module = copy.deepcopy(getattr(block, "ln2", nn.Identity()))

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        before = self.norm == "before"
        x = x + self.attn(self.ln1(x) if before else x)
        x = x if before else self.ln1(x)
        if self.mlp is None:
            return x
        x = x + self.mlp(self.ln2(x) if before else x)
        return x if before else self.ln2(x)


class LinearModule(nn.Module):
    """Same function as an `ICLTransformer`, with a copy of its weights in nn.Linear and without hooks."""

    def __init__(self, model: "ICLTransformer") -> None:
        super().__init__()
        self.model = model.cfg.model
        self.sizes = {"d_x": model.cfg.d_x, "d_y": model.cfg.d_y}
        read, embed = (getattr(model, name, None) for name in ("W_read", "W_in"))
        if read is not None:
            self.read = _linear(read, model.b_read)
        if embed is not None:
            self.embed = _linear(embed, model.b_in)
        if self.model.n_positions is not None:
            self.W_pos = nn.Parameter(model.pos_embed["W_pos"].detach().clone())
        self.blocks = nn.ModuleList(LinearBlock(block) for block in model.blocks)  # type: ignore[arg-type]
        self.ln_final = copy.deepcopy(model.ln_final)
        self.unembed = _linear(model.unembed.W_U, model.unembed.b_U)
        # Without d_model the read-out selects the y entries, and is not trained.
        self.unembed.requires_grad_(self.model.d_model is not None)

    def forward(
        self, tokens: Prompts | Float[Tensor, "batch pos d_token"]
    ) -> Float[Tensor, "batch pos d_y"]:
        """Read-out at every position, in units of y; at the last position it predicts y_query."""
        if isinstance(tokens, Prompts):
            tokens = tokens_of(tokens, self.model, **self.sizes)
        if self.model.d_read_in is not None:
            tokens = ACTIVATIONS[self.model.activation](self.read(tokens))
        x = tokens if self.model.d_model is None else self.embed(tokens)
        if self.model.n_positions is not None:
            x = x + self.W_pos[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def _heads(W: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "d_model heads"]:
    """Weights of all heads side by side."""
    return W.permute(1, 0, 2).flatten(1)


def _linear(W: Float[Tensor, "d_in d_out"], bias: Tensor | None) -> nn.Linear:
    """nn.Linear with a copy of these weights, [in, out]."""
    d_in, d_out = W.shape
    linear = nn.Linear(d_in, d_out, bias=bias is not None, device=W.device, dtype=W.dtype)
    with torch.no_grad():
        linear.weight.copy_(W.mT)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
