"""The model as a plain module of nn.Linear, for tools that decompose or replace linear layers."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.attention import Attention
from mechinterp.models.hooked.blocks import MLP, Block
from mechinterp.models.hooked.config import HookedConfig
from mechinterp.models.layers import ACTIVATION_FUNCTIONS, tokens_of


class LinearAttention(Attention):
    """Attention heads with q, k, v and o as nn.Linear; the heads lie side by side."""

    def __init__(self, attn: Attention) -> None:
        super().__init__(attn.cfg)
        W_Q, W_K, W_V = (W.permute(1, 0, 2).flatten(1) for W in (attn.W_Q, attn.W_K, attn.W_V))
        biases = [getattr(attn, f"b_{name}", None) for name in "QKVO"]
        b_Q, b_K, b_V, b_O = (None if bias is None else bias.flatten() for bias in biases)
        self.q, self.k, self.v = _linear(W_Q, b_Q), _linear(W_K, b_K), _linear(W_V, b_V)
        self.o = _linear(attn.W_O.flatten(0, 1), b_O)

    def _add_weights(self) -> None:
        """None: the projections have the weights."""

    def _project(self, read: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        return getattr(self, which.lower())(read).unflatten(-1, (self.cfg.n_heads, -1))

    def _write(self, z: Float[Tensor, "batch pos head d_head"]) -> Tensor:
        return self.o(z.flatten(2))


class LinearMLP(nn.Module):
    """MLP with two nn.Linear."""

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        self.activation = mlp.activation
        self.up, self.down = _linear(mlp.W_in, mlp.b_in), _linear(mlp.W_out, mlp.b_out)

    def forward(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        return self.down(self.activation(self.up(x)))


class LinearModule(nn.Module):
    """Same function as an `ICLTransformer`, with a copy of its weights in nn.Linear and without hooks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.cfg.model
        if self.model.recurrent:
            raise ValueError(
                f"as_linear_module needs attention scores, got the recurrent score {self.model.score!r}."
            )
        self.sizes = {"d_x": model.cfg.d_x, "d_y": model.cfg.d_y}
        read, embed = (getattr(model, name, None) for name in ("W_read", "W_in"))
        if read is not None:
            self.read = _linear(read, model.b_read)
        if embed is not None:
            self.embed = _linear(embed, model.b_in)
        if self.model.n_positions is not None:
            self.W_pos = nn.Parameter(model.pos_embed["W_pos"].detach().clone())
        self.blocks = nn.ModuleList(_linear_block(block) for block in model.blocks)
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
            tokens = ACTIVATION_FUNCTIONS[self.model.activation](self.read(tokens))
        x = tokens if self.model.d_model is None else self.embed(tokens)
        if self.model.n_positions is not None:
            x = x + self.W_pos[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def _linear_block(block: Block) -> Block:
    """Copy of a block, without its hooks and switches, in which attention and MLP consist of nn.Linear."""
    cfg = block.cfg
    plain = HookedConfig(cfg.model, cfg.d_x, cfg.d_y, scale=cfg.scale, n_ctx=cfg.n_ctx)
    linear = Block(plain).to(block.attn.W_V)
    linear.load_state_dict(block.state_dict())
    linear.attn = LinearAttention(linear.attn)
    if cfg.d_mlp is not None:
        linear.mlp = LinearMLP(block.mlp)  # type: ignore[assignment]
    return linear


def _linear(W: Float[Tensor, "d_in d_out"], bias: Tensor | None) -> nn.Linear:
    """nn.Linear with a copy of these weights, [in, out]."""
    d_in, d_out = W.shape
    linear = nn.Linear(d_in, d_out, bias=bias is not None, device=W.device, dtype=W.dtype)
    with torch.no_grad():
        linear.weight.copy_(W.mT)
        if bias is not None:
            linear.bias.copy_(bias)
    return linear
