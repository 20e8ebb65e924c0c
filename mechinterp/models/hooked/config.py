"""Settings of a hooked model, under the names by which TransformerLens reads them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from mechinterp.config import ModelConfig
from mechinterp.fields import Rules

# In this order, one after the other: hook_mlp_in may need the two before it, and hook_attn_in
# goes without the split inputs.
SWITCHES = (
    "use_attn_result",
    "use_attn_in",
    "use_split_qkv_input",
    "use_zero_mlp",
    "use_hook_mlp_in",
)


# A model is made in float32 on the processor, whatever torch's defaults are; `to` takes it elsewhere.
zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")


def _of_architecture(name: str) -> property:
    """A setting of the architecture, to be read under the same name here."""
    return property(lambda cfg: getattr(cfg.model, name))


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
    use_attn_in: bool = False
    """Whether `hook_attn_in` fires; not together with the split inputs."""
    use_zero_mlp: bool = False
    """Whether, without MLPs, `hook_resid_mid` and `hook_mlp_out` fire as of an MLP that adds zeros."""
    use_hook_mlp_in: bool = False
    """Whether `hook_mlp_in` fires too; without MLPs it needs `use_zero_mlp`."""
    device: str = field(init=False, default="cpu")
    """Device of the weights; follows them."""
    dtype: torch.dtype = field(init=False, default=torch.float32)
    """Dtype of the weights; follows them."""
    n_key_value_heads: None = field(init=False, default=None)
    n_layers = _of_architecture("n_layers")
    n_heads = _of_architecture("n_heads")
    d_mlp = _of_architecture("d_mlp")
    score = _of_architecture("score")
    score_slope = _of_architecture("score_slope")
    attend_to_self = _of_architecture("attend_to_self")
    context_only = _of_architecture("context_only")
    biases = _of_architecture("biases")
    merged_qk = _of_architecture("merged_qk")
    rotary_dim = _of_architecture("rotary_dim")
    rotary_base = _of_architecture("rotary_base")
    rotary_adjacent_pairs = _of_architecture("rotary_adjacent_pairs")

    def __post_init__(self) -> None:
        rules = Rules("", self)
        rules.at_least(1, "d_x", "d_y", "n_ctx")
        rule = f"must be d_model = {self.d_model} where merged_qk is true"
        rules.require("d_head", not self.merged_qk or self.d_head == self.d_model, rule)

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
        """Whether there are no MLPs."""
        return self.model.d_mlp is None

    @property
    def normalization_type(self) -> str | None:
        """ "LN" where there are layer norms, "RMS" for those of the root mean square."""
        if self.model.norm is None and not self.model.final_norm:
            return None
        return "RMS" if self.model.rms_norm else "LN"

    @property
    def positional_embedding_type(self) -> str | None:
        """ "rotary" or "standard", where the model knows positions."""
        if self.model.rotary_dim is not None:
            return "rotary"
        return None if self.model.n_positions is None else "standard"

    # The responses take the place of a vocabulary.
    d_vocab = d_vocab_out = property(lambda cfg: cfg.d_y)
    use_attn_scale = property(lambda cfg: True)

    @property
    def attn_scale(self) -> float:
        """What scores are divided by."""
        return 1 / self.scale

    @property
    def attention_dir(self) -> str:
        """ "bidirectional" where a token reads the context on both sides of it."""
        return "bidirectional" if self.context_only else "causal"

    @property
    def act_fn(self) -> str | None:
        """Activation of the MLPs, if there are any."""
        return None if self.attn_only else self.model.activation

    @property
    def n_params(self) -> int:
        """Number of weights of heads and MLPs, without biases, norms, read-in and read-out."""
        query_and_key = self.d_model**2 if self.merged_qk else 2 * self.d_model * self.d_head
        per_layer = self.n_heads * (query_and_key + 2 * self.d_model * self.d_head)
        return self.n_layers * (per_layer + 2 * self.d_model * (self.d_mlp or 0))

    def switch_of(self, hook: str) -> str | None:
        """The switch that is to be turned on before a hook point fires; None if it fires."""
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
        """All settings by name: those that decide the others first, then the names TransformerLens reads."""
        derived = [n for n, value in vars(type(self)).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "HookedConfig":
        """The settings that `to_dict` gives; names of what follows from others are passed over.

        Raises:
            ValueError: If the architecture or a size is missing.
        """
        given = ("d_x", "d_y", "scale", "n_ctx")
        missing = [name for name in ("model", *given) if name not in settings]
        if missing:
            raise ValueError(
                f"settings must have {', '.join(('model', *given))}, got none of {', '.join(missing)}."
            )
        switches = {n: settings[n] for n in SWITCHES if n in settings}
        model = ModelConfig(**settings["model"])
        config = cls(model, **{name: settings[name] for name in given}, **switches)
        config.device = settings.get("device", config.device)
        config.dtype = settings.get("dtype", config.dtype)
        return config
