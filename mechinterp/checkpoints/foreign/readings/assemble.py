"""Models from the parts of a file, combined as a reading states."""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.foreign.tensors.names import Tensors
from mechinterp.checkpoints.foreign.tensors.parts import Parts
from mechinterp.config import ModelConfig
from mechinterp.fields import build
from mechinterp.models.weights import Weights

Tried = Mapping[str, str | float | bool | None]
"""Choices of a reading, by the name of the argument of `load`."""
_OF_TOKEN, _OF_ATTENTION, _OF_MLP = range(3)
"""Parts of the stream, side by side if outputs are not added to it."""
IN_STREAM = {
    **{f"attn.W_{x}": (1, _OF_TOKEN) for x in "QKV"},
    **{"attn.W_O": (2, _OF_ATTENTION), "attn.b_O": (0, _OF_ATTENTION)},
    **{"mlp.W_in": (0, _OF_ATTENTION), "mlp.W_out": (1, _OF_MLP), "mlp.b_out": (0, _OF_MLP)},
    **{"pos_embed.W_pos": (1, _OF_TOKEN), "W_in": (1, _OF_TOKEN), "b_in": (0, _OF_TOKEN)},
}
"""Axis of a tensor that has the stream's width, and the part of the stream that it reads or writes.
"""
N_POSITIONS = 512
"""Rows of a table of sinusoidal positions; prompts of more tokens are not possible."""
JOINED = (
    *("norm", "activation", "layout", "attend_to_self", "norm_eps", "rms_norm"),
    *("score", "score_slope"),
)
"""Choices that are fields of ModelConfig."""
Columns = tuple[list[int], list[int]]
"""Columns of the token that are x and y, and columns of the layers' output that are the prediction.
"""


def columns(parts: Parts, chosen: Tried, sizes: tuple[int, int]) -> Columns:
    """Columns that are read and that are the prediction, under one reading."""
    d_x, d_y = sizes
    if chosen.get("layout") == "in_turn":
        inputs = list(range(d_x))
    elif chosen["columns"] == "y,x":
        inputs = [*range(d_y, d_y + d_x), *range(d_y)]
    else:
        inputs = list(range(d_x + d_y))
    start, column = inputs[-1] - d_y + 1, chosen.get("output_column")
    if isinstance(column, int):
        start = column
    elif parts.written < parts.width:  # an output narrower than a token ends with the prediction
        start = parts.written - d_y
    return inputs, list(range(start, start + d_y))


def assembled(parts: Parts, chosen: Tried, sizes: tuple[int, int], model: ModelConfig) -> Weights:
    """Model of one reading, with weights rescaled so that scores have the factor 1/sqrt(d_head).

    Args:
        sizes: d_x and d_y.
        model: The `architecture` of the reading.
    Raises:
        ValueError: If the weights are not finite under the scale.
    """
    parts = parts.normed(chosen)
    at = columns(parts, chosen, sizes)
    sign = -1 if chosen["sign"] == "minus" else 1
    d_head, alone = model.head_width(*sizes), model.one_attention
    named: dict[str, Tensor] = {}
    for number, layer in enumerate(parts.layers * _passes(chosen)):
        heads = _heads(parts, layer, chosen.get("scale"), d_head, at[1])
        if alone:
            inside = _one_layer(heads, model, at, sizes[0], sign)
        else:
            inside = _joined(layer, heads, model)
        named |= {f"blocks.{number}.{name}": tensor for name, tensor in inside.items()}
    if model.final_norm:
        named |= {name: parts.ends[name] for name in ("ln_final.w", "ln_final.b")}
    if model.n_positions is not None:
        table = _table(model.n_positions, parts.width, chosen)
        named["pos_embed.W_pos"] = parts.ends.get("pos_embed.W_pos", table)
    if model.d_model is not None:
        named |= _ways(parts, model, at, sign)
    if model.d_model == 3 * parts.width:
        places = IN_STREAM | {"unembed.W_U": (0, _OF_ATTENTION if model.d_mlp is None else _OF_MLP)}
        for name, tensor in named.items():
            if (place := places.get(re.sub(r"^blocks\.\d+\.", "", name))) is not None:
                named[name] = _placed(tensor, *place, parts.width)
    dtype = parts.layers[0]["attn.W_Q"].dtype
    kept = [name for name in named if model.biases or ".b_" not in f".{name}"]
    tensors = {name: named[name].to(dtype).contiguous().clone() for name in kept}
    return Weights.of_names(model, *sizes, tensors)


def _placed(tensor: Tensor, axis: int, part: int, width: int) -> Tensor:
    """A tensor whose axis of the stream lies in one of three parts of this width; zeros elsewhere."""
    behind = (3 - part) * width - tensor.shape[axis]
    return pad(tensor, [0, 0] * (tensor.ndim - 1 - axis) + [part * width, behind])


def architecture(parts: Parts, chosen: Tried, sizes: tuple[int, int]) -> ModelConfig:
    """The architecture of one reading.

    Raises:
        ValueError: If there is no such architecture.
    """
    parts = parts.normed(chosen)
    d_token, width = sum(sizes), parts.width
    inputs, outputs = columns(parts, chosen, sizes)
    if chosen.get("norm") is not None and chosen.get("residual") is False:
        raise ValueError("norms need a residual connection: state residual=true, or no norm.")
    bare = "attn.W_O" not in parts.layers[0]
    wide = [layer["attn.W_Q"] for layer in parts.layers]
    wide += [] if bare else [layer["attn.W_V"] for layer in parts.layers]
    widths = [sizes[1] if bare else 0, *(t.shape[1] // parts.n_heads for t in wide)]
    d_head = len(inputs) if parts.merged else max(widths)
    fields: dict[str, object] = {
        **{name: chosen[name] for name in JOINED if name in chosen},
        "context_only": chosen.get("context_keys", False),
        "n_layers": len(parts.layers) * _passes(chosen),
        "n_heads": parts.n_heads,
        "d_head": None if parts.alone and d_head == d_token else d_head,
        "biases": parts.biases,
    }
    rotary = chosen["positions"] == "rotary"
    if rotary:
        turning = parts.d_head
        if turning % 2:
            raise ValueError(f"rotary positions need heads of even width, got {turning}.")
        fields |= {"rotary_dim": turning, "rotary_base": float(chosen["rotary_base"] or 1)}
        fields["rotary_adjacent_pairs"] = chosen["rotary_adjacent_pairs"]
    if parts.alone and not rotary:
        fields["merged_qk"] = parts.merged
        return build(ModelConfig, fields, "model.")
    own = inputs == list(range(width)) and outputs == list(range(sizes[0], d_token))
    # The query's y entries are 0, so that one layer alone predicts the same with a residual.
    same = own and parts.written == width
    apart = chosen.get("residual") is False or (parts.alone and not same)
    around = parts.ends.keys() & {"W_in", "unembed.W_U"}
    if around or apart or chosen["sign"] == "minus" or not own:
        fields["d_model"] = 3 * width if apart else width
    fields["final_norm"] = parts.has("ln_final.w")
    if parts.has("mlp.W_in"):
        fields["d_mlp"] = max(layer["mlp.W_in"].shape[1] for layer in parts.layers)
    if parts.has("W_read"):
        fields["d_read_in"] = parts.ends["W_read"].shape[1]
    if parts.has("pos_embed.W_pos"):
        fields["n_positions"] = len(parts.ends["pos_embed.W_pos"])
    elif str(chosen["positions"]).startswith("sinusoidal"):
        fields["n_positions"] = N_POSITIONS
    return build(ModelConfig, fields, "model.")


def _passes(chosen: Tried) -> int:
    """Number of runs through the layers."""
    return int(chosen.get("passes") or 1)


def _heads(
    parts: Parts, layer: Tensors, scale: object, d_head: int, outputs: Sequence[int]
) -> dict[str, Tensor]:
    """W_Q, W_K, W_V, W_O and biases of a layer, padded to one width of heads, with scores of the
    factor 1/sqrt(d_head)."""
    n_heads = parts.n_heads
    heads: dict[str, Tensor] = {}
    for x in "QKV":
        heads[f"W_{x}"] = layer[f"attn.W_{x}"].unflatten(1, (n_heads, -1)).transpose(0, 1)
        heads[f"b_{x}"] = layer[f"attn.b_{x}"].unflatten(0, (n_heads, -1))
    if "attn.W_O" in layer:
        heads["W_O"] = layer["attn.W_O"].unflatten(0, (n_heads, -1))
        heads["b_O"] = layer["attn.b_O"]
    else:  # values are the output
        written = heads["W_V"].shape[2]
        heads |= {n: heads[n][..., list(outputs)] for n in ("W_V", "b_V")}
        rows = torch.eye(written).to(heads["W_V"])[list(outputs)]
        heads["W_O"], heads["b_O"] = rows.expand(n_heads, -1, -1), rows.new_zeros(written)
    factor = (heads["W_Q"].shape[2] ** -0.5 if scale is None else scale) * d_head**0.5
    for name in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
        heads[name] = pad(heads[name], (0, d_head - heads[name].shape[-1]))
    heads["W_O"] = pad(heads["W_O"], (0, 0, 0, d_head - heads["W_O"].shape[1]))
    if not math.isclose(factor, 1, rel_tol=1e-6):
        for name in ("W_Q", "b_Q"):
            heads[name] = heads[name] * factor
            if not torch.isfinite(heads[name]).all():
                given = factor * d_head**-0.5
                raise ValueError(f"{name} must stay finite under the scale, got {given:.4g}.")
    return heads


def _one_layer(
    heads: Tensors, model: ModelConfig, at: Columns, d_x: int, sign: int
) -> dict[str, Tensor]:
    """Weights of one layer of attention on tokens (x, y), whose output counts only in the y
    entries."""
    inputs, outputs = at
    tensors = {f"attn.W_{x}": heads[f"W_{x}"][:, inputs] for x in "QKV"}
    tensors["attn.W_O"] = pad(sign * heads["W_O"][..., outputs], (d_x, 0))
    if model.merged_qk:
        tensors["attn.W_QK"] = tensors.pop("attn.W_Q")[..., inputs]
        del tensors["attn.W_K"]
    tensors |= {f"attn.b_{x}": heads[f"b_{x}"] for x in "QKV"}
    return tensors | {"attn.b_O": pad(sign * heads["b_O"][outputs], (d_x, 0))}


def _joined(layer: Tensors, heads: Tensors, model: ModelConfig) -> dict[str, Tensor]:
    """Weights of one layer of several, or of a layer with norms, an MLP or a read-in."""
    tensors = {f"attn.{name}": tensor for name, tensor in heads.items()}
    tensors |= {name: tensor for name, tensor in layer.items() if name.startswith("ln")}
    if model.d_mlp is not None:
        W_in, W_out = layer["mlp.W_in"], layer["mlp.W_out"]
        more = model.d_mlp - W_in.shape[1]
        tensors |= {"mlp.W_in": pad(W_in, (0, more)), "mlp.W_out": pad(W_out, (0, 0, 0, more))}
        b_in, b_out = pad(layer["mlp.b_in"], (0, more)), layer["mlp.b_out"]
        tensors |= {"mlp.b_in": b_in, "mlp.b_out": b_out}
    return tensors


def _ways(parts: Parts, model: ModelConfig, at: Columns, sign: int) -> dict[str, Tensor]:
    """Read-in and read-out; if the file has none, selections of the columns of x and y and of the
    prediction."""
    (inputs, outputs), width, ends = at, parts.width, parts.ends
    query = parts.layers[0]["attn.W_Q"]
    read_in = ends.get("W_in", torch.eye(width).to(query))
    first = ends.get("W_read", read_in)[inputs]
    read_out = ends.get("unembed.W_U", torch.eye(parts.written).to(query)[:, outputs])
    b_in = ends.get("b_in", query.new_zeros(width))
    b_U = ends.get("unembed.b_U", query.new_zeros(read_out.shape[1]))
    tensors = {
        "W_in": read_in if model.d_read_in else first,
        "b_in": b_in,
        "unembed.W_U": sign * read_out,
        "unembed.b_U": sign * b_U,
    }
    read = {"W_read": first, "b_read": ends.get("b_read", b_in)}
    return tensors | read if model.d_read_in is not None else tensors


def _table(n_positions: int, width: int, chosen: Tried) -> Tensor:
    """Table of sinusoidal positions [pos, width]: sines and cosines alternate, or all sines come first.

    Row t has the sines and cosines of t / 10000^(2i/width).

    Source:
        Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    at = torch.arange(n_positions, device="cpu")[:, None]
    angle = at * 1e4 ** (-torch.arange(0, width, 2, device="cpu") / width)
    if chosen["positions"] == "sinusoidal_halves":
        return torch.cat([angle.sin(), angle.cos()], -1)[:, :width]
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
