"""Attention heads of a hooked model, with HookedTransformer's names, shapes and hook points."""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.config import HookedConfig, zeros
from mechinterp.models.layers import attention_pattern, readable_keys, turned_by_position
from mechinterp.models.weights import identity_keys


class Attention(nn.Module):
    """Attention heads; `readable_keys` decides which keys a position reads.

    Weights and biases start at zero.

    result_h = z_h W_O,h,   z_h = p_h (x W_V,h),   p_h = f(s_h) / sum f(s_h),
    s_h = scale (x W_Q,h) (x W_K,h)^T,   summed over the readable keys only

    With rotary positions, q and k are rotated by their positions before the product. With biases, b_Q, b_K and b_V
    are added to q, k and v, and b_O to the sum of the results.

    Under a causal mask position 0 has no key: its pattern row and its output are zero.
    """

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self._add_weights()
        self._add_hooks()

    def _add_hooks(self) -> None:
        self.hook_attn_in = HookPoint()  # [batch, pos, head, d_model]
        self.hook_q_input = HookPoint()
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        if self.cfg.model.rotary_dim is not None:
            # Queries and keys rotated by their positions, [batch, pos, head, d_head].
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores = HookPoint()  # [batch, head, query, key], -inf where masked
        self.hook_pattern = HookPoint()  # [batch, head, query, key]
        self.hook_z = HookPoint()  # [batch, pos, head, d_head]
        self.hook_result = HookPoint()  # [batch, pos, head, d_model]

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"], norm: nn.Module | None = None
    ) -> Float[Tensor, "batch pos d_model"]:
        """Sum of the heads' outputs. If a norm is given, the heads read the residual stream through it."""
        q, k, v, _ = self._projections(resid, norm)
        products = "batch query head d_head, batch key head d_head -> batch head query key"
        scores = self.cfg.scale * einsum(q, k, products)
        # No stored mask: a context longer than any in training is masked in the same way.
        reads = readable_keys(scores.shape[-1], self.cfg.model, device=scores.device)
        scores = self.hook_attn_scores(scores.masked_fill(~reads, -torch.inf))
        pattern = attention_pattern(
            scores, score=self.cfg.model.score, slope=self.cfg.model.score_slope
        )
        pattern = self.hook_pattern(pattern)
        averages = "batch head query key, batch key head d_head -> batch query head d_head"
        return self._write(self.hook_z(einsum(pattern, v, averages)))

    def _projections(
        self, resid: Float[Tensor, "batch pos d_model"], norm: nn.Module | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys, rotated if they are, values, and what the keys read."""
        for_q, for_k, for_v = self._inputs(resid, nn.Identity() if norm is None else norm)
        q = self.hook_q(self._project(for_q, "Q"))
        k = self.hook_k(self._project(for_k, "K"))
        v = self.hook_v(self._project(for_v, "V"))
        if self.cfg.model.rotary_dim is not None:
            q = self.hook_rot_q(turned_by_position(q, self.cfg.model))
            k = self.hook_rot_k(turned_by_position(k, self.cfg.model))
        return q, k, v, for_k

    def _write(self, z: Float[Tensor, "batch pos head d_head"]) -> Tensor:
        """Sum of the heads' outputs for their weighted averages."""
        W_O = self._output_weights()
        if self.cfg.use_attn_result:
            per_head = "batch pos head d_head, head d_head d_model -> batch pos head d_model"
            out = self.hook_result(einsum(z, W_O, per_head)).sum(dim=2)
        else:
            out = einsum(z, W_O, "batch pos head d_head, head d_head d_model -> batch pos d_model")
        return out + self.b_O if self.cfg.model.biases else out

    def _add_weights(self) -> None:
        cfg = self.cfg
        self._add_query_and_key()
        self.W_V = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(zeros(cfg.n_heads, cfg.d_head, cfg.d_model))
        if cfg.model.biases:
            self.b_Q = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_K = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_V = nn.Parameter(zeros(cfg.n_heads, cfg.d_head))
            self.b_O = nn.Parameter(zeros(cfg.d_model))

    def _add_query_and_key(self) -> None:
        cfg = self.cfg
        self.W_Q = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(zeros(cfg.n_heads, cfg.d_model, cfg.d_head))

    def _inputs(self, resid: Tensor, norm: nn.Module) -> list[Tensor]:
        """Inputs of queries, keys and values: the normed stream, with one copy per head if the config asks for copies.

        The stream is copied before the norm, so that a hook's change to a copy is normed, too.
        """
        forks = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
        if self.cfg.use_split_qkv_input:
            return [norm(fork(self._per_head(resid))) for fork in forks]
        if self.cfg.use_attn_in:
            return [norm(self.hook_attn_in(self._per_head(resid)))] * 3
        return [norm(resid)] * 3

    def _per_head(self, read: Tensor) -> Float[Tensor, "batch pos head d_model"]:
        """One copy of the input per head, so that a hook may edit the input of one head in place."""
        return read[:, :, None].repeat(1, 1, self.cfg.n_heads, 1)

    def _project(self, read: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        axes = "batch pos head d_model" if read.ndim == 4 else "batch pos d_model"
        equation = f"{axes}, head d_model d_head -> batch pos head d_head"
        projected = einsum(read, getattr(self, f"W_{which}"), equation)
        return projected + getattr(self, f"b_{which}") if self.cfg.model.biases else projected

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T, [head, d_model, d_model]. As in TransformerLens, without the scale."""
        return FactoredMatrix(self.W_Q, self.W_K.mT)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O, [head, d_model, d_model]."""
        return FactoredMatrix(self.W_V, self.W_O)

    def _output_weights(self) -> Tensor:
        """W_O. In a one-layer model only y is read, so the x columns get no gradient."""
        if not self.cfg.model.reads_y_alone:
            return self.W_O
        x_columns, y_columns = self.W_O.split([self.cfg.d_x, self.cfg.d_y], dim=-1)
        return torch.cat([x_columns.detach(), y_columns], dim=-1)


class MergedAttention(Attention):
    """Attention heads with one matrix W_QK in place of W_Q W_K^T: W_Q returns W_QK, and the keys are the input itself.

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
        """Identity matrix, a new tensor at each access: writing into it has no effect."""
        return identity_keys(self.W_QK)

    def _project(self, read: Tensor, which: str) -> Float[Tensor, "batch pos head d_head"]:
        if which != "K":
            return super()._project(read, which)
        # A copy, so that a hook on the keys may edit them in place and leave the input alone.
        keys = read.clone() if read.ndim == 4 else self._per_head(read)
        return keys + self.b_K if self.cfg.model.biases else keys
