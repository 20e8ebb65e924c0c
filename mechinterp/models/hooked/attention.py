"""The attention of one layer with hook points.

Names, shapes and hook points are those of TransformerLens, so that its tools find what they look for. By
default what the query reads is the context, all of it and nothing else.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.hook_points import HookPoint

from mechinterp.models.heads import identity_keys
from mechinterp.models.hooked.config import HookedConfig, zeros
from mechinterp.models.layers import rotated
from mechinterp.models.scores import attention_pattern, readable_keys


class Attention(nn.Module):
    """Attention heads; which keys a position reads is said by `readable_keys`.

    Weights and biases start at zero.

    result_h = z_h W_O,h,   z_h = p_h (x W_V,h),   p_h = f(s_h) / sum f(s_h),
    s_h = scale (x W_Q,h) (x W_K,h)^T, of which only the keys before the query (or before the last) count

    With rotary positions, q and k are turned by their positions before the product.

    With biases, q, k and v have them added, and b_O is added to the sum of the results.

    Position 0 has no key where the mask is causal: its pattern row, and with it its output, is zero.
    """

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._add_query_and_key()
        self.W_V = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(zeros(cfg.n_heads, cfg.d_head, cfg.d_model))
        if cfg.biases:
            self.b_Q = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_K = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_V = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_O = nn.Parameter(zeros(cfg.d_model))
        self.hook_attn_in = HookPoint()  # [batch, pos, head, d_model]
        self.hook_q_input = HookPoint()
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        if cfg.model.rotary_dim is not None:
            self.hook_rot_q = (
                HookPoint()
            )  # [batch, pos, head, d_head], queries turned by their positions
            self.hook_rot_k = HookPoint()
        self.hook_attn_scores = HookPoint()  # [batch, head, query, key], -inf where masked
        self.hook_pattern = HookPoint()  # [batch, head, query, key]
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]
        self.hook_result = HookPoint()  # [batch, pos, head, d_model]

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], norm: nn.Module | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the heads add to the residual stream, which they read through a norm if one is given."""
        for_q, for_k, for_v = self._inputs(resid, nn.Identity() if norm is None else norm)
        q = self.hook_q(self._project(for_q, "Q"))
        k = self.hook_k(self._project(for_k, "K"))
        v = self.hook_v(self._project(for_v, "V"))
        if self.cfg.model.rotary_dim is not None:
            q = self.hook_rot_q(rotated(q, self.cfg.model))
            k = self.hook_rot_k(rotated(k, self.cfg.model))

        products = "batch query head d_head, batch key head d_head -> batch head query key"
        scores = self.cfg.scale * einsum(q, k, products)
        # A context longer than any seen before is masked as strictly: there is no stored mask.
        reads = readable_keys(scores.shape[-1], self.cfg.model, device=scores.device)
        scores = self.hook_attn_scores(scores.masked_fill(~reads, -torch.inf))
        pattern = attention_pattern(scores, score=self.cfg.score, slope=self.cfg.score_slope)
        pattern = self.hook_pattern(pattern)
        averages = "batch head query key, batch key head d_head -> batch query head d_head"
        z = self.hook_z(einsum(pattern, v, averages))

        W_O = self._output_weights()
        if self.cfg.use_attn_result:
            per_head = "batch pos head d_head, head d_head d_model -> batch pos head d_model"
            out = self.hook_result(einsum(z, W_O, per_head)).sum(dim=2)
        else:
            out = einsum(z, W_O, "batch pos head d_head, head d_head d_model -> batch pos d_model")
        return out + self.b_O if self.cfg.biases else out

    def _add_query_and_key(self) -> None:
        cfg = self.cfg
        self.W_Q = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))

    def _inputs(self, resid: Tensor, norm: nn.Module) -> list[Tensor]:
        """What queries, keys and values are made of: the stream through the norm, on request a copy for each head.

        The copies are of the stream itself, so that what is added to one is normed with it.
        """
        forks = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
        if self.cfg.use_split_qkv_input:
            return [norm(fork(self._per_head(resid))) for fork in forks]
        if self.cfg.use_attn_in:
            return [norm(self.hook_attn_in(self._per_head(resid)))] * 3
        return [norm(resid)] * 3

    def _per_head(self, read: Tensor) -> Float[Tensor, "batch pos head d_model"]:
        """A copy per head, so that a hook may edit the input of one head in place."""
        return read[:, :, None].repeat(1, 1, self.cfg.n_heads, 1)

    def _project(self, read: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        axes = "batch pos head d_model" if read.ndim == 4 else "batch pos d_model"
        equation = f"{axes}, head d_model d_head -> batch pos head d_head"
        projected = einsum(read, getattr(self, f"W_{which}"), equation)
        return projected + getattr(self, f"b_{which}") if self.cfg.biases else projected

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T, [head, d_model, d_model]. As in TransformerLens, without the scale."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O, [head, d_model, d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)

    def _output_weights(self) -> Tensor:
        """W_O; in a one-layer model of which only y is read, its x columns take no gradient."""
        if not self.cfg.model.one_attention:
            return self.W_O
        x_columns, y_columns = self.W_O.split([self.cfg.d_x, self.cfg.d_y], dim=-1)
        return torch.cat([x_columns.detach(), y_columns], dim=-1)


class MergedAttention(Attention):
    """Attention heads with one matrix each in place of W_Q W_K^T: W_Q is W_QK, and the keys are the input itself.

    s_h = scale (x W_QK,h) x^T,   W_QK: [head, d_model, d_model]
    """

    def _add_query_and_key(self) -> None:
        cfg = self.cfg
        self.W_QK = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_model))

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_model"]:  # type: ignore[override]
        return self.W_QK

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_model"]:  # type: ignore[override]
        """The identity, made anew: writing into it changes nothing."""
        return identity_keys(self.W_QK)

    def _project(self, read: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        if which != "K":
            return super()._project(read, which)
        # A copy, so that a hook on the keys may edit them in place and leave the input alone.
        keys = read.clone() if read.ndim == 4 else self._per_head(read)
        return keys + self.b_K if self.cfg.biases else keys
