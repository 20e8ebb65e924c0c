"""Masks and streams of linear attention, computed as a linear map of the tokens instead of a pass over them."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import CHUNK, chunks, together
from mechinterp.models.hooked.masks import Head, by_layers, mean_z, swapped
from mechinterp.models.run.linear_pass import (
    LinearPass,
    ReplacedPass,
    linear_pass,
    maps_of,
    moment_of,
)
from mechinterp.models.weights import Weights
from mechinterp.progress import progress

NEAR = 2**25
"""Largest size of a chunk of prompts in bytes, small enough for the processor's cache."""


def masked_predictions(
    weights: Weights, prompts: Prompts, masks: Sequence[Sequence[Head]], *, method: str = "zero"
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask; z of a masked head is 0, its mean over the prompts, or that of another prompt."""
    by_layer, parts = [by_layers(heads) for heads in masks], []
    means: list[Tensor] = []
    replaces = method != "zero"
    rows_of_chunks = _chunks(weights, prompts, with_z=replaces)
    if method == "mean":
        runs = (linear_pass(weights, prompts[rows]) for rows in rows_of_chunks)
        pairs = zip(runs, rows_of_chunks, strict=True)
        means = mean_z((run.every_z(prompts[rows]) for run, rows in pairs), len(prompts))
    for rows in progress(rows_of_chunks, f"masking heads ({method})"):
        chunk = prompts[rows]
        short = linear_pass(weights, chunk)
        run: LinearPass | ReplacedPass = short
        if method == "resample":
            run = ReplacedPass(short, chunk, [swapped(z) for z in short.every_z(chunk)])
        elif method == "mean":
            run = ReplacedPass(short, chunk, [mean.to(chunk.x)[None] for mean in means])
        parts.append(torch.stack([run.prediction(heads) for heads in by_layer]))
    return torch.cat(parts, dim=1)


def streams(
    weights: Weights,
    prompts: Prompts,
    *,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> Float[Tensor, "layer batch pos d_model"]:
    """Stream before each layer and after the last, with heads masked."""
    parts = []
    for rows in _chunks(weights, prompts):
        chunk = prompts[rows]
        tokens = chunk.tokens[:, list(positions)]
        maps, _, _ = maps_of(weights, moment_of(weights, chunk), weights.n_layers, heads)
        parts.append(torch.stack([tokens @ T for T in maps]))
    return torch.cat(parts, dim=1)


def query_writes(weights: Weights, prompts: Prompts) -> Float[Tensor, "layer batch head d_model"]:
    """Output of each head at the query."""
    parts, heads = [], (weights.n_heads, weights.d_head)
    for rows in _chunks(weights, prompts):
        run = linear_pass(weights, prompts[rows])
        z = [(run.x_query[:, None] @ z[:, : weights.d_x]).unflatten(-1, heads) for z in run.z]
        each = [*(own[:, 0] for own in z), run.last_z()]
        parts.append(torch.stack(each).transpose(1, 2) @ weights.W_O)
    return torch.cat(parts, dim=2).transpose(1, 2)


def stack_bytes(weights: Weights, length: int) -> int:
    """Memory that one prompt of this many pairs takes while it runs through the layers, in bytes.

    Example:
        >>> from mechinterp.models.constructions.stack import stack_of_layers
        >>> nothing = torch.zeros(2, 1, 6, 3)
        >>> weights = stack_of_layers(nothing, nothing, nothing, nothing.mT, d_y=1, scale=1.0)
        >>> stack_bytes(weights, 40)
        4968
    """
    # Tokens, their second moment, and a map for each layer.
    n_tokens, d_token, d_model = length + 1, weights.d_x + weights.d_y, weights.d_model
    columns = weights.n_heads * weights.d_head
    maps = weights.n_layers * d_token * (d_model + 4 * columns)
    layer = d_token * (6 * columns + 2 * d_model) + 2 * columns * d_model
    return weights.dtype.itemsize * (3 * n_tokens * d_token + 2 * d_token**2 + maps + layer)


def _chunks(weights: Weights, prompts: Prompts, *, with_z: bool = False) -> list[slice]:
    """Slices of the prompts that run together in memory; `with_z`: z of all layers at every position is kept twice."""
    length = prompts.x.shape[1]
    what = f"{weights.n_layers} layers on prompts of {length} pairs"
    size = stack_bytes(weights, length)
    if with_z:
        columns = weights.n_layers * weights.n_heads * weights.d_head
        size += 2 * weights.dtype.itemsize * (length + 1) * columns
    return chunks(len(prompts), together(size, what, most=min(CHUNK, max(2, NEAR // size))))
