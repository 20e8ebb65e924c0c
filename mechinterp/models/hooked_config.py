"""Settings of a hooked model, under the names by which TransformerLens reads them."""

from dataclasses import dataclass, field

import torch

from mechinterp.config import ModelConfig


@dataclass(eq=False)
class HookedConfig:
    """The architecture with its sizes filled in, and the switches of optional hooks."""

    model: ModelConfig
    d_x: int
    d_y: int
    scale: float
    """Factor on the scores; TransformerLens' `attn_scale` is its inverse."""
    n_ctx: int
    """Loose bound on the number of positions; some tools want fewer than that, the model does not."""
    use_attn_result: bool = False
    """Whether `hook_result` fires."""
    use_split_qkv_input: bool = False
    """Whether `hook_q_input`, `hook_k_input` and `hook_v_input` fire."""
    use_zero_mlp: bool = False
    """Whether, without MLPs, `hook_resid_mid` and `hook_mlp_out` fire as of an MLP that adds zeros."""
    use_hook_mlp_in: bool = False
    """Whether `hook_mlp_in` fires too; without MLPs it needs `use_zero_mlp`."""
    device: str = field(init=False, default="cpu")
    """Device of the weights; follows them."""
    dtype: torch.dtype = field(init=False, default=torch.float32)
    """Dtype of the weights; follows them."""
    n_key_value_heads: None = field(init=False, default=None)

    def __post_init__(self) -> None:
        for name in ("d_x", "d_y", "n_ctx"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.merged_qk and self.d_head != self.d_model:
            raise ValueError(
                f"d_head must be d_model = {self.d_model} where merged_qk is true, got {self.d_head}."
            )

    @property
    def n_layers(self) -> int:
        return self.model.n_layers

    @property
    def n_heads(self) -> int:
        return self.model.n_heads

    @property
    def d_token(self) -> int:
        """Width of a token."""
        return self.model.d_token(self.d_x, self.d_y)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.model.stream_width(self.d_x, self.d_y)

    @property
    def d_head(self) -> int:
        return self.model.head_width(self.d_x, self.d_y)

    @property
    def d_mlp(self) -> int | None:
        return self.model.d_mlp

    @property
    def score(self) -> str:
        return self.model.score

    @property
    def score_slope(self) -> float:
        return self.model.score_slope

    @property
    def attend_to_self(self) -> bool:
        return self.model.attend_to_self

    @property
    def context_only(self) -> bool:
        return self.model.context_only

    @property
    def biases(self) -> bool:
        return self.model.biases

    @property
    def merged_qk(self) -> bool:
        return self.model.merged_qk

    @property
    def attn_only(self) -> bool:
        """Whether there are no MLPs."""
        return self.model.d_mlp is None

    @property
    def normalization_type(self) -> str | None:
        """ "LN" where there are layer norms."""
        return "LN" if self.model.norm is not None or self.model.final_norm else None

    @property
    def d_vocab(self) -> int:
        """The responses take the place of a vocabulary."""
        return self.d_y

    @property
    def d_vocab_out(self) -> int:
        return self.d_y
