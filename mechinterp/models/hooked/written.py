"""Outputs that the heads of a layer write into the stream, and a check that the stream is their sum."""

from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.models.hooked.masks import resid_name, z_name

LARGE, EXPLAINED = 1e4, 1e-2
"""Factor by which the check scales the heads' outputs, and the largest missing fraction of what they write. The factor is
so large that the rest of a normed layer no longer matters."""


def written(
    model: Any, layer: int, z: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch pos head d_model"]:
    """Output that each head of a layer writes into the stream for the given z, without the layer's bias."""
    heads = model.blocks[layer].attn
    if hasattr(heads, "written"):
        return heads.written(z)
    W_O = heads.W_O.detach().to(z)
    return einsum(z, W_O, "batch pos head d_head, head d_head d_model -> batch pos head d_model")


@torch.no_grad()
def require_sum(model: Any, inputs: Tensor) -> None:
    """Refuse a plain module whose stream is not the sum of what its heads write.

    The heads' outputs are scaled by `LARGE`: the stream after the layer must move in proportion to what they write, and the
    next layer must read that stream.

    Raises:
        ValueError: If the stream does not move so, or the next layer reads another stream.
    """
    last = len(model.blocks) - 1
    for layer in range(last):
        names = [z_name(layer), f"blocks.{layer}.hook_resid_post", resid_name(layer + 1)]
        _, cache = model.run_with_cache(inputs, names_filter=names)
        z, after, before = (cache[name] for name in names)
        if z.shape[:2] != after.shape[:2] or not torch.equal(after, before):
            raise ValueError(
                f"model must have layers that hand the stream on, got one that changes it between layers {layer} and {layer + 1}."
            )
        with model.hooks(fwd_hooks=[(names[0], lambda values, hook: values * (1 + LARGE))]):
            _, grown = model.run_with_cache(inputs, names_filter=names[1])
        expected = written(model, layer, z).sum(2)
        slope = (grown[names[1]] - after) / LARGE
        if not (slope - expected).abs().max() <= EXPLAINED * expected.abs().max():
            raise ValueError(
                f"model must have a residual stream that is the sum of what is written to it, got a layer {layer} that puts out "
                "something else (a norm after it, or an MLP without one before)."
            )
