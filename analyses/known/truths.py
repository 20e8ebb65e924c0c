"""Answers of the suite, each computed in two ways."""

from collections.abc import Callable
from functools import partial
from itertools import combinations, permutations, product
from math import factorial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp import ablate, attribute_edges, predictor_of
from mechinterp.analysis.patching.graph import COMPONENTS
from mechinterp.analysis.patching.pairing import InputPair, put
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.icl.prompts import Prompts
from mechinterp.known.entries import edge_place
from mechinterp.models.hooked.masks import z_name

Hook = Callable[[Tensor, object], Tensor]


def edges(model: Checkpoint, clean: Prompts, corrupted: Prompts) -> tuple[np.ndarray, float]:
    """Effect of each edge, and the largest difference to `edges_again`."""
    again = edges_again(model, clean, corrupted)
    found = np.full_like(again, np.nan)
    for edge in attribute_edges(model, clean, corrupted=corrupted).to_frame().to_dict("records"):
        found[edge_place(edge["from"], edge["to"])] = edge["patched"]
    return found, _difference(found, again)


@torch.no_grad()
def edges_again(model: Checkpoint, clean: Prompts, corrupted: Prompts) -> np.ndarray:
    """Effect of each edge: the first head's clean output is added to what one input of the later head reads."""
    pair = InputPair.of(model.predictor.hooked, clean, corrupted)
    hooked: Any = pair.hooked.model
    n_layers, n_heads = pair.hooked.n_layers, pair.hooked.n_heads
    full = pair.metric(hooked(pair.corrupted))
    effects = np.full((len(COMPONENTS), n_layers, n_heads, n_layers, n_heads), np.nan)
    hooked.set_use_split_qkv_input(True)
    try:
        for layer, later in combinations(range(n_layers), 2):
            for (index, name), head, reader in product(
                enumerate(COMPONENTS), range(n_heads), range(n_heads)
            ):
                more = pair.moved[:, :, layer * n_heads + head]
                hook = partial(_added_at, at=reader, more=more)
                place = f"blocks.{later}.attn.hook_{name}_input"
                output = hooked.run_with_hooks(pair.corrupted, fwd_hooks=[(place, hook)])
                effects[index, layer, head, later, reader] = (pair.metric(output) - full).mean()
    finally:
        hooked.set_use_split_qkv_input(False)
    return effects


def _added_at(own: Tensor, hook: object, *, at: int, more: Tensor) -> Tensor:
    own = own.clone()
    own[:, :, at] += more
    return own


@torch.no_grad()
def heads(model: Checkpoint, clean: Prompts, corrupted: Prompts) -> tuple[np.ndarray, float]:
    """Effect of each head: its weighted averages z from the clean prompts in a run on the corrupted ones. And the largest
    difference to a run with the head's clean output added to the stream."""
    pair = InputPair.of(model.predictor.hooked, clean, corrupted, nodes="all")
    hooked: Any = pair.hooked.model
    full = pair.metric(hooked(pair.corrupted))
    _, cache = hooked.run_with_cache(pair.clean)
    ways = np.empty((2, pair.hooked.n_layers, pair.hooked.n_heads))
    moved = {node.name: pair.moved[:, :, index] for index, node in enumerate(pair.senders)}
    for layer, head in product(range(pair.hooked.n_layers), range(pair.hooked.n_heads)):
        name = z_name(layer)
        in_z = partial(put, at=(slice(None), head), values=cache[name])
        in_stream = partial(_added, more=moved[f"L{layer}H{head}"])
        out = name.replace("attn.hook_z", "hook_attn_out")
        for way, each in enumerate([(name, in_z), (out, in_stream)]):
            output = hooked.run_with_hooks(pair.corrupted, fwd_hooks=[each])
            ways[way, layer, head] = (pair.metric(output) - full).mean()
    return ways[0], _difference(*ways)


def _added(own: Tensor, hook: object, *, more: Tensor) -> Tensor:
    return own + more


def shapley(model: Checkpoint, prompts: Prompts) -> tuple[np.ndarray, float]:
    """Shapley value of each head of one layer for the excess risk, and the largest difference to `shapley_again`."""
    found = ablate(model, prompts, what="shapley").grid("shapley")
    return found, _difference(found, shapley_again(model, prompts))


@torch.no_grad()
def shapley_again(model: Checkpoint, prompts: Prompts) -> Float[np.ndarray, "1 head"]:
    """Shapley value of each head by its definition: the mean fall of the excess risk over all orders of adding heads."""
    n_heads = model.config.model.n_heads
    risks = {}
    for kept in product((False, True), repeat=n_heads):
        W_O = model.weights.W_O * torch.tensor(kept)[:, None, None]
        weights = model.weights.with_tensors(dict(model.weights.tensors) | {"attn.W_O": W_O})
        errors = predictor_of(weights).predict(prompts) - prompts.y_query_clean
        risks[kept] = errors.square().sum(-1).mean().item()
    values = np.zeros(n_heads)
    for order in permutations(range(n_heads)):
        kept = [False] * n_heads
        for head in order:
            before = risks[tuple(kept)]
            kept[head] = True
            values[head] += before - risks[tuple(kept)]
    return values[None] / factorial(n_heads)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.nanmax(np.abs(one - other)))
