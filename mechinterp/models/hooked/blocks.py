"""Blocks of a hooked model: attention, layer norm, MLP, transformer block and read-out.

Names, shapes and hook points are those of HookedTransformer; post-norm blocks follow HookedEncoder.
"""

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens import FactoredMatrix
from transformer_lens.hook_points import HookPoint

from mechinterp.config.model import MLP_NORM
from mechinterp.models.hooked.config import HookedConfig, zeros
from mechinterp.models.layers import ACTIVATIONS, affine, attention_pattern, readable_keys, rotated
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
        self.hook_attn_in = HookPoint()  # [batch, pos, head, d_model]
        self.hook_q_input = HookPoint()
        self.hook_k_input = HookPoint()
        self.hook_v_input = HookPoint()
        self.hook_q = HookPoint()  # [batch, pos, head, d_head]
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        if cfg.model.rotary_dim is not None:
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
        for_q, for_k, for_v = self._inputs(resid, nn.Identity() if norm is None else norm)
        q = self.hook_q(self._project(for_q, "Q"))
        k = self.hook_k(self._project(for_k, "K"))
        v = self.hook_v(self._project(for_v, "V"))
        if self.cfg.model.rotary_dim is not None:
            q = self.hook_rot_q(rotated(q, self.cfg.model))
            k = self.hook_rot_k(rotated(k, self.cfg.model))

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
        if not self.cfg.model.one_attention:
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


class LayerNorm(nn.Module):
    """Layer norm over d_model: (x - mean) / sqrt(variance + eps) * w + b; a root-mean-square norm takes mean 0."""

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.eps, self.rms = cfg.model.norm_eps, cfg.model.rms_norm
        self.w = nn.Parameter(zeros(cfg.d_model) + 1)
        self.b = nn.Parameter(zeros(cfg.d_model))
        self.hook_scale = HookPoint()  # [batch, pos, 1]
        self.hook_normalized = HookPoint()  # [batch, pos, d_model]

    def forward(self, resid: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        centred = resid if self.rms else resid - resid.mean(-1, keepdim=True)
        scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
        return self.hook_normalized(centred / scale * self.w + self.b)


class MLP(nn.Module):
    """activation(x W_in + b_in) W_out + b_out; weights start at zero."""

    def __init__(self, cfg: HookedConfig, d_mlp: int) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.model.activation]
        self.W_in = nn.Parameter(zeros(cfg.d_model, d_mlp))
        self.W_out = nn.Parameter(zeros(d_mlp, cfg.d_model))
        self.b_in = nn.Parameter(zeros(d_mlp)) if cfg.model.biases else None
        self.b_out = nn.Parameter(zeros(cfg.d_model)) if cfg.model.biases else None
        self.hook_pre = HookPoint()  # [batch, pos, d_mlp]
        self.hook_post = HookPoint()  # [batch, pos, d_mlp]

    def forward(self, resid: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        pre = self.hook_pre(affine(resid, self.W_in, self.b_in))
        return affine(self.hook_post(self.activation(pre)), self.W_out, self.b_out)


class Block(nn.Module):
    """Transformer block: attention and an optional MLP, both added to the residual stream, with optional norms.

    With `use_zero_mlp` an attention-only block fires the hooks of an MLP that adds zeros. Tools that visit
    attention and MLP alike (attribution patching) need these hooks.
    """

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.attn = MergedAttention(cfg) if cfg.model.merged_qk else Attention(cfg)
        # HookedTransformer has these points in the block; here each keeps its name in the attention.
        self.hook_attn_in = self.attn.hook_attn_in
        self.hook_q_input, self.hook_k_input = self.attn.hook_q_input, self.attn.hook_k_input
        self.hook_v_input = self.attn.hook_v_input
        if cfg.model.norm not in (None, MLP_NORM):
            self.ln1 = LayerNorm(cfg)
        if cfg.d_mlp is not None:
            self.mlp = MLP(cfg, cfg.d_mlp)
            if cfg.model.norm is not None:
                self.ln2 = LayerNorm(cfg)
        self.hook_resid_pre = HookPoint()  # [batch, pos, d_model]
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.hook_mlp_in = HookPoint()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()
        if cfg.model.norm == "after":
            self.hook_normalized_resid_post = HookPoint()

    @property
    def hook_out_is_single_residual_stream(self) -> bool:
        """True if `hook_resid_post` is the plain sum of all earlier outputs; TransformerLens' tools read this flag."""
        return self.cfg.model.norm != "after"

    def forward(
        self, resid: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_model"]:
        """Residual stream after the layer."""
        before, after = self.cfg.model.norm == "before", self.cfg.model.norm == "after"
        resid = self.hook_resid_pre(resid)
        resid = resid + self.hook_attn_out(self.attn(resid, self.ln1 if before else None))
        if self.cfg.d_mlp is None and not self.cfg.use_zero_mlp:
            resid = self.hook_resid_post(resid)
            return self.hook_normalized_resid_post(self.ln1(resid)) if after else resid
        resid = self.hook_resid_mid(resid)
        resid = self.ln1(resid) if after else resid
        # The MLP reads a copy, so that a hook that edits its input in place does not change the stream.
        mlp_in = self.hook_mlp_in(resid.clone()) if self.cfg.use_hook_mlp_in else resid
        resid = self.hook_resid_post(resid + self.hook_mlp_out(self._mlp(mlp_in)))
        if not after:
            return resid
        return self.hook_normalized_resid_post(resid if self.cfg.d_mlp is None else self.ln2(resid))

    def _mlp(self, mlp_in: Tensor) -> Tensor:
        if self.cfg.d_mlp is None:
            return 0.0 * mlp_in
        normed = self.cfg.model.norm in ("before", MLP_NORM)
        return self.mlp(self.ln2(mlp_in) if normed else mlp_in)


class Unembed(nn.Module):
    """Read-out: a fixed selection of the y entries (not in the state_dict), or with `d_model` trained weights."""

    W_U: Float[Tensor, "d_model d_y"]
    b_U: Float[Tensor, " d_y"]  # noqa: N815

    def __init__(self, cfg: HookedConfig) -> None:
        super().__init__()
        if cfg.model.d_model is None:
            W_U = torch.eye(cfg.d_model, dtype=torch.float32, device="cpu")[:, cfg.d_x :].clone()
            self.register_buffer("W_U", W_U, persistent=False)
        else:
            self.W_U = nn.Parameter(zeros(cfg.d_model, cfg.d_y))
        if cfg.model.d_model is not None and cfg.model.biases:
            self.b_U = nn.Parameter(zeros(cfg.d_y))
        else:
            self.register_buffer("b_U", zeros(cfg.d_y), persistent=False)

    def forward(self, resid: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_y"]:
        return resid @ self.W_U + self.b_U

    def require_selection(self) -> None:
        """Refuse an edited read-out of a model without `d_model`, which must select the y entries.

        Raises:
            ValueError: If W_U or b_U was edited.
        """
        d_model, d_y = self.W_U.shape
        selection = torch.eye(d_model, dtype=self.W_U.dtype, device=self.W_U.device)[:, -d_y:]
        if not torch.equal(self.W_U, selection) or self.b_U.any():
            raise ValueError(
                "unembed.W_U must select the y entries and unembed.b_U be 0 in a model without d_model, got edited ones; "
                "scale W_O instead."
            )
