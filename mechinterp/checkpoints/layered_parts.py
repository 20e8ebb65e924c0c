"""The tensors of a regression GPT-2 or of torch's encoder layers, by what they are."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from mechinterp.checkpoints.layered_tensors import ENCODER, GPT2, n_layers
from mechinterp.checkpoints.named_parts import Parts

PARTS = {
    GPT2: {"out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"},
    ENCODER: {"out": "self_attn.out_proj", "mlp_in": "linear1", "mlp_out": "linear2"},
}
NORMS = {GPT2: ("ln_1", "ln_2", "ln_f"), ENCODER: ("norm1", "norm2", "norm")}
QKV = {GPT2: "attn.c_attn.", ENCODER: "self_attn.in_proj_"}


def layered_parts(found: Mapping[str, Tensor], format: str, n_heads: int) -> Parts:
    """The parts of a state dict, in the widest dtype among them, at least float32.

    Args:
        found: GPT2Model's names or layers.{l}.self_attn..., a last norm, read_in and read_out where there are
            such; checked.
        format: "gpt2" or "torch-encoder".
    """
    dtype = reduce(torch.promote_types, (t.dtype for t in found.values()), torch.float32)
    found = {name: tensor.detach().to("cpu", dtype) for name, tensor in found.items()}
    norm1, norm2, final = NORMS[format]
    there = PARTS[format] | {"norm1": norm1, "norm2": norm2}
    layers = []
    for number in range(n_layers(found)):
        prefix = f"h.{number}." if format == GPT2 else f"layers.{number}."
        # GPT2Model's matrices multiply from the right; those of torch.nn.Linear are the transpose of what does.
        layer = _named(
            found, {name: prefix + part for name, part in there.items()}, format == ENCODER
        )
        for kind in ("weight", "bias"):
            qkv = found.get(f"{prefix}{QKV[format]}{kind}")
            if qkv is not None:
                rows = qkv.mT if qkv.ndim == 2 and format == ENCODER else qkv
                parts = zip(("query", "key", "value"), rows.chunk(3, dim=-1), strict=True)
                layer |= {f"{name}.{kind}": part for name, part in parts}
        layers.append(layer)
    ways = {"read_in": "read_in", "read_out": "read_out"}
    ends = _named(found, ways, True) | _named(found, {"final_norm": final}, False)
    return Parts(tuple(layers), ends, n_heads)


def _named(
    found: Mapping[str, Tensor], there: Mapping[str, str], turned: bool
) -> dict[str, Tensor]:
    """Weights and biases that are there, by our names for them, matrices on request transposed."""
    parts = {
        f"{name}.{kind}": found.get(f"{theirs}.{kind}")
        for name, theirs in there.items()
        for kind in ("weight", "bias")
    }
    return {
        name: tensor.mT if turned and tensor.ndim == 2 else tensor
        for name, tensor in parts.items()
        if tensor is not None
    }
