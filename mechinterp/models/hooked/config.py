"""Settings of a hooked model, under the names that TransformerLens reads."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from mechinterp.config import ModelConfig
from mechinterp.fields import Rules

# The order in which switches are turned on: hook_mlp_in may need use_zero_mlp, and hook_attn_in excludes
# the split inputs.
SWITCHES = (
    "use_attn_result",
    "use_attn_in",
    "use_split_qkv_input",
    "use_zero_mlp",
    "use_hook_mlp_in",
)


# A new model is float32 on the CPU, whatever torch's defaults are; `to` moves it.
zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")


def _of_architecture(name: str) -> property:
    """Property that reads the setting of the same name from the architecture."""
    return property(lambda cfg: getattr(cfg.model, name))


@dataclass(eq=False)
class HookedConfig:
    """Architecture, its sizes, and the switches of optional hooks."""

    model: ModelConfig
    d_x: int
    d_y: int
    scale: float
    """Factor on the scores; the inverse of TransformerLens' `attn_scale`."""
    n_ctx: int
    """Number of positions that TransformerLens' tools may assume; the model itself has no limit."""
    use_attn_result: bool = False
    """True: `hook_result` fires."""
    use_split_qkv_input: bool = False
    """True: `hook_q_input`, `hook_k_input` and `hook_v_input` fire."""
    use_attn_in: bool = False
    """True: `hook_attn_in` fires. Excludes `use_split_qkv_input`."""
    use_zero_mlp: bool = False
    """True: a model without MLPs fires `hook_resid_mid` and `hook_mlp_out`, like a model whose MLPs add zeros."""
    use_hook_mlp_in: bool = False
    """True: `hook_mlp_in` fires. A model without MLPs also needs `use_zero_mlp`."""
    device: str = field(init=False, default="cpu")
    """Device of the weights, updated when they move."""
    dtype: torch.dtype = field(init=False, default=torch.float32)
    """Dtype of the weights, updated when it changes."""
    n_key_value_heads: None = field(init=False, default=None)
    n_layers = _of_architecture("n_layers")
    n_heads = _of_architecture("n_heads")
    d_mlp = _of_architecture("d_mlp")
    rotary_dim = _of_architecture("rotary_dim")
    rotary_base = _of_architecture("rotary_base")
    rotary_adjacent_pairs = _of_architecture("rotary_adjacent_pairs")

    def __post_init__(self) -> None:
        rules = Rules("", self)
        rules.at_least(1, "d_x", "d_y", "n_ctx")
        rule = f"must be d_model = {self.d_model} where merged_qk is true"
        rules.require("d_head", not self.model.merged_qk or self.d_head == self.d_model, rule)

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
    def attn_only(self) -> bool:
        """True if the model has no MLPs."""
        return self.model.d_mlp is None

    @property
    def normalization_type(self) -> str | None:
        """ "LN" if the model has layer norms, "RMS" for root-mean-square norms."""
        if self.model.norm is None and not self.model.final_norm:
            return None
        return "RMS" if self.model.rms_norm else "LN"

    @property
    def positional_embedding_type(self) -> str | None:
        """ "rotary" or "standard" positions; None if the model has no positions."""
        if self.model.rotary_dim is not None:
            return "rotary"
        return None if self.model.n_positions is None else "standard"

    # d_y takes the place of the vocabulary size.
    d_vocab = d_vocab_out = property(lambda cfg: cfg.d_y)
    use_attn_scale = property(lambda cfg: True)

    @property
    def attn_scale(self) -> float:
        """Divisor of the scores."""
        return 1 / self.scale

    @property
    def attention_dir(self) -> str:
        """ "bidirectional" if a token reads the context on both sides of it."""
        return "bidirectional" if self.model.context_only else "causal"

    @property
    def act_fn(self) -> str | None:
        """Activation of the MLPs; None without MLPs."""
        return None if self.attn_only else self.model.activation

    @property
    def n_params(self) -> int:
        """Number of weights of heads and MLPs; biases, norms, read-in and read-out are not counted."""
        query_and_key = self.d_model**2 if self.model.merged_qk else 2 * self.d_model * self.d_head
        per_layer = self.n_heads * (query_and_key + 2 * self.d_model * self.d_head)
        return self.n_layers * (per_layer + 2 * self.d_model * (self.d_mlp or 0))

    def switch_of(self, hook: str) -> str | None:
        """Switch that must be turned on for this hook point to fire; None if it fires already."""
        name = hook.split(".")[-1]
        if name == "hook_mlp_in" and not self.use_hook_mlp_in:
            return "use_hook_mlp_in"
        if name in ("hook_resid_mid", "hook_mlp_in", "hook_mlp_out"):
            return "use_zero_mlp" if self.attn_only and not self.use_zero_mlp else None
        switches = {"hook_result": "use_attn_result", "hook_attn_in": "use_attn_in"}
        switches |= {f"hook_{x}_input": "use_split_qkv_input" for x in "qkv"}
        switch = switches.get(name)
        return None if switch is None or getattr(self, switch) else switch

    def to_dict(self) -> dict[str, Any]:
        """All settings by name: first the fields, then the derived values that TransformerLens reads."""
        derived = [n for n, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}
