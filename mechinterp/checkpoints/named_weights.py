"""The parts of layers with known names, joined in one of the ways that a reading says."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mechinterp.checkpoints.named_parts import Parts
from mechinterp.checkpoints.readings import Said
from mechinterp.config import ModelConfig

TOKEN, ATTENTION, MLP = range(3)


@dataclass(frozen=True)
class Stream:
    """The residual stream, or where nothing is added up three of them side by side: token, attention and MLP."""

    width: int
    apart: bool

    def placed(self, tensor: Tensor, axis: int, block: int) -> Tensor:
        """A tensor whose axis of the stream's width lies in one of the blocks."""
        if not self.apart:
            return tensor
        behind = (3 - block) * self.width - tensor.shape[axis]
        return pad(tensor, [0, 0] * (tensor.ndim - 1 - axis) + [block * self.width, behind])


def joined(
    parts: Parts,
    model: ModelConfig,
    sizes: tuple[int, int],
    *,
    positions: Tensor | None,
    said: Said,
) -> dict[str, Tensor]:
    """The tensors by their names in HookedTransformer.

    Args:
        sizes: d_x and d_y.
        said: Of the reading: whether anything is added up (residual), the order of a token's columns, the output's
            entry that is the prediction, and its sign.
    """
    dtype = torch.promote_types(torch.float32, parts.layers[0]["query.weight"].dtype)
    stream = Stream(parts.width, apart=not said["residual"])
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(parts.layers):
        inside = _layer(layer, model, stream, parts.n_heads)
        found |= {f"blocks.{number}.{name}": tensor for name, tensor in inside.items()}
    if model.final_norm:
        scale = parts.ends["final_norm.weight"]
        found["ln_final.w"] = scale
        found["ln_final.b"] = parts.ends.get("final_norm.bias", torch.zeros_like(scale))
    if positions is not None:
        found["pos_embed.W_pos"] = stream.placed(positions, 1, TOKEN)
    if model.d_model is not None:
        found |= _ways(parts, model, sizes, stream, said)
    return {name: tensor.to(dtype).contiguous().clone() for name, tensor in found.items()}


def _layer(
    layer: Mapping[str, Tensor], model: ModelConfig, stream: Stream, n_heads: int
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    inner, width = layer["out.weight"].shape
    for x, name in (("Q", "query"), ("K", "key"), ("V", "value")):
        heads = layer[f"{name}.weight"].unflatten(1, (n_heads, -1)).transpose(0, 1)
        found[f"attn.W_{x}"] = stream.placed(heads, 1, TOKEN)
        if model.biases:
            bias = layer.get(f"{name}.bias", torch.zeros(inner))
            found[f"attn.b_{x}"] = bias.unflatten(0, (n_heads, -1))
    W_O = layer["out.weight"].unflatten(0, (n_heads, -1))
    found["attn.W_O"] = stream.placed(W_O, 2, ATTENTION)
    if model.biases:
        found["attn.b_O"] = stream.placed(layer.get("out.bias", torch.zeros(width)), 0, ATTENTION)
    for name, here in (("norm1", "ln1"), ("norm2", "ln2")):
        if f"{name}.weight" in layer:
            scale = layer[f"{name}.weight"]
            found[f"{here}.w"] = scale
            found[f"{here}.b"] = layer.get(f"{name}.bias", torch.zeros_like(scale))
    if model.d_mlp is not None:
        found["mlp.W_in"] = stream.placed(layer["mlp_in.weight"], 0, ATTENTION)
        found["mlp.W_out"] = stream.placed(layer["mlp_out.weight"], 1, MLP)
        if model.biases:
            written = layer["mlp_out.weight"].shape[1]
            found["mlp.b_in"] = layer.get("mlp_in.bias", torch.zeros(model.d_mlp))
            out = layer.get("mlp_out.bias", torch.zeros(written))
            found["mlp.b_out"] = stream.placed(out, 0, MLP)
    return found


def _ways(
    parts: Parts, model: ModelConfig, sizes: tuple[int, int], stream: Stream, said: Said
) -> dict[str, Tensor]:
    """Read-in and read-out, of a file without them the entries of x and y, and that of y."""
    (d_x, d_y), width, ends = sizes, parts.width, parts.ends
    last = MLP if model.d_mlp is not None else ATTENTION
    written, y_first = parts.width_written, said["columns"] == "y,x"
    entry = said["output_column"]
    if entry is None:
        # Of an MLP that writes fewer entries than a token has, the last are the prediction.
        entry = written - d_y if written < width else 0 if y_first else d_x
    read_in = ends.get("read_in.weight", torch.eye(width)[: d_x + d_y])
    read_out = ends.get("read_out.weight", torch.eye(written)[:, int(entry) :][:, :d_y])
    sign = -1 if said["sign"] == "minus" else 1
    found = {"W_in": stream.placed(read_in, 1, TOKEN)}
    found["unembed.W_U"] = sign * stream.placed(read_out, 0, last)
    if model.d_read_in is not None:
        found["W_read"] = ends["read_mlp.weight"]
    if y_first:  # the rows of the matrix that a token meets first
        first = "W_in" if model.d_read_in is None else "W_read"
        found[first] = found[first].roll(-d_y, 0)
    if model.biases:
        found["b_in"] = stream.placed(ends.get("read_in.bias", torch.zeros(width)), 0, TOKEN)
        found["unembed.b_U"] = sign * ends.get("read_out.bias", torch.zeros(d_y))
        if model.d_read_in is not None:
            found["b_read"] = ends.get("read_mlp.bias", torch.zeros(model.d_read_in))
    return found
