"""Masks of heads and MLPs as hooks, what heads write into the stream, and the lock of a hooked model."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts

Head = tuple[int, int]
"""(layer, head), counted from 0."""
Hook = tuple[str | Callable, Callable]
"""Name of a hook point, or a function that selects names, and the function that is called there."""
Hooks = list[Hook]
Values = Sequence[Tensor] | Tensor
"""Replacement for z by layer, [pos, head, d_head], optionally with a leading axis of prompts."""

# Beside the models, so that a copied or unpickled model gets its own, free lock.
_LOCKS: WeakKeyDictionary[object, AbstractContextManager] = WeakKeyDictionary()

METHODS = ("zero", "mean", "resample")
LARGE, EXPLAINED = 1e4, 1e-2
"""Factor by which the check scales the heads' outputs, and the largest missing fraction of what they write. The factor is
so large that the rest of a normed layer no longer matters."""


def lock_of(model: object) -> AbstractContextManager:
    """Re-entrant lock of a model, shared by all threads.

    Example:
        >>> model = threading.Thread()
        >>> lock_of(model) is lock_of(model)
        True
    """
    return _LOCKS.setdefault(model, threading.RLock())


def mask_heads(
    heads: Sequence[Head], *, values: Values | None = None, at: int | None = None
) -> Hooks:
    """Forward hooks that mask heads at hook_z, for `model.run_with_hooks` or `model.hooks`.

    Args:
        heads: (layer, head) pairs, counted from 0.
        values: Replacement for z of the masked heads, [layer, pos, head, d_head]; None: zeros.
        at: Position at which the heads are masked; None: at all.
    Raises:
        ValueError: If a number is negative; when the model runs, if a layer has no such head or position.
    See also:
        `masked`, `ablate`.
    Example:
        >>> [name for name, hook in mask_heads([(0, 1)])]
        ['blocks.0.attn.hook_z']
    """
    for layer, head in heads:
        if layer < 0 or head < 0:
            raise ValueError(f"heads must be counted from 0, got L{layer}H{head}.")
    hooks: Hooks = []
    for layer, masked in by_layers(heads).items():
        value = None if values is None else values[layer]
        hooks.append((z_name(layer), partial(mask_z, heads=masked, value=value, at=at)))
    return hooks


def mask_z(
    z: Tensor,
    hook: object = None,
    *,
    heads: list[int],
    value: Tensor | None,
    at: int | None = None,
) -> Tensor:
    """Copy of z in which the given heads are zero or replaced by `value`, at all positions or at one."""
    if heads and max(heads) >= z.shape[2]:
        name, n_heads = getattr(hook, "name", "z"), z.shape[2]
        raise ValueError(f"heads of {name} must lie in 0 to {n_heads - 1}, got {max(heads)}.")
    z, rows = z.clone(), _rows(z, at)
    z[:, rows, heads] = 0 if value is None else value[..., rows, heads, :].to(z)
    return z


def mask_mlps(
    layers: Sequence[int], *, values: Values | None = None, at: int | None = None
) -> Hooks:
    """Forward hooks that replace the outputs of MLPs at hook_mlp_out by zeros or by values, [layer, pos, d_model]."""
    by_layer = {layer: None if values is None else values[layer] for layer in layers}
    return [(mlp_name(n), partial(_mask_mlp, value=value, at=at)) for n, value in by_layer.items()]


def _mask_mlp(out: Tensor, hook: object, *, value: Tensor | None, at: int | None) -> Tensor:
    out, rows = out.clone(), _rows(out, at)
    out[:, rows] = 0 if value is None else value[..., rows, :].to(out)
    return out


def _rows(values: Float[Tensor, "batch pos *axes"], at: int | None) -> slice:
    """All positions, or one of them."""
    if at is None:
        return slice(None)
    if not 0 <= at < values.shape[1]:
        raise ValueError(f"at must be a position from 0 to {values.shape[1] - 1}, got {at}.")
    return slice(at, at + 1)


def by_layers(heads: Sequence[Head]) -> dict[int, list[int]]:
    """Heads by layer, both in order; layers without heads are left out.

    Example:
        >>> by_layers([(1, 2), (0, 3), (1, 0)])
        {0: [3], 1: [0, 2]}
    """
    layers = sorted({layer for layer, _ in heads})
    return {at: sorted({head for layer, head in heads if layer == at}) for at in layers}


def swapped(values: Float[Tensor, " batch *axes"]) -> Float[Tensor, " batch *axes"]:
    """Values with prompts 2i and 2i + 1 exchanged."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def mean_z(chunks: Iterable[Sequence[Tensor]], n_prompts: int) -> list[Tensor]:
    """Mean z over prompts, by layer, in float64; `chunks` gives z by layer for a part of the prompts."""
    sums = [[z.double().sum(0) for z in every_z] for every_z in chunks]
    return [torch.stack(parts).sum(0) / n_prompts for parts in zip(*sums, strict=True)]


def require_pairs(heads: object) -> None:
    """Refuse anything but a list of pairs (layer, head).

    Raises:
        ValueError: If it is something else.
    Example:
        >>> require_pairs([(0, 1)])
    """
    listed = heads if isinstance(heads, Iterable) and not isinstance(heads, str) else [heads]
    for head in listed:
        if isinstance(head, str) or not hasattr(head, "__len__") or len(head) != 2:
            raise ValueError(f"heads must be pairs (layer, head), such as [(0, 1)], got {head!r}.")


def require_heads(heads: Sequence[Head], n_layers: int, n_heads: int) -> None:
    """Refuse heads that a model does not have.

    Raises:
        ValueError: If a head is outside the model, or is no pair; the message names it.
    """
    require_pairs(heads)
    for layer, head in heads:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise ValueError(
                f"heads must lie in {n_layers} layers of {n_heads} heads, counted from 0, got L{layer}H{head}."
            )


def require_method(method: str, prompts: Prompts) -> None:
    """Refuse an unknown masking method, and an odd number of prompts for "resample", which swaps them in pairs.

    Raises:
        ValueError: If either rule is violated.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    if method == "resample" and len(prompts) % 2:
        raise ValueError(
            f"Prompts swap in pairs: there must be an even number, got {len(prompts)}."
        )


def z_name(layer: int) -> str:
    """Name of the hook on z, the heads' weighted averages of values, [batch, pos, head, d_head]."""
    return f"blocks.{layer}.attn.hook_z"


def mlp_name(layer: int) -> str:
    """Name of the hook on the output of a layer's MLP, [batch, pos, d_model]."""
    return f"blocks.{layer}.hook_mlp_out"


def resid_name(layer: int) -> str:
    """Name of the hook on the residual stream before a layer, [batch, pos, d_model]."""
    return f"blocks.{layer}.hook_resid_pre"


def pattern_name(layer: int) -> str:
    """Name of the hook on a layer's attention weights, [batch, head, query, key]."""
    return f"blocks.{layer}.attn.hook_pattern"


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
def require_sum(hooked: Any, inputs: Tensor) -> None:
    """Refuse a plain module whose stream is not the sum of what its heads write.

    The heads' outputs are scaled by `LARGE`: the stream after the layer must move in proportion to what they write, and the
    next layer must read that stream.

    Args:
        hooked: HookedPredictor of the module.
        inputs: Its own input.
    Raises:
        ValueError: If the stream does not move so, or the next layer reads another stream.
    """
    model = hooked.model
    last = len(model.blocks) - 1
    for layer in range(last):
        names = [z_name(layer), f"blocks.{layer}.hook_resid_post", resid_name(layer + 1)]
        _, cache = hooked.run_noting(inputs, names)
        z, after, before = (cache[name] for name in names)
        if z.shape[:2] != after.shape[:2] or not torch.equal(after, before):
            raise ValueError(
                f"model must have layers that hand the stream on, got one that changes it between layers {layer} and {layer + 1}."
            )
        grow: Hooks = [(names[0], lambda values, hook: values * (1 + LARGE))]
        _, grown = hooked.run_noting(inputs, names[1:2], grow)
        expected = written(model, layer, z).sum(2)
        slope = (grown[names[1]] - after) / LARGE
        if not (slope - expected).abs().max() <= EXPLAINED * expected.abs().max():
            raise ValueError(
                f"model must have a residual stream that is the sum of what is written to it, got a layer {layer} that puts out "
                "something else (a norm after it, or an MLP without one before)."
            )
