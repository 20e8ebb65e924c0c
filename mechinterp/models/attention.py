"""One attention layer with hook points, its block, and the settings they share with their model.

Names, shapes and hook points are those of TransformerLens, so that its tools find what they look for.
Every position attends to the positions before it and, unless the settings say so, not to itself; or, where
the settings say context_only, to all positions but the last. Either way what the query reads is the context,
all of it and nothing else.
"""

from dataclasses import dataclass, field

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechinterp.config import CONTEXT_ONLY_SCORES, SCORES
from mechinterp.models.functional import identity_keys
from mechinterp.models.scores import attention_pattern


@dataclass(eq=False)
class HookedConfig:
    """Settings of a hooked model, under the names by which TransformerLens reads them."""

    d_x: int
    d_y: int
    n_heads: int
    n_layers: int
    d_head: int
    scale: float
    """Factor on the scores; TransformerLens' `attn_scale` is its inverse."""
    score: str
    score_slope: float
    n_ctx: int
    """Loose bound on the number of positions; some tools want fewer than that, the model does not."""
    attend_to_self: bool = False
    """Whether a position is among its own keys."""
    biases: bool = False
    """Whether the layers have b_Q, b_K, b_V and b_O."""
    merged_qk: bool = False
    """Whether a head has one matrix W_QK in place of W_Q W_K^T; its keys are then its input."""
    context_only: bool = False
    """Whether every position reads all positions but the last, in place of those before it."""
    width: int | None = None
    """Width of the residual stream between a read-in and a read-out; None: tokens are the stream."""
    use_attn_result: bool = False
    """Whether `hook_result` fires."""
    use_split_qkv_input: bool = False
    """Whether `hook_q_input`, `hook_k_input` and `hook_v_input` fire."""
    use_zero_mlp: bool = False
    """Whether `hook_resid_mid` and `hook_mlp_out` fire, as of an MLP that adds zeros."""
    use_hook_mlp_in: bool = False
    """Whether `hook_mlp_in` fires too, given `use_zero_mlp`."""
    device: str = field(init=False, default="cpu")
    """Device of the weights; follows them."""
    dtype: torch.dtype = field(init=False, default=torch.float32)
    """Dtype of the weights; follows them."""
    attn_only: bool = field(init=False, default=True)
    normalization_type: None = field(init=False, default=None)
    n_key_value_heads: None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in ("d_x", "d_y", "n_heads", "n_layers", "d_model", "d_head", "n_ctx"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        scores = CONTEXT_ONLY_SCORES if self.context_only else SCORES
        if self.score not in scores:
            raise ValueError(f"score must be one of {', '.join(scores)}, got {self.score!r}.")
        if self.context_only and self.attend_to_self:
            raise ValueError("attend_to_self must be false where context_only is true, got true.")
        if self.merged_qk and self.d_head != self.d_model:
            raise ValueError(
                f"d_head must be d_model = {self.d_model} where merged_qk is true, got {self.d_head}."
            )

    @property
    def d_token(self) -> int:
        """Width of a token: d_x + d_y."""
        return self.d_x + self.d_y

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.d_token if self.width is None else self.width

    @property
    def d_vocab(self) -> int:
        """The responses take the place of a vocabulary."""
        return self.d_y

    @property
    def d_vocab_out(self) -> int:
        return self.d_y


class Attention(nn.Module):
    """Causal attention heads, strictly so unless cfg.attend_to_self, or heads that read the context only.

    Weights and biases start at zero.

    result_h = z_h W_O,h,   z_h = p_h (x W_V,h),   p_h = f(s_h) / sum f(s_h),
    s_h = scale (x W_Q,h) (x W_K,h)^T, of which only the keys before the query (or before the last) count

    With biases, q, k and v have them added, and b_O is added to the sum of the results.

    Position 0 has no key where the mask is causal: its pattern row, and with it its output, is zero.
    """

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._add_query_and_key()
        self.W_V = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head, cfg.d_model))
        if cfg.biases:
            self.b_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
            self.b_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
            self.b_V = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
            self.b_O = nn.Parameter(torch.zeros(cfg.d_model))
        self.hook_q_input = HookPoint()  # [batch, pos, head, d_model]
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_attn_scores = HookPoint()  # [batch, head, query, key], -inf where masked
        self.hook_pattern = HookPoint()  # [batch, head, query, key]
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]
        self.hook_result = HookPoint()  # [batch, pos, head, d_model]

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the heads add to the residual stream."""
        q = self.hook_q(self._project(resid, "Q", self.hook_q_input))
        k = self.hook_k(self._project(resid, "K", self.hook_k_input))
        v = self.hook_v(self._project(resid, "V", self.hook_v_input))

        scores = self.cfg.scale * einsum(
            q, k, "batch query head d_head, batch key head d_head -> batch head query key"
        )
        # A context longer than any seen before is masked as strictly: there is no stored mask.
        reads = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        if self.cfg.context_only:
            reads[:, -1] = False
        else:
            reads = reads.tril(0 if self.cfg.attend_to_self else -1)
        scores = self.hook_attn_scores(scores.masked_fill(~reads, -torch.inf))
        pattern = self.hook_pattern(
            attention_pattern(scores, score=self.cfg.score, slope=self.cfg.score_slope)
        )
        z = self.hook_z(
            einsum(
                pattern, v, "batch head query key, batch key head d_head -> batch query head d_head"
            )
        )

        W_O = self._output_weights()
        if self.cfg.use_attn_result:
            result = einsum(
                z, W_O, "batch pos head d_head, head d_head d_model -> batch pos head d_model"
            )
            out = self.hook_result(result).sum(dim=2)
        else:
            out = einsum(z, W_O, "batch pos head d_head, head d_head d_model -> batch pos d_model")
        return out + self.b_O if self.cfg.biases else out

    def _add_query_and_key(self) -> None:
        cfg = self.cfg
        self.W_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_model, cfg.d_head))

    def _project(self, resid: Tensor, which: str, hook_input: HookPoint) -> Tensor:
        weights = getattr(self, f"W_{which}")
        if self.cfg.use_split_qkv_input:
            # A copy per head, so that a hook may edit the input of one head in place.
            split = hook_input(resid[:, :, None].repeat(1, 1, self.cfg.n_heads, 1))
            equation = "batch pos head d_model, head d_model d_head -> batch pos head d_head"
            projected = einsum(split, weights, equation)
        else:
            equation = "batch pos d_model, head d_model d_head -> batch pos head d_head"
            projected = einsum(resid, weights, equation)
        return projected + getattr(self, f"b_{which}") if self.cfg.biases else projected

    def _output_weights(self) -> Tensor:
        """W_O; in a one-layer model of which only y is read, its x columns take no gradient."""
        if self.cfg.n_layers > 1 or self.cfg.width is not None:
            return self.W_O
        x_columns, y_columns = self.W_O.split([self.cfg.d_x, self.cfg.d_y], dim=-1)
        return torch.cat([x_columns.detach(), y_columns], dim=-1)


class MergedAttention(Attention):
    """Attention heads with one matrix each in place of W_Q W_K^T: W_Q is W_QK, and the keys are the input itself.

    s_h = scale (x W_QK,h) x^T,   W_QK: [head, d_model, d_model]
    """

    def _add_query_and_key(self) -> None:
        cfg = self.cfg
        self.W_QK = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_model, cfg.d_model))

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_model"]:  # type: ignore[override]
        return self.W_QK

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_model"]:  # type: ignore[override]
        """The identity, made anew: writing into it changes nothing."""
        return identity_keys(self.W_QK)

    def _project(self, resid: Tensor, which: str, hook_input: HookPoint) -> Tensor:
        if which != "K":
            return super()._project(resid, which, hook_input)
        keys = resid[:, :, None].repeat(1, 1, self.cfg.n_heads, 1)
        if self.cfg.use_split_qkv_input:
            # A copy, so that a hook on the keys may edit them in place and leave the input alone.
            keys = hook_input(keys).clone()
        return keys + self.b_K if self.cfg.biases else keys


class Block(nn.Module):
    """An attention layer that adds to the residual stream, and on request hooks of an MLP that adds zeros.

    Tools that walk through attention and MLP alike (attribution patching) then find what they ask for.
    """

    hook_out_is_single_residual_stream = True

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.attn = MergedAttention(cfg) if cfg.merged_qk else Attention(cfg)
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_mlp_in = HookPoint()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        resid_pre = self.hook_resid_pre(resid)
        attn_out = self.hook_attn_out(self.attn(resid_pre))
        resid = resid_pre + attn_out
        if self.cfg.use_zero_mlp:
            resid = self.hook_resid_mid(resid)
            # A copy, so that a hook may edit what the MLP reads in place and leave the stream alone.
            mlp_in = self.hook_mlp_in(resid.clone()) if self.cfg.use_hook_mlp_in else resid
            resid = resid + self.hook_mlp_out(0.0 * mlp_in)
        return self.hook_resid_post(resid)


class Unembed(nn.Module):
    """The read-out: y entries of the residual stream, fixed and not in the state_dict, or weights of a width."""

    W_U: Float[Tensor, "d_model d_y"]
    b_U: Float[Tensor, " d_y"]  # noqa: N815

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        if cfg.width is None:
            W_U = torch.eye(cfg.d_model)[:, cfg.d_x :].clone()
            self.register_buffer("W_U", W_U, persistent=False)
        else:
            self.W_U = nn.Parameter(torch.zeros(cfg.width, cfg.d_y))
        self.register_buffer("b_U", torch.zeros(cfg.d_y), persistent=False)

    def forward(self, resid: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_y"]:
        return resid @ self.W_U + self.b_U
