"""Names and shapes of a model's tensors, from its config alone.

HookedTransformer stores one tensor per layer, "blocks.0.attn.W_Q". Here one tensor "attn.W_Q" has all layers
along its first axis.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from mechinterp.config import ModelConfig

T = TypeVar("T")
NAMES = ("W_Q", "W_K", "W_V", "W_O")
BIASES = ("b_Q", "b_K", "b_V", "b_O")
LAYERED = ("attn.", "mlp.", "ln1.", "ln2.")
"""Prefixes of the names of tensors that every layer has."""


def tensor_shapes(model: ModelConfig, d_x: int, d_y: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by HookedTransformer's names.

    Example:
        >>> tensor_shapes(ModelConfig(n_heads=2), 5, 1)["blocks.0.attn.W_O"]
        (2, 6, 6)
    """
    shapes = stacked_shapes(model, d_x, d_y)
    return of_each_layer(shapes, model.n_layers, lambda shape, layer: shape[1:])


def of_each_layer(
    stacked: Mapping[str, T], n_layers: int, part: Callable[[T, int], T]
) -> dict[str, T]:
    """Values by HookedTransformer's names: `part` extracts a layer's part from each stacked value."""
    return {
        f"blocks.{layer}.{name}": part(whole, layer)
        for layer in range(n_layers)
        for name, whole in stacked.items()
        if name.startswith(LAYERED)
    } | {name: whole for name, whole in stacked.items() if not name.startswith(LAYERED)}


def stacked_shapes(model: ModelConfig, d_x: int, d_y: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model, by name, with layers stacked along the first axis.

    Example:
        >>> stacked_shapes(ModelConfig(n_layers=3, n_heads=2, context_only=True), 5, 1)["attn.W_O"]
        (3, 2, 3, 6)
    """
    width, d_head = model.stream_width(d_x, d_y), model.head_width(d_x, d_y)
    layer = _layer_shapes(model, width, d_head)
    shapes = {name: (model.n_layers, *shape) for name, shape in layer.items()}
    if model.final_norm:
        shapes |= {"ln_final.w": (width,), "ln_final.b": (width,)}
    if model.n_positions is not None:
        shapes["pos_embed.W_pos"] = (model.n_positions, width)
    if model.d_model is not None:
        d_token = model.d_token(d_x, d_y)
        shapes["W_in"] = (model.d_read_in or d_token, width)
        shapes["unembed.W_U"] = (width, d_y)
        if model.biases:
            shapes |= {"b_in": (width,), "unembed.b_U": (d_y,)}
        if model.d_read_in is not None:
            shapes["W_read"] = (d_token, model.d_read_in)
            if model.biases:
                shapes["b_read"] = (model.d_read_in,)
    return shapes


def _layer_shapes(model: ModelConfig, width: int, d_head: int) -> dict[str, tuple[int, ...]]:
    wide = (model.n_heads, width, d_head)
    names = ("W_QK", "W_V") if model.merged_qk else ("W_Q", "W_K", "W_V")
    shapes: dict[str, tuple[int, ...]] = {f"attn.{name}": wide for name in names}
    shapes["attn.W_O"] = (model.n_heads, d_head, width)
    if model.biases:
        shapes |= {f"attn.{name}": (model.n_heads, d_head) for name in BIASES[:3]}
        shapes["attn.b_O"] = (width,)
    if model.d_mlp is not None:
        shapes |= {"mlp.W_in": (width, model.d_mlp), "mlp.W_out": (model.d_mlp, width)}
        if model.biases:
            shapes |= {"mlp.b_in": (model.d_mlp,), "mlp.b_out": (width,)}
    if model.norm is not None:
        norms = ("ln1",) if model.d_mlp is None else ("ln1", "ln2")
        shapes |= {f"{norm}.{name}": (width,) for norm in norms for name in ("w", "b")}
    return shapes
