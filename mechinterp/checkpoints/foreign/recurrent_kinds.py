"""Classes of recurrent layers of transformers and flash-linear-attention: the tensors that show them, and the settings that
tensors do not show."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mechinterp.checkpoints.foreign.tensors.names import shown
from mechinterp.checkpoints.foreign.tensors.refusals import HOOK
from mechinterp.models.hooked.delta_layers import DeltaNames

BY_CHANNEL = "gk_proj.1"
"""Second map of a projection of low rank to gates, one for each coordinate of the keys."""


@dataclass(frozen=True)
class LayerKind:
    """Class of layers: the tensors that show it, and what they do not show."""

    name: str
    projections: frozenset[str]
    """Parts that its projections compute, the keys of `DeltaNames.projections`."""
    mark: str
    """Module or tensor that it has besides; "" for none."""
    key_heads: str = ""
    """Setting with the number of heads of keys; "" if there are as many as heads of values."""
    doubled: tuple[str, bool] = ("allow_neg_eigval", False)
    """Setting that doubles strengths, and its default."""
    eps: tuple[str, float] = ("norm_eps", 1e-5)
    """Setting with the number that the norm adds to mean squares, and its default."""
    gate: str = "g_proj"
    """Projection to the gate of the norm; "" if it is z in `in_proj_qkvz`."""
    plain: bool = False
    """True: queries and keys are not normed, and nothing is activated without a convolution."""
    required: Mapping[str, object] = field(default_factory=dict)
    """Mapping[str, object] that must have this value, which is also their default."""


_GATED = frozenset({"q", "k", "v", "b", "a"})
_ACTIVATED = {"hidden_act": "silu"}
LAYER_KINDS = (
    LayerKind(
        name="Qwen3NextGatedDeltaNet",
        projections=frozenset({"qkvz", "ba"}),
        mark="conv1d",
        key_heads="linear_num_key_heads",
        eps=("rms_norm_eps", 1e-6),
        gate="",
        required=_ACTIVATED,
    ),
    LayerKind(
        name="Qwen3_5GatedDeltaNet",
        projections=frozenset({"qkv", "b", "a"}),
        mark="conv1d",
        key_heads="linear_num_key_heads",
        eps=("rms_norm_eps", 1e-6),
        gate="in_proj_z",
        required=_ACTIVATED,
    ),
    LayerKind(
        name="OlmoHybridGatedDeltaNet",
        projections=_GATED,
        mark="conv1d",
        key_heads="linear_num_key_heads",
        doubled=("linear_allow_neg_eigval", True),
        eps=("", 1e-5),
        required=_ACTIVATED,
    ),
    LayerKind(name="MesaNet", projections=_GATED, mark="lambda_params"),
    LayerKind(name="GatedDeltaNet", projections=_GATED, mark="A_log", key_heads="num_heads"),
    LayerKind(
        name="DeltaNet",
        projections=frozenset({"q", "k", "v", "b"}),
        mark="",
        required={"qk_norm": "l2", "qk_activation": "silu"},
    ),
    LayerKind(
        name="GatedLinearAttention",
        projections=frozenset({"q", "k", "v", "gk"}),
        mark=BY_CHANNEL,
        plain=True,
        required={"feature_map": None, "gate_fn": "swish", "clamp_min": None},
    ),
    LayerKind(
        name="SimpleGatedLinearAttention",
        projections=frozenset({"q", "k", "v", "gk"}),
        mark="",
        plain=True,
        required={"feature_map": None, "gate_fn": "swish"},
    ),
)
"""Classes that are read, the first that fits; defaults are those of the classes."""
_BESIDE = ("conv1d", "q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "lambda_params")
"""Convolutions and parameters of layers, beside their projections and norms."""


def layer_kind_of(names: DeltaNames, within: set[str], config: Mapping[str, object]) -> LayerKind:
    """Class of a layer with these projections and these modules and tensors.

    Raises:
        ValueError: If there is none, it has no such tensor, or a setting makes another layer.
    """
    made_of = names.projections.keys()
    for kind in LAYER_KINDS:
        if kind.projections == made_of and (not kind.mark or kind.mark in within):
            break
    else:
        listed, classes = ", ".join(sorted(within)), ", ".join(each.name for each in LAYER_KINDS)
        raise ValueError(f"a recurrent layer must be of {classes}; got {listed}.")
    known = {*names.projections.values(), names.output, names.norm, kind.gate, kind.mark, *_BESIDE}
    for name in sorted(within - known):
        raise ValueError(f"{shown(name)} is no part of a {kind.name}; {HOOK}.")
    for name, value in kind.required.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} must be {value} for {kind.name}, got {config[name]}; {HOOK}.")
    return kind


def positive_number(config: Mapping[str, object], name: str, default: float) -> float:
    """Number that the config states, or the default.

    Raises:
        ValueError: If it is not above 0.
    """
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a number > 0, got {value}.")
    return float(value)
