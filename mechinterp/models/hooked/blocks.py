"""Blocks of a hooked model: layer norm, MLP, transformer block and read-out.

Names, shapes and hook points are those of HookedTransformer; post-norm blocks follow HookedEncoder.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechinterp.config.model import MLP_NORM
from mechinterp.models.hooked.attention import Attention, MergedAttention
from mechinterp.models.hooked.config import HookedConfig, zeros
from mechinterp.models.hooked.recurrent import RecurrentAttention
from mechinterp.models.layers import ACTIVATION_FUNCTIONS, affine


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
        self.activation = ACTIVATION_FUNCTIONS[cfg.model.activation]
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
        self.attn = _attention(cfg)
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


def _attention(cfg: HookedConfig) -> Attention:
    """Heads of a layer, by the config's score."""
    if cfg.model.recurrent:
        return RecurrentAttention(cfg)
    return MergedAttention(cfg) if cfg.model.merged_qk else Attention(cfg)


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
