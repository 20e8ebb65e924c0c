"""Exact attention of any layer that is linear in its values: z_t = sum_s A_ts v_s, with A independent of v.

Softmax, linear, gated and delta-rule attention, mesa layers and state-space models are. The values are replaced by 1 at one
position and 0 at all others; one pass takes as many positions as a head is wide, so L / d_head passes give A.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.followed import HeadPoints
from mechinterp.models.hooked.masks import lock_of, pattern_name, z_name
from mechinterp.models.hooked.runner import HookedPredictor

LARGEST_MISMATCH = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference between z and A v for random values, relative to the largest z; larger: the layer is refused."""
LARGEST_MISMATCH_IN_HALF = 1e-2
Pattern = Float[Tensor, "batch head query key"]


def patterns(hooked: HookedPredictor, prompts: Prompts) -> list[Pattern]:
    """Attention pattern of every layer: that of its hook, or the exact one if it has none.

    Raises:
        ValueError: If a layer without a pattern is not linear in its values, or its values are not known.
    """
    names = [pattern_name(layer) for layer in range(hooked.n_layers)]
    there = [name for name in names if name in hooked.model.hook_dict]
    _, found = hooked.activations(prompts, there)
    by_name = dict(zip(there, found, strict=True))
    return [
        by_name[name] if name in by_name else exact_attention(hooked, prompts, layer)
        for layer, name in enumerate(names)
    ]


@torch.no_grad()
def exact_attention(hooked: HookedPredictor, prompts: Prompts, layer: int) -> Pattern:
    """Pattern A of a layer with z = A v, tested on random values that differ from channel to channel.

    Raises:
        ValueError: If the layer is not linear in its values, A differs between their channels, or no module is known
            whose output is the values.
    Example:
        >>> from mechinterp import load, sample_prompts
        >>> from mechinterp.models.hooked.runner import hooked_predictor
        >>> checkpoint = load("checkpoints/softmax-h2-s0")
        >>> prompts = sample_prompts(checkpoint, 4)
        >>> exact = exact_attention(hooked_predictor(checkpoint.model), prompts, 0)
        >>> _, cache = checkpoint.model.run_with_cache(prompts)
        >>> torch.allclose(exact, cache["pattern", 0], atol=1e-6)
        True
    """
    inputs = hooked.inputs(prompts)
    with lock_of(hooked.model), _values_point(hooked, layer) as name:
        own, z = _values_and_outputs(hooked, inputs, layer, name)

        def outputs(values: Tensor) -> Tensor:
            put = (name, lambda _, hook: values.to(own))
            return hooked.run_noting(inputs, [z_name(layer)], [put])[1][z_name(layer)]

        found = own.new_empty(len(own), own.shape[2], z.shape[1], own.shape[1])
        for start in range(0, own.shape[1], own.shape[3]):
            stop = min(start + own.shape[3], own.shape[1])
            one_hot = torch.zeros_like(own)
            columns = torch.arange(stop - start, device=own.device)
            one_hot[:, start + columns, :, columns] = 1
            found[..., start:stop] = outputs(one_hot)[..., : stop - start].permute(0, 2, 1, 3)
        other = _random_like(own)[:, :, _first_alike(own)]
        _require_linear(found, {"own": (own, z), "random": (other, outputs(other))}, layer)
    return found


def _first_alike(values: Float[Tensor, "batch key head d_head"]) -> list[int]:
    """For each head, the first one with the same values: heads of one group share theirs, at other values too."""
    heads = values.unbind(2)
    return [next(i for i, each in enumerate(heads) if torch.equal(each, own)) for own in heads]


def _random_like(values: Tensor) -> Tensor:
    """Random values of the same size, different in every channel."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    drawn = torch.randn(values.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(values) * values.square().mean().sqrt()


def _require_linear(A: Pattern, pairs: dict[str, tuple[Tensor, Tensor]], layer: int) -> None:
    """Refuse a pattern that does not give the outputs for given values."""
    limit = LARGEST_MISMATCH.get(A.dtype, LARGEST_MISMATCH_IN_HALF)
    for which, (values, z) in pairs.items():
        largest = z.abs().max().item()
        off = (torch.einsum("bhqk,bkhd->bqhd", A, values) - z).abs().max().item()
        if not off <= limit * largest:
            raise ValueError(
                f"layer {layer} must be linear in its values, each channel with the same weights, got outputs that differ from "
                f"A v by {off / max(largest, 1e-30):.2g} of the largest for its {which} values (limit {limit:g})."
            )


def _values_and_outputs(
    hooked: HookedPredictor, inputs: Tensor, layer: int, name: str
) -> tuple[Float[Tensor, "batch key head d"], Float[Tensor, "batch query head d"]]:
    """The layer's own values and outputs."""
    _, noted = hooked.run_noting(inputs, [name, z_name(layer)])
    if name not in noted:
        raise ValueError(
            f"layer {layer} has no attention weights that can be read, got no module whose output is its values; "
            "name its projections q_proj, k_proj and v_proj."
        )
    values, z = noted[name], noted[z_name(layer)]
    if values.ndim != 4 or values.shape[2:] != z.shape[2:]:
        raise ValueError(
            f"layer {layer} must have values as wide as its heads' outputs, {list(z.shape[2:])}, got {list(values.shape[2:])}."
        )
    return values, z


@contextmanager
def _values_point(hooked: HookedPredictor, layer: int) -> Iterator[str]:
    """Context with a hook point on a layer's values; that of a plain module is removed at the end."""
    blocks: Any = hooked.model.blocks
    name, heads = f"blocks.{layer}.attn.hook_v", blocks[layer].attn
    if name in hooked.model.hook_dict or not isinstance(heads, HeadPoints):
        yield name
        return
    # Imported here, because it is slow to import.
    from transformer_lens.hook_points import HookPoint

    heads.add_module("hook_v", HookPoint())
    hooked.model.setup()
    try:
        yield name
    finally:
        del heads.hook_v
        hooked.model.setup()
