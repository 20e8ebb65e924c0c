"""Heads masked, against the loop that TransformerLens offers: `run_with_hooks` for every mask, at every position.

Plain and ours take the prompts in pieces of the same size, and both answers are compared. The plain loop goes
through a part of the prompts only, and its time counts as many times.
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mechinterp.analysis.ablation.ablate import ablate
from mechinterp.analysis.patching.edges import attribute_edges
from mechinterp.analysis.patching.pairing import InputPair, clean_and_corrupted
from mechinterp.config import ModelConfig, TaskConfig
from mechinterp.icl.prompts import Prompts, draw_prompts, generator_for
from mechinterp.memory import CHUNK
from mechinterp.models.constructions.one_layer import one_layer
from mechinterp.models.hooked.masks import Head, Values, mask_heads, swapped
from mechinterp.models.hooked.transformer import ICLTransformer
from mechinterp.models.run.predictor import predictor_of

N_PROMPTS, N_LAYERS, N_HEADS, TOLERANCE = 4096, 4, 8, 1e-5


def replacements(
    model: ICLTransformer, pieces: list[Tensor], method: str
) -> list[Values] | list[None]:
    """z of masked heads in each piece of the prompts, by layer; None: zeros."""
    if method == "zero":
        return [None] * len(pieces)
    caches = [model.run_with_cache(piece)[1] for piece in pieces]
    every = [[cache["z", layer] for layer in range(N_LAYERS)] for cache in caches]
    if method == "resample":
        return [[swapped(z) for z in of_piece] for of_piece in every]
    return [[torch.cat(z).mean(0) for z in zip(*every, strict=True)]] * len(pieces)


def by_hooks(
    model: ICLTransformer, prompts: Prompts, masks: list[list[Head]], method: str = "zero"
) -> Tensor:
    pieces = [prompts[start : start + CHUNK].tokens for start in range(0, len(prompts), CHUNK)]
    with torch.no_grad():
        values = replacements(model, pieces, method)
        outputs = []
        for heads in masks:
            hooks = [mask_heads(heads, values=each) for each in values]
            runs = zip(pieces, hooks, strict=True)
            outputs.append(
                torch.cat([model.run_with_hooks(p, fwd_hooks=h)[:, -1] for p, h in runs])
            )
    return torch.stack(outputs)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()


def deep_model(score: str) -> ICLTransformer:
    sizes = {"n_layers": N_LAYERS, "n_heads": N_HEADS, "d_model": 64, "d_head": 8}
    model = ICLTransformer(ModelConfig(**sizes, score=score, context_only=True), d_x=16, d_y=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5 * parameter.shape[-2] ** -0.5, generator=generator)
    return model


@pytest.mark.parametrize(
    ("score", "method", "what"),
    [
        ("linear/L", "zero", "of 8, linear scores"),
        ("linear/L", "mean", "of 8 set to its mean, linear scores"),
        ("linear/L", "resample", "of 8 resampled, linear scores"),
        ("softmax", "zero", "of 8, softmax scores"),
    ],
)
def test_every_head_of_a_deep_model(versus, score: str, method: str, what: str):
    model, task = deep_model(score), TaskConfig(d_x=16, context_length=32)
    prompts = draw_prompts(task, N_PROMPTS, generator=generator_for(0, "eval", 0))
    masks = [[(layer, head)] for layer in range(N_LAYERS) for head in range(N_HEADS)]
    part = prompts[: 2 * CHUNK]
    ours = predictor_of(model).run(part, masks, method=method)
    assert_same(ours, by_hooks(model, part, masks, method))
    versus(
        f"every head of 4 layers {what}, 4,096 prompts (plain: {len(part)})",
        lambda: predictor_of(model).run(prompts, masks, method=method),
        lambda: by_hooks(model, part, masks, method),
        work=N_PROMPTS / len(part),
        rounds=2,
    )


def by_path_patching(pair: InputPair) -> np.ndarray:
    """Mean effect of each edge by two runs of the whole model: what the receiver computes, and the model with it."""
    hooked, effects = pair.hooked.model, np.full(pair.edges.shape, np.nan)
    with torch.no_grad():
        full = pair.metric(hooked(pair.corrupted))
        for sender, receiver in np.argwhere(pair.edges):
            node, moved = pair.receivers[receiver], pair.moved[:, :, sender]
            read: dict[str, Tensor] = {}

            def add(stream, hook, moved=moved):
                return stream + moved

            def note(values, hook, read=read):
                read["values"] = values

            def put(values, hook, read=read, head=node.head):
                values = values.clone()
                values[:, :, head] = read["values"][:, :, head]
                return values

            hooks = [(node.stream, add), (node.hook, note)]
            hooked.run_with_hooks(pair.corrupted, fwd_hooks=hooks)
            output = hooked.run_with_hooks(pair.corrupted, fwd_hooks=[(node.hook, put)])
            effects[sender, receiver] = (pair.metric(output) - full).double().mean()
    return effects


@pytest.mark.parametrize("score", ["linear/L", "softmax"])
def test_every_edge_of_a_deep_model(versus, score: str):
    model, task = deep_model(score), TaskConfig(d_x=16, context_length=32)
    prompts = clean_and_corrupted(task, None, None, n_prompts=32, seed=0)
    every, exact = (
        InputPair.of(predictor_of(each).hooked, *prompts)
        for each in (model, copy.deepcopy(model).double())
    )
    part, exact = (
        replace(each, senders=each.senders[::8], moved=each.moved[:, :, ::8])
        for each in (every, exact)
    )
    # In float32 a squared distance is rounded by more than an edge moves it.
    patched = attribute_edges(exact.hooked, prompts[0], corrupted=prompts[1]).patched[::8]
    assert_same(*(torch.tensor(e)[exact.edges] for e in (patched, by_path_patching(exact))))
    versus(
        f"every edge between heads of 4 layers of 8, {score} scores, 32 prompts (plain: path patching, of one head in 8)",
        lambda: attribute_edges(model, prompts[0], corrupted=prompts[1]),
        lambda: by_path_patching(part),
        work=every.edges.sum() / part.edges.sum(),
        rounds=2,
    )


def test_every_subset_of_a_layer(versus):
    task, generator = TaskConfig(), torch.Generator().manual_seed(0)
    W_Q, W_K, W_V = (torch.randn(N_HEADS, 6, 6, generator=generator) / 6**0.5 for _ in range(3))
    W_O = torch.randn(N_HEADS, 6, 1, generator=generator) / 6**0.5
    weights = one_layer(W_Q, W_K, W_V, W_O, scale=6**-0.5)
    model = ICLTransformer.from_weights(weights, task=task)
    prompts = draw_prompts(task, N_PROMPTS, generator=generator_for(0, "eval", 0))
    part = prompts[:CHUNK]
    subsets = ablate(model, part, what="subsets")
    heads = predictor_of(model).heads
    masks = [[(n, h) for n, h in heads if f"L{n}H{h}" not in kept] for kept in subsets.rows["kept"]]
    risks = (by_hooks(model, part, masks) - part.y_query_clean).square().mean((1, 2))
    assert_same(torch.tensor(subsets.grid("risk")), risks.double())
    versus(
        f"all 256 subsets of a layer of 8 heads by run_with_hooks, 4,096 prompts (plain: {len(part)})",
        lambda: ablate(model, prompts, what="subsets"),
        lambda: by_hooks(model, part, masks),
        work=N_PROMPTS / len(part),
        rounds=2,
    )
