"""Hook points on queries, keys, values, scores and patterns of attention in a third-party module.

Queries, keys and values are read from the outputs of the projections. torch's softmax, scaled_dot_product_attention and
torch.nn.MultiheadAttention are intercepted when they are called. They are computed step by step only while one of these
points has a hook. Points that do not explain the module's own output are left out, with a reason.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformer_lens.hook_points import HookPoint

from mechinterp.models.hooked.delta_layers import TINY, DeltaLayer, DeltaNames
from mechinterp.models.layers import AVERAGE, SCORE_PRODUCTS

PROJECTED = ("hook_q", "hook_k", "hook_v")
BY_HEAD = "qkv by head"
"""Part whose output has the query, key and value of the first head, then those of the second, as in GPT-NeoX and Bloom."""
POINTS = (*PROJECTED, "hook_attn_scores", "hook_pattern")
SOFTMAX = (torch.softmax, Tensor.softmax, F.softmax)
BY_HAND = (
    *(torch.div, torch.true_divide, torch.exp, torch.mul, F.normalize),
    *(Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__),
    *(Tensor.exp, Tensor.mul, Tensor.__mul__),
)
"""Last functions of a softmax written by hand, such as exp(s) / exp(s).sum(-1), or exp of a log_softmax."""
LINEAR_MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda ones: ones,
    "causal": torch.tril,
    "strict": partial(torch.tril, diagonal=-1),
    "context": lambda ones: _without_last(ones),
    "causal, over their number": lambda ones: _averaged(ones.tril()),
    "strict, over their number": lambda ones: _averaged(ones.tril(-1)),
}
"""Masks of attention without a softmax, by name: each maps ones [query, key] to the weights of the readable keys."""


def _without_last(reads: Tensor) -> Tensor:
    return torch.cat([reads[:, :-1], torch.zeros_like(reads[:, -1:])], dim=1)


def _averaged(reads: Tensor) -> Tensor:
    return reads / reads.sum(1, keepdim=True).clamp_min(1)


@dataclass(frozen=True)
class Inner:
    """Names of the modules that compute queries, keys and values, and of the module that contains them."""

    container: str
    projections: Mapping[str, str]
    """Module name by part: "q", "k", "v", or "kv", "qkv" if one module computes several ("qkv by head": those of each head
    in turn). Empty for a torch.nn.MultiheadAttention, and if no module computes them."""
    delta: DeltaNames | None = None
    """Names of a recurrent layer of transformers or flash-linear-attention."""


class HeadPoints(nn.Module):
    """Hook points of one layer's heads."""

    projection: nn.Module
    """Output projection that was taken out of a torch.nn.MultiheadAttention."""
    output: tuple[nn.Module]
    """Module that takes the heads' outputs side by side; in a tuple, so that it is not registered twice."""
    hook_z: HookPoint
    hook_pattern: HookPoint

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_head
        self.passed: dict[str, Tensor] = {}
        """Queries, keys, values and pattern of the current run, and the changes that hooks made to single heads."""
        self.factor = 1.0
        """Factor between scores, or weights without a softmax, and the products q.k, on the trial input."""
        self.turned = False
        """True: scores are not proportional to the products q.k, as with rotary positions."""
        self.delta: DeltaLayer | None = None
        """Recurrent layer whose state the heads read."""
        self.mask = ""
        """Mask of attention without a softmax, a key of `LINEAR_MASKS`; "" with a softmax."""
        for name in (*POINTS, "hook_z"):
            self.add_module(name, HookPoint())

    def through(self, name: str, values: Tensor) -> Tensor:
        """The values after the hook point; unchanged if the layer does not have it."""
        point = getattr(self, name, None)
        return values if point is None else point(values)

    def is_hooked(self, names: Sequence[str]) -> bool:
        """True if one of these points has a hook."""
        points = [getattr(self, name, None) for name in names]
        return any(point is not None and (point.fwd_hooks or point.bwd_hooks) for point in points)

    def written(self, z: Tensor) -> Tensor:
        """Output of each head for the given z, [batch, pos, head, width], without the bias."""
        (output,) = self.output
        alone = torch.eye(self.n_heads, dtype=z.dtype, device=z.device)[:, :, None]
        alone = z[:, :, :, None] * alone
        return output(alone.flatten(-2)) - output(torch.zeros_like(z).flatten(-2))[:, :, None]


@dataclass(eq=False)
class Running:
    """State that the layers of a module share while they run."""

    heads: HeadPoints | None = None
    """Heads of the layer whose attention is running; None outside attention."""
    depth: int = 0
    """Number of blocks that are running, one within another; 0 outside the layers."""
    begun: int = 0
    """Number of layers that have begun."""
    stream_calls: dict[int, int] = field(default_factory=dict)
    """Number of layers before each torch call that returns the stream, by the number of the call (see `Calls`); empty if
    the stream is the input and the output of each block."""


class Following(TorchFunctionMode):
    """Context that sends calls of softmax and attention through the hook points of the running layer."""

    def __init__(self, running: Running) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Result of the call, or of the same computation through the hook points."""
        heads, kwargs = self.running.heads, kwargs or {}
        if heads is None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(heads, *args, **kwargs)
        if func in SOFTMAX:
            return _softmax(heads, partial(func, **kwargs), *args)
        if func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            if (output := _multihead(heads, **bound.arguments)) is not None:
                return output
        result = func(*args, **kwargs)
        return _written_by_hand(heads, result) if func in BY_HAND else result


def projected(heads: HeadPoints, part: str, output: Tensor, *, turned: bool) -> Tensor:
    """Output of a projection after the hook points of its parts."""
    width, n_heads = output.shape[-1], heads.n_heads
    if output.ndim != 3:
        return output
    if len(part) == 1:
        return _by_head(heads, f"hook_{part}", output, turned)
    if part == BY_HEAD:
        if width != 3 * n_heads * heads.d_head:
            return output
        split = output.unflatten(-1, (n_heads, 3, -1)).unbind(-2)
        own = (
            _by_head(heads, name, values.flatten(-2), turned).unflatten(-1, (n_heads, -1))
            for name, values in zip(PROJECTED, split, strict=True)
        )
        return torch.stack([*own], dim=-2).flatten(-3)
    # With grouped queries the heads share keys and values, which are then narrower than the queries.
    queries = n_heads * heads.d_head if "q" in part else 0
    widths = [queries, (width - queries) // 2, (width - queries) // 2][-len(part) :]
    if sum(widths) != width:
        return output
    pieces = [
        _by_head(heads, f"hook_{each}", values, turned)
        for each, values in zip(part, output.split(widths, dim=-1), strict=True)
    ]
    return torch.cat(pieces, dim=-1)


def _by_head(heads: HeadPoints, name: str, values: Tensor, turned: bool) -> Tensor:
    """Values of one projection, passed through the hook point as [batch, pos, head, d_head] with shared heads repeated.

    A shared projection cannot carry a hook's change to one head alone. That change is stored and added to the scores
    or to the heads' outputs.
    """
    n_own, rest = divmod(values.shape[-1], heads.d_head)
    if rest or not n_own or heads.n_heads % n_own:
        return values
    parts, times = values.unflatten(-1, (n_own, -1)), heads.n_heads // n_own
    parts = parts.transpose(0, 1) if turned else parts
    changed = heads.through(name, parts.repeat_interleave(times, dim=2))
    own = changed[:, :, ::times]
    heads.passed[name] = changed
    if times > 1:
        heads.passed[f"{name} of one"] = changed - own.repeat_interleave(times, dim=2)
    return (own.transpose(0, 1) if turned else own).flatten(-2)


def behind_values(
    heads: HeadPoints, z: Float[Tensor, "*axes head d_head"]
) -> Float[Tensor, "*axes head d_head"]:
    """Heads' outputs, with the changes that hooks made to values of single heads or to weights without a softmax."""
    passed = heads.passed
    if heads.mask and heads.hook_pattern.fwd_hooks and "hook_q" in passed:
        q, k, v = (passed[name] for name in PROJECTED)
        products, expected = by_linear_weights(q, k, v, heads.mask)
        factor = (z * expected).sum() / expected.square().sum().clamp_min(TINY)
        passed["hook_pattern"] = heads.hook_pattern(factor * products)
        z = z + einsum(passed["hook_pattern"] - factor * products, v, AVERAGE)
    if "hook_pattern" in passed and "hook_v of one" in passed and hasattr(heads, "hook_v"):
        pattern, changed = passed["hook_pattern"], passed["hook_v of one"]
        if pattern.shape[-1] <= changed.shape[1]:  # a learned sink has no value
            z = z + einsum(pattern.to(changed), changed[:, : pattern.shape[-1]], AVERAGE)
    return z


def by_linear_weights(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    v: Float[Tensor, "batch key head d_head"],
    mask: str,
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch query head d_head"]]:
    """Attention without a softmax: its weights (q.k under a mask) and the weighted sums of values."""
    reads = LINEAR_MASKS[mask](torch.ones(q.shape[1], k.shape[1], dtype=q.dtype, device=q.device))
    products = einsum(q, k, SCORE_PRODUCTS) * reads
    return products, einsum(products, v, AVERAGE)


def _four_axes(heads: HeadPoints, values: Tensor) -> Tensor | None:
    """The values as [batch, head, query, key]; None if they have another shape."""
    if values.ndim == 3 and len(values) % heads.n_heads == 0:  # prompts and heads share one axis
        return values.unflatten(0, (-1, heads.n_heads))
    return values if values.ndim == 4 and values.shape[1] == heads.n_heads else None


def _written_by_hand(heads: HeadPoints, values: Tensor) -> Tensor:
    """Weights that are >= 0 and add up to 1 over keys, through the hook point of patterns; other values unchanged."""
    four = _four_axes(heads, values)
    if four is None or not hasattr(heads, "hook_pattern") or four.shape[-1] < 2:
        return values
    sums = four.detach().sum(-1)
    off = (sums - 1).abs().max()
    if (four < 0).any() or not off <= 1e3 * torch.finfo(sums.dtype).eps:
        return values
    heads.passed["hook_pattern"] = heads.hook_pattern(four)
    return heads.passed["hook_pattern"].reshape(values.shape)


def _softmax(heads: HeadPoints, function: Callable, scores: Tensor, *rest: Any) -> Tensor:
    """Softmax over keys through the hook points, as [batch, head, query, key]; other shapes get the plain function."""
    shape, four = scores.shape, _four_axes(heads, scores)
    if four is None:
        return function(scores, *rest)
    passed = heads.passed
    if "hook_k of one" in passed and hasattr(heads, "hook_k"):
        changed = einsum(passed["hook_q"], passed["hook_k of one"], SCORE_PRODUCTS)[
            ..., : four.shape[-1]
        ]
        if changed.shape == four.shape:  # a learned sink is one more key
            four = four + heads.factor * changed
    put_in = heads.through("hook_attn_scores", four).reshape(shape)
    pattern = heads.through("hook_pattern", function(put_in, *rest).reshape(four.shape))
    passed["hook_pattern"] = pattern
    return pattern.reshape(shape)


def _attention(
    heads: HeadPoints,
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
    """Scores under an additive mask, or under a boolean mask that is true for readable keys."""
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _multihead(heads: HeadPoints, **given: Any) -> tuple[Tensor, Tensor | None] | None:
    """torch.nn.MultiheadAttention computed step by step; None if it uses an unsupported option."""
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
        heads.through(name, F.linear(x, W, b).unflatten(-1, (n_heads, -1)).transpose(0, 1))
        for name, x, W, b in zip(PROJECTED, inputs, weights, biases, strict=True)
    )
    scores = einsum(q, k, "batch query head d, batch key head d -> batch head query key")
    scores = scores / q.shape[-1] ** 0.5
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, n_heads))
    for each in (mask, None if padding is None else padding[:, None, None]):
        if each is not None:  # torch's boolean masks are true for unreadable keys
            scores = _masked(scores, ~each if each.dtype == torch.bool else each)
    pattern = _softmax(heads, partial(torch.softmax, dim=-1), scores)
    z = einsum(pattern, v, "batch head query key, batch key head d -> query batch head d")
    output = F.linear(z.flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    if not given["need_weights"]:
        return output, None
    return output, pattern.mean(1) if given["average_attn_weights"] else pattern
