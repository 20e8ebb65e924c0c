"""Settings that a running module shows and its state dict does not: tokens, keys, scores, positions, norms and activation.

Each is read from one run on a few prompts. What is not clear stays open, and is tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from einops import einsum
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from mechinterp.checkpoints.foreign.readings.assemble import Tried
from mechinterp.checkpoints.foreign.readings.choices import FINER_BASES, ROTARY_BASE
from mechinterp.checkpoints.modules.hooked import HookedModule
from mechinterp.checkpoints.modules.state import ModuleParts
from mechinterp.config import ModelConfig
from mechinterp.config.model import OVER_PAIRS
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.delta_layers import TINY
from mechinterp.models.hooked.explained import MASKED, Passed, caught, same
from mechinterp.models.hooked.followed import POINTS, PROJECTED, HeadPoints, by_linear_weights
from mechinterp.models.layers import (
    ACTIVATION_FUNCTIONS,
    SCORE_PRODUCTS,
    readable_keys,
    turned_by_position,
)

_NOTED = (*POINTS, "hook_z")
"""Hook points of a layer whose values are noted."""
OF_MASKS: Mapping[str, tuple[bool, bool]] = {
    "context": (True, False),
    "strict": (False, False),
    "causal": (False, True),
    "all": (True, True),
}
"""For masks of attention without a softmax: whether all tokens read the same keys, and whether the query reads itself. The
first that fits is taken: a query whose value is 0 may as well read itself."""
EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0)
"""Constants in norms that are tried after the module's own."""
_CLOSE = 1e-4
"""Largest relative difference at which a norm or an activation counts as recognised."""
_N_SHOWN_ON = 4
"""Number of prompts of the run."""


@torch.no_grad()
def shown_settings(
    module: HookedModule, parts: ModuleParts, batches: Sequence[Prompts]
) -> list[Tried]:
    """Settings that the module shows; several if it leaves open which of them holds.

    Args:
        batches: Prompts on which the module runs, of one length each; two lengths tell 1/L from a fixed factor.
    """
    few = [each[:_N_SHOWN_ON].to(module.model.cfg.dtype) for each in batches]
    runs = [_passed(module, each) for each in few]
    heads = [cast(HeadPoints, block.attn) for block in module.model.blocks]
    settings: dict[str, Any] = {
        "passes": len(module.hooked.blocks) // len(set(module.hooked.blocks))
    }
    mask = _linear_mask(heads, runs)
    settings |= _keys_and_layout(mask, runs[0], few[0])
    settings |= _scores_and_positions(module, runs[0], few[0])
    settings |= {**_norms(module, parts), **_activation(module, parts, few[0])}
    if mask:
        lengths = [each.x.shape[1] for each in few]
        return [{**settings, **each} for each in _linear_scores(mask, runs, lengths)]
    return [settings]


def _passed(module: HookedModule, prompts: Prompts) -> list[Passed]:
    """Values at the hook points of every layer, and outputs of the projections of queries, keys and values that have no point."""
    with ExitStack() as stack:
        heads = [cast(HeadPoints, block.attn) for block in module.model.blocks]
        every = [stack.enter_context(caught(each, _NOTED)) for each in heads]
        for own, passed in zip(heads, every, strict=True):
            own.hook_z.add_hook(partial(_note_projected, heads=own, to=passed))
        module.predict(prompts)
    return list(every)


def _note_projected(
    z: Tensor, hook: HookPoint, heads: HeadPoints, to: dict[str, list[Tensor]]
) -> None:
    """Hook that records the outputs of projections that have no hook point."""
    for name in PROJECTED:
        if name in heads.passed and not hasattr(heads, name):
            to[name].append(heads.passed[name].detach())


def _linear_mask(heads: Sequence[HeadPoints], runs: Sequence[Sequence[Passed]]) -> str:
    """Mask of attention without a softmax, the same in all layers; "" if there is none."""
    if any(not each.mask for each in heads):
        return ""
    every = [passed for run in runs for passed in run]
    masks = (*OF_MASKS, *dict.fromkeys(each.mask for each in heads))
    return next((mask for mask in masks if all(_linear_factor(mask, p) for p in every)), "")


def _keys_and_layout(mask: str, run: Sequence[Passed], prompts: Prompts) -> Tried:
    """Layout of the tokens, and the keys that they read."""
    seen = [_read(mask, passed) for passed in run]
    read = [each for each in seen if each is not None]
    if len(read) < len(run) or len({each.shape for each in read}) > 1:
        return {}
    n_tokens, length = read[0].shape[-1], prompts.x.shape[1]
    layouts = {length + 1: "pairs", 2 * length + 1: "in_turn"}
    if n_tokens not in layouts:
        return {}
    found: dict[str, str | float | bool | None] = {"layout": layouts[n_tokens]}
    *first, last = read
    for context, own in product((False, True), repeat=2):
        keys = readable_keys(n_tokens, ModelConfig(context_only=context, attend_to_self=own))
        # After the last layer only the query is read.
        if torch.equal(last[-1], keys[-1]) and all(torch.equal(each, keys) for each in first):
            return found | ({"attend_to_self": own} | ({"context_keys": context} if first else {}))
    return found


def _read(mask: str, passed: Passed) -> Tensor | None:
    """Keys that each token reads, [query, key]; None if heads or prompts differ, or if it is unknown."""
    if mask:  # without what the weights are divided by
        context, own = OF_MASKS[mask.partition(",")[0]]
        config = ModelConfig(context_only=context, attend_to_self=own)
        return readable_keys(passed["hook_q"][0].shape[1], config)
    if passed["hook_attn_scores"]:
        reads = passed["hook_attn_scores"][0] > MASKED
    elif passed["hook_pattern"]:
        reads = passed["hook_pattern"][0] > 0
    else:
        return None
    same_for_all = torch.equal(reads, reads[:1, :1].expand_as(reads))
    n_tokens = passed["hook_k"][0].shape[1] if passed["hook_k"] else reads.shape[-1]
    beyond = (0, n_tokens - reads.shape[-1])  # tokens that no token reads
    return F.pad(reads[0, 0].cpu(), beyond) if same_for_all else None


def _scores_and_positions(module: HookedModule, run: Sequence[Passed], prompts: Prompts) -> Tried:
    """Score function, its factor, and positions, as far as queries, keys and scores show them."""
    plain: Tried = {"positions": "none"} if _without_positions(module, prompts) else {}
    if not all(passed["hook_attn_scores"] for passed in run):
        return plain
    found: Tried = {"score": "softmax"}
    if not all(passed["hook_q"] and passed["hook_k"] for passed in run):
        return found
    width = run[0]["hook_q"][0].shape[-1]
    turns = (
        []
        if width % 2
        else [(b, a) for b, a in product((ROTARY_BASE, *FINER_BASES), (False, True))]
    )
    for turn in (None, *turns):
        factors = torch.tensor([_factor(turn, passed) for passed in run])
        if not (factors > 0).all() or not same(factors, factors[:1].expand_as(factors)):
            continue
        if turn is not None:
            plain = {
                "positions": "rotary",
                "rotary_base": turn[0],
                "rotary_adjacent_pairs": turn[1],
            }
        return {**found, **plain, "scale": factors[0].item()}
    return found


def _factor(turn: tuple[float, bool] | None, passed: Passed) -> float:
    """Factor between the scores and the products of queries and keys; 0 if they are not proportional.

    Args:
        turn: Base of rotary positions, and whether adjacent entries turn together; None: no rotation.
    """
    (q,), (k,), (scores,) = (passed[n] for n in ("hook_q", "hook_k", "hook_attn_scores"))
    config = ModelConfig()
    if turn is not None:
        config = ModelConfig(
            rotary_dim=q.shape[-1], rotary_base=turn[0], rotary_adjacent_pairs=turn[1]
        )
    products = einsum(turned_by_position(q, config), turned_by_position(k, config), SCORE_PRODUCTS)[
        ..., : scores.shape[-1]
    ]
    read = scores > MASKED
    s, p = scores[read].double(), products[read].double()
    factor = (s @ p) / (p @ p).clamp_min(TINY)
    return factor.item() if same((factor * p).to(scores), s.to(scores)) else 0.0


def _without_positions(module: HookedModule, prompts: Prompts) -> bool:
    """True if equal tokens at different positions are equal before the first layer."""
    alike = Prompts(  # type: ignore[call-arg]
        *(each[:, :1].expand_as(each) for each in (prompts.x, prompts.y)),
        prompts.x_query,
        prompts.y_query,
        prompts.y_query_clean,
        None,
    )
    _, (stream,) = module.hooked.activations(alike, ["blocks.0.hook_resid_pre"])
    length = prompts.x.shape[1]
    if stream.shape[1] not in (length + 1, 2 * length + 1):
        return False
    step = 1 if stream.shape[1] == length + 1 else 2
    rows = stream[:, : step * length : step]
    return same(rows, rows[:, :1].expand_as(rows))


def _linear_scores(
    mask: str, runs: Sequence[Sequence[Passed]], lengths: Sequence[int]
) -> list[Tried]:
    """Scores of attention without a softmax whose factors are those that the layers show at each length."""
    factors = []
    for run in runs:
        each = torch.tensor([_linear_factor(mask, passed) for passed in run])
        if not same(each, each[:1].expand_as(each)):
            return [{}]
        factors.append(each[0].item())
    if mask not in OF_MASKS:
        return [{"score": "linear/L", "scale": factors[0]}] if factors[0] > 0 else [{}]
    context, own = OF_MASKS[mask]
    one_row = len(runs[0]) == 1  # the query's alone
    numbers: dict[str, Sequence[int]] = {"linear": [1] * len(lengths)}
    if context or one_row:
        numbers["linear/L"] = [length + own for length in lengths]
    if own or not (context or one_row):
        numbers[OVER_PAIRS] = lengths
    fits: list[Tried] = []
    for score, count in numbers.items():
        scales = torch.tensor([f * n for f, n in zip(factors, count, strict=True)])
        if same(scales, scales[:1].expand_as(scales)) and scales[0] > 0:
            fits.append({"score": score, "scale": scales[0].item()})
    return fits or [{}]


def _linear_factor(mask: str, passed: Passed) -> float:
    """Factor between a layer's outputs and the sums of values times q.k; 0 if they are not proportional."""
    q, k, v, z = (passed[n][0] for n in ("hook_q", "hook_k", "hook_v", "hook_z"))
    _, expected = by_linear_weights(q, k, v, mask)
    factor = (z.double() * expected).sum() / expected.double().square().sum().clamp_min(TINY)
    return factor.item() if same(factor.to(z) * expected, z) else 0.0


def _norms(module: HookedModule, parts: ModuleParts) -> Tried:
    """Place, kind and constant of the norms."""
    own, places = module.model.module, {each.place for each in parts.blocks}
    found: dict[str, str | float | bool | None] = {}
    if len(places) == 1 and (place := places.pop()) is not None:
        found["norm"] = place
    paths = [path for each in parts.blocks for path in each.norms]
    paths += [path for path, part in parts.ends.items() if part == "final_norm"]
    kinds = {_kind_of_norm(own.get_submodule(path)) for path in paths}
    if len(kinds) == 1 and (kind := kinds.pop()) is not None:
        found |= {"rms_norm": kind[0], "norm_eps": kind[1]}
    return found


def _kind_of_norm(part: nn.Module) -> tuple[bool, float] | None:
    """Kind of a norm (True: by root mean square) and its constant; None if it is neither kind."""
    weight, bias = getattr(part, "weight", None), getattr(part, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    # Small numbers, so that the constant counts.
    numbers = 0.01 * torch.randn(8, len(weight), generator=generator, device="cpu")
    values = numbers.to(weight)
    output, shape = part(values), weight.shape
    stated = (getattr(part, name, None) for name in ("eps", "variance_epsilon"))
    for eps in (*(each for each in stated if isinstance(each, float)), *EPS):
        layer = F.layer_norm(values, shape, weight, bias, eps)
        if (layer - output).abs().max() <= _CLOSE * output.abs().max():
            return False, eps
        mean_square = F.rms_norm(values, shape, weight, eps)
        if (mean_square - output).abs().max() <= _CLOSE * output.abs().max():
            return True, eps
    return None


def _activation(module: HookedModule, parts: ModuleParts, prompts: Prompts) -> Tried:
    """Activation of the MLPs."""
    mlps = [each.mlp for each in parts.blocks if each.mlp]
    with _around(module, mlps) as seen:
        module.predict(prompts)
    names = [
        {
            name
            for name, function in ACTIVATION_FUNCTIONS.items()
            if pre.shape == post.shape
            and (function(pre) - post).abs().max() <= _CLOSE * post.abs().max()
        }
        for pre, post in zip(seen["pre"], seen["post"], strict=False)
    ]
    shared = set.intersection(*names) if names else set()
    return (
        {"activation": next(name for name in ACTIVATION_FUNCTIONS if name in shared)}
        if shared
        else {}
    )


@contextmanager
def _around(
    module: HookedModule, mlps: Sequence[Sequence[str]]
) -> Iterator[dict[str, list[Tensor]]]:
    """Context that records the output of the first matrix of each MLP, and the input of the second one."""
    seen: dict[str, list[Tensor]] = {"pre": [], "post": []}
    with ExitStack() as hooks:
        for first, second in mlps:
            own = module.model.module.get_submodule
            hooks.enter_context(
                own(first).register_forward_hook(lambda *args: seen["pre"].append(args[2].clone()))
            )
            hooks.enter_context(
                own(second).register_forward_pre_hook(
                    lambda _, args: seen["post"].append(args[0].clone())
                )
            )
        yield seen
