"""Experiment that keeps only those hook points of a plain module's attention that explain its heads' outputs.

On a trial input the patterns are replaced by random numbers; the heads' outputs must change accordingly.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.delta_layers import TINY
from mechinterp.models.hooked.followed import (
    LINEAR_MASKS,
    POINTS,
    PROJECTED,
    HeadPoints,
    by_linear_weights,
)
from mechinterp.models.hooked.module import ModuleHooks
from mechinterp.models.layers import AVERAGE, SCORE_PRODUCTS

MASKED = -1e9
"""Scores at or below this value belong to masked keys."""
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
Passed = Mapping[str, Sequence[Tensor]]
"""Values that passed each hook point of a layer, by name, one per call."""


@torch.no_grad()
def follow(model: ModuleHooks, inputs: Tensor) -> None:
    """Remove the hook points within attention that do not explain the heads' outputs on these inputs."""
    for layer in range(len(model.blocks)):
        heads = cast(HeadPoints, model.blocks[layer].attn)
        if _is_known_recurrence(model, inputs, heads):
            continue
        with caught(heads, (*POINTS, "hook_z")) as passed:
            model(inputs)
        gone, reason = _unexplained(model, inputs, heads, passed)
        for name in gone:
            delattr(heads, name)
        if reason:
            model.unfollowed[layer] = reason
    model.setup()


def _is_known_recurrence(model: ModuleHooks, inputs: Tensor, heads: HeadPoints) -> bool:
    """True if the layer is a recurrence whose form is found; it then gets the hook points of its parts."""
    delta = heads.delta
    if delta is None:
        return False
    if delta.form is None:
        model(inputs)
    if delta.form is None and not delta.settle():
        heads.delta = None
        return False
    del heads.hook_attn_scores
    for name in ("gate", "beta"):
        if name in delta.has:
            heads.add_module(f"hook_{name}", HookPoint())
    return True


@contextmanager
def caught(heads: HeadPoints, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Context that records the values at some hook points of a layer."""
    passed: dict[str, list[Tensor]] = {name: [] for name in names}

    def note(values: Tensor, hook: HookPoint, to: list[Tensor]) -> None:
        to.append(values.detach())

    points = {name: getattr(heads, name) for name in names if hasattr(heads, name)}
    for name, point in points.items():
        point.add_hook(partial(note, to=passed[name]))
    try:
        yield passed
    finally:
        for point in points.values():
            point.remove_hooks()


def _unexplained(
    model: ModuleHooks, inputs: Tensor, heads: HeadPoints, passed: Passed
) -> tuple[Sequence[str], str]:
    """Hook points to remove, and the reason."""
    number = len(passed["hook_pattern"])
    if number == 0:
        return _without_softmax(heads, passed)
    if number > 1:
        return POINTS, f"its softmax runs {number} times, not once"
    (pattern,), (z,) = passed["hook_pattern"], passed["hook_z"]
    if not _is_average(model, inputs, heads, pattern, z):
        return POINTS, "what its heads put out is not the average of values by that softmax"
    gone, reasons = [], []
    if not passed["hook_attn_scores"]:
        gone = ["hook_attn_scores", *PROJECTED[:2]]
        reasons = ["its weights are no output of torch.softmax, so that its scores are not seen"]
    if not _all_caught(passed):
        reason = "its queries, keys and values are not put out by modules of the usual names"
        return [*{*gone, *PROJECTED}], reason
    q, k, v = (passed[name][0] for name in PROJECTED)
    n_keys = pattern.shape[-1]
    if n_keys > k.shape[1]:
        keys = f"{n_keys} keys, and its projection puts out {k.shape[1]}"
        return POINTS, f"its softmax is over {keys}"
    # The first tokens alone, such as the context, may be read.
    k, v = k[:, :n_keys], v[:, :n_keys]
    if not gone:
        (scores,) = passed["hook_attn_scores"]
        products = einsum(q, k, SCORE_PRODUCTS)
        read = (scores > MASKED) & (pattern > 0)
        s, p = scores[read], products[read]
        factor = (s @ p) / (p @ p).clamp_min(TINY)
        heads.factor = factor.item()
        heads.turned = not same(factor * p, s)
        if heads.turned:  # by positions, or normed
            for name, word in (("hook_q", "queries"), ("hook_k", "keys")):
                if not _own_scores(model, inputs, heads, passed, name):
                    gone.append(name)
                    reasons.append(f"scores of a head do not follow its {word} alone")
    if not same(einsum(pattern.to(v), v, AVERAGE), z):
        gone.append("hook_v")
        reasons.append("the values that are averaged are not what its projection puts out")
    return gone, "; ".join(reasons)


def _all_caught(passed: Passed) -> bool:
    """True if queries, keys and values each passed exactly once, with the head axes of the outputs."""
    (z,) = passed["hook_z"]
    each = [passed[name] for name in PROJECTED]
    return all(len(values) == 1 and values[0].shape[2:] == z.shape[2:] for values in each)


def _own_scores(
    model: ModuleHooks, inputs: Tensor, heads: HeadPoints, passed: Passed, name: str
) -> bool:
    """True if the query (hook_q) or key (hook_k) of a head at a position changes the scores of this head in its row or
    column alone."""
    (own,), (scores,) = passed[name], passed["hook_attn_scores"]
    other = _random(own.shape).to(own)
    chosen = (_random(own.shape[:3], seed=1) < 0.5).to(own.device)

    def scores_of(values: Tensor) -> Tensor:
        getattr(heads, name).add_hook(lambda _, hook: values)
        with caught(heads, ["hook_attn_scores"]) as seen:
            model(inputs)
        getattr(heads, name).remove_hooks()
        return seen["hook_attn_scores"][0]

    rows = chosen.transpose(1, 2)[..., None]  # [batch, head, pos, 1]
    of_keys = rows.mT[..., : scores.shape[-1]]
    expected = torch.where(of_keys if name == "hook_k" else rows, scores_of(other), scores)
    mixed = scores_of(torch.where(chosen[..., None], other, own))
    read = scores > MASKED
    return same(mixed[read], expected[read])


def _random(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Numbers in [0, 1), in float64."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")


def _is_average(
    model: ModuleHooks,
    inputs: Tensor,
    heads: HeadPoints,
    pattern: Float[Tensor, "batch head query key"],
    z: Float[Tensor, "batch pos head d_head"],
) -> bool:
    """True if the outputs are linear in the pattern, and each head and query depends on its own row alone."""
    if pattern.shape[:3] != (len(z), z.shape[2], z.shape[1]):
        return False

    def outputs(weights: Tensor) -> Tensor:
        heads.hook_pattern.add_hook(lambda values, hook: weights)
        with caught(heads, ["hook_z"]) as passed:
            model(inputs)
        heads.hook_pattern.remove_hooks()
        return passed["hook_z"][0]

    other = _random(pattern.shape).to(pattern)
    chosen = (_random(pattern.shape[:3], seed=1) < 0.5).to(pattern)
    alone = outputs(other)
    kept = chosen.transpose(1, 2)[..., None]
    masked = outputs(other * chosen[..., None])
    if same(masked, alone * kept):
        # Hugging Face takes the softmax in float32 in models of any dtype.
        return same(outputs(pattern + other), z + alone, pattern.dtype)
    if same(_by_entry(masked), _by_entry(alone) * kept):
        raise ValueError(
            "heads' outputs must lie side by side, (head d_head), before the output projection, got them entry by entry, "
            "(d_head head): turn them, and the columns of the projection with them."
        )
    return False


def _by_entry(z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos head d_head"]:
    """Heads' outputs if the first entries of all heads come first, then their second entries."""
    return z.flatten(-2).unflatten(-1, (z.shape[3], z.shape[2])).mT


def _without_softmax(heads: HeadPoints, passed: Passed) -> tuple[tuple[str, ...], str]:
    """Check of attention without a softmax, whose weights must be q.k under a mask, times one factor."""
    if not _all_caught(passed):
        return (
            POINTS,
            "no softmax of all heads at once with a key for each position, and no such scaled_dot_product_attention, runs in its attention",
        )
    q, k, v, z = (passed[name][0] for name in (*PROJECTED, "hook_z"))
    for mask in LINEAR_MASKS:
        _, expected = by_linear_weights(q, k, v, mask)
        factor = (z * expected).sum() / expected.square().sum().clamp_min(TINY)
        if same(factor * expected, z):
            heads.mask, heads.factor = mask, factor.item()
            return ("hook_attn_scores",), ""
    return (
        POINTS,
        "it has no softmax, and its heads do not put out sums of values times q.k (call torch.softmax if it has one)",
    )


def same(values: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> bool:
    """True if the values are equal to rounding, that of `dtype` or their own."""
    rounding = _ROUNDING.get(dtype or expected.dtype, 1e-2)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return bool(((values - expected).abs() <= rounding * largest).all())
