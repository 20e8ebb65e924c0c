"""Hook points on the queries, keys, values, scores and patterns of attention that somebody else wrote.

Queries, keys and values are caught as the projections put them out. Between them and the output projection torch's softmax
and scaled_dot_product_attention, and the whole of torch.nn.MultiheadAttention, are caught as they are called; they are
computed step by step only where a hook is on one of the points. What is caught is compared with what the module itself puts
out, and left out with a reason where it does not explain that.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from einops import einsum
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformer_lens.hook_points import HookPoint

PROJECTED = ("hook_q", "hook_k", "hook_v")
POINTS = (*PROJECTED, "hook_attn_scores", "hook_pattern")
SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
MASKED = -1e9
"""Scores at or below it are of masked keys."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Inner:
    """Names of the modules that make queries, keys and values, and of the one in which they meet."""

    container: str
    projections: Mapping[str, str]
    """By "q", "k" and "v"; or all three in one, by "qkv". Empty for a torch.nn.MultiheadAttention."""


@dataclass(eq=False)
class Running:
    """The heads of the layer whose attention is running; None outside of all."""

    heads: Any = None


class Following(TorchFunctionMode):
    """A context in which calls of softmax and attention go through the hook points of the layer that is running."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """The call itself, or the same computation through the hook points."""
        heads, kwargs = self.running.heads, kwargs or {}
        if heads is not None and func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if (output := _multihead(heads, **bound.arguments)) is not None:
                return output
        if heads is not None and func is F.scaled_dot_product_attention:
            return _attention(heads, *args, **kwargs)
        if heads is not None and func in SOFTMAX:
            return _softmax(heads, partial(func, **kwargs), *args)
        return func(*args, **kwargs)


def attach(
    module: nn.Module, inner: Inner, heads: nn.Module, turned: bool, running: Running
) -> None:
    """Catch queries, keys and values of a layer, and note while its attention runs."""
    container = module.get_submodule(inner.container)
    container.register_forward_pre_hook(partial(_enter, running, heads))
    container.register_forward_hook(partial(_leave, running), always_call=True)
    for part, name in inner.projections.items():
        module.get_submodule(name).register_forward_hook(partial(_project, heads, part, turned))


@contextmanager
def caught(heads: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """What passes some hook points of a layer."""
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


def why_not_followed(passed: Mapping[str, Sequence[Tensor]]) -> tuple[tuple[str, ...], str]:
    """The hook points that must go, as what passed them does not explain what the heads put out, and why."""
    if any(len(passed[name]) != 1 for name in ("hook_attn_scores", "hook_pattern")):
        return POINTS, "no softmax or scaled_dot_product_attention runs once in its attention"
    if any(len(passed[name]) != 1 for name in PROJECTED):
        return POINTS, "its queries, keys and values are not put out by modules of the usual names"
    q, k, v, scores, pattern = (passed[name][0] for name in POINTS)
    z = passed["hook_z"][0]
    if not (q.shape[2:] == k.shape[2:] == v.shape[2:] == z.shape[2:]):
        return POINTS, "its queries, keys and values have not the heads of its outputs"
    equation = "batch head query key, batch key head d -> batch query head d"
    if pattern.shape != (len(z), z.shape[2], z.shape[1], v.shape[1]) or not _same(
        einsum(pattern, v, equation), z
    ):
        return POINTS, "what its heads put out is not the average of its values by that softmax"
    products = einsum(q, k, "batch query head d, batch key head d -> batch head query key")
    read = (scores > MASKED) & (pattern > 0)
    s, p = scores[read], products[read]
    if not _same((s @ p) / (p @ p).clamp_min(1e-30) * p, s):
        return PROJECTED[:2], "scores are not products of what its queries and keys put out"
    return (), ""


def _same(values: Tensor, expected: Tensor) -> bool:
    rounding = ROUNDING.get(expected.dtype, 1e-2)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    return bool(((values - expected).abs() <= rounding * largest).all())


def _enter(running: Running, heads: nn.Module, container: nn.Module, args: tuple) -> None:
    running.heads = heads


def _leave(running: Running, container: nn.Module, args: tuple, output: object) -> None:
    running.heads = None


def through(heads: Any, name: str, values: Tensor) -> Tensor:
    """The values behind a hook point, where the layer has it."""
    point = getattr(heads, name, None)
    return values if point is None else point(values)


def _project(
    heads: Any, part: str, turned: bool, projection: nn.Module, args: tuple, output: Tensor
) -> Tensor:
    """What a projection puts out, behind the hook point of each of its parts."""
    pieces = [
        _by_head(heads, f"hook_{each}", values, turned)
        for each, values in zip(part, output.chunk(len(part), dim=-1), strict=True)
    ]
    return torch.cat(pieces, dim=-1) if len(pieces) > 1 else pieces[0]


def _by_head(heads: Any, name: str, values: Tensor, turned: bool) -> Tensor:
    if values.ndim != 3 or values.shape[-1] % heads.n_heads:
        return values
    parts = values.unflatten(-1, (heads.n_heads, -1))
    if turned:
        return through(heads, name, parts.transpose(0, 1)).transpose(0, 1).flatten(-2)
    return through(heads, name, parts).flatten(-2)


def _softmax(heads: Any, function: Callable, scores: Tensor, *rest: Any) -> Tensor:
    """A softmax over keys through the hook points, [batch, head, query, key]; any other as it is."""
    n_heads, shape = heads.n_heads, scores.shape
    if scores.ndim == 3 and len(scores) % n_heads == 0:  # prompts and heads on one axis
        four = scores.unflatten(0, (-1, n_heads))
    elif scores.ndim == 4 and shape[1] == n_heads:
        four = scores
    else:
        return function(scores, *rest)
    put_in = through(heads, "hook_attn_scores", four).reshape(shape)
    pattern = function(put_in, *rest)
    return through(heads, "hook_pattern", pattern.reshape(four.shape)).reshape(shape)


def _attention(
    heads: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, step by step."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(groups, dim=-3) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -torch.inf)
    pattern = _softmax(heads, partial(torch.softmax, dim=-1), _masked(scores, attn_mask))
    return pattern @ value


def _masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The scores under a mask that is added, or that is true where a key is read."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _multihead(heads: Any, **given: Any) -> tuple[Tensor, Tensor | None] | None:
    """torch.nn.MultiheadAttention's computation step by step; None where it has parts that are not followed."""
    query, n_heads = given["query"], given["num_heads"]
    more = (given["bias_k"], given["bias_v"], given["static_k"], given["static_v"])
    if query.ndim != 3 or given["add_zero_attn"] or any(each is not None for each in more):
        return None
    weights = [given[f"{part}_proj_weight"] for part in "qkv"]
    if not given["use_separate_proj_weight"]:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    biases = [None] * 3 if bias is None else bias.chunk(3)
    inputs = (query, given["key"], given["value"])
    q, k, v = (
        through(heads, name, F.linear(x, W, b).unflatten(-1, (n_heads, -1)).transpose(0, 1))
        for name, x, W, b in zip(PROJECTED, inputs, weights, biases, strict=True)
    )
    scores = einsum(q, k, "batch query head d, batch key head d -> batch head query key")
    scores = scores / q.shape[-1] ** 0.5
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, n_heads))
    for each in (mask, None if padding is None else padding[:, None, None]):
        if each is not None:  # torch's masks are true where a key is not read
            scores = _masked(scores, ~each if each.dtype == torch.bool else each)
    pattern = _softmax(heads, partial(torch.softmax, dim=-1), scores)
    z = einsum(pattern, v, "batch head query key, batch key head d -> query batch head d")
    output = F.linear(z.flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    if not given["need_weights"]:
        return output, None
    return output, pattern.mean(1) if given["average_attn_weights"] else pattern
