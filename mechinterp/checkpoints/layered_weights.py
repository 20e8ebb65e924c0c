"""The tensors of a regression GPT-2 or of torch's encoder layers, under HookedTransformer's names and shapes."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from mechinterp.checkpoints.layered_tensors import n_layers
from mechinterp.config import ModelConfig


def gpt2_weights(found: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a model of this architecture; those of GPT2Model multiply from the right already.

    Args:
        found: GPT2Model's names, and read_in and read_out, whose biases may lack; checked.
    """
    found = _one_dtype(found)
    tensors = _ends(found) | {"pos_embed.W_pos": found["wpe.weight"]}
    tensors |= _norm("ln_final", found, "ln_f")
    for layer in range(model.n_layers):
        h, block = f"h.{layer}", f"blocks.{layer}"
        qkv, out = found[f"{h}.attn.c_attn.weight"], found[f"{h}.attn.c_proj.weight"]
        tensors |= _heads(f"{block}.attn", qkv, out, model.n_heads)
        qkv_bias, out_bias = found[f"{h}.attn.c_attn.bias"], found[f"{h}.attn.c_proj.bias"]
        tensors |= _head_biases(f"{block}.attn", qkv_bias, out_bias, model.n_heads)
        tensors |= _norm(f"{block}.ln1", found, f"{h}.ln_1")
        tensors |= _norm(f"{block}.ln2", found, f"{h}.ln_2")
        tensors |= {
            f"{block}.mlp.W_in": found[f"{h}.mlp.c_fc.weight"],
            f"{block}.mlp.b_in": found[f"{h}.mlp.c_fc.bias"],
            f"{block}.mlp.W_out": found[f"{h}.mlp.c_proj.weight"],
            f"{block}.mlp.b_out": found[f"{h}.mlp.c_proj.bias"],
        }
    return _owned(tensors)


def encoder_weights(found: Mapping[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a model of this architecture; torch.nn.Linear holds the transpose of what multiplies.

    Args:
        found: layers.{l}.self_attn..., a last norm if there is one, read_in and read_out if there are any; checked.
    """
    found = _one_dtype(found)
    tensors: dict[str, Tensor] = {}
    if model.d_model is not None:
        width = found["read_out.weight"].shape[1]
        # Without a read-in the tokens are the stream.
        found.setdefault("read_in.weight", torch.eye(width).to(found["read_out.weight"]))
        tensors |= _ends(found, biases=model.biases)
    if model.final_norm:
        tensors |= _norm("ln_final", found, "norm")
    for layer in range(n_layers(found)):
        there, block = f"layers.{layer}", f"blocks.{layer}"
        qkv, out = (
            found[f"{there}.self_attn.in_proj_weight"],
            found[f"{there}.self_attn.out_proj.weight"],
        )
        tensors |= _heads(f"{block}.attn", qkv.mT, out.mT, model.n_heads)
        tensors |= _norm(f"{block}.ln1", found, f"{there}.norm1")
        tensors |= _norm(f"{block}.ln2", found, f"{there}.norm2")
        tensors[f"{block}.mlp.W_in"] = found[f"{there}.linear1.weight"].mT
        tensors[f"{block}.mlp.W_out"] = found[f"{there}.linear2.weight"].mT
        if model.biases:
            qkv_bias = _bias(found, f"{there}.self_attn.in_proj_bias", qkv.shape[0])
            out_bias = _bias(found, f"{there}.self_attn.out_proj.bias", out.shape[0])
            tensors |= _head_biases(f"{block}.attn", qkv_bias, out_bias, model.n_heads)
            inner, width = found[f"{there}.linear1.weight"].shape
            tensors[f"{block}.mlp.b_in"] = _bias(found, f"{there}.linear1.bias", inner)
            tensors[f"{block}.mlp.b_out"] = _bias(found, f"{there}.linear2.bias", width)
    return _owned(tensors)


def _heads(name: str, qkv: Tensor, out: Tensor, n_heads: int) -> dict[str, Tensor]:
    """W_Q, W_K, W_V from [d_model, 3 * width] and W_O from [width, d_model]; heads lie side by side in width."""
    q, k, v = (part.unflatten(1, (n_heads, -1)).transpose(0, 1) for part in qkv.chunk(3, dim=1))
    W_O = out.unflatten(0, (n_heads, -1))
    return {f"{name}.W_Q": q, f"{name}.W_K": k, f"{name}.W_V": v, f"{name}.W_O": W_O}


def _head_biases(name: str, qkv: Tensor, out: Tensor, n_heads: int) -> dict[str, Tensor]:
    q, k, v = (part.unflatten(0, (n_heads, -1)) for part in qkv.chunk(3))
    return {f"{name}.b_Q": q, f"{name}.b_K": k, f"{name}.b_V": v, f"{name}.b_O": out}


def _norm(name: str, found: Mapping[str, Tensor], there: str) -> dict[str, Tensor]:
    weight = found[f"{there}.weight"]
    return {f"{name}.w": weight, f"{name}.b": _bias(found, f"{there}.bias", len(weight))}


def _ends(found: Mapping[str, Tensor], *, biases: bool = True) -> dict[str, Tensor]:
    """Read-in and read-out."""
    read_in, read_out = found["read_in.weight"], found["read_out.weight"]
    tensors = {"W_in": read_in.mT, "unembed.W_U": read_out.mT}
    if biases:
        tensors["b_in"] = _bias(found, "read_in.bias", len(read_in))
        tensors["unembed.b_U"] = _bias(found, "read_out.bias", len(read_out))
    return tensors


def _bias(found: Mapping[str, Tensor], name: str, size: int) -> Tensor:
    """A bias, zero where the file has none."""
    like = next(iter(found.values()))
    return found[name] if name in found else like.new_zeros(size)


def _one_dtype(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in the widest dtype among them, at least float32."""
    dtype = reduce(torch.promote_types, (t.dtype for t in found.values()), torch.float32)
    return {name: tensor.detach().to("cpu", dtype) for name, tensor in found.items()}


def _owned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
