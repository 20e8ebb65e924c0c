"""Linear attention as a map of the tokens: masks and streams without a run token by token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.memory import chunks, together
from mechinterp.models.hooked.masks import Head, by_layers
from mechinterp.models.stacks import DeepWeights, deep_bytes, linear_pass
from mechinterp.progress import ProgressCallback, no_progress

CHUNK = 256  # small enough for a processor's cache, and even


def masked_predictions(
    stack: DeepWeights,
    prompts: Prompts,
    masks: Sequence[Sequence[Head]],
    *,
    progress: ProgressCallback = no_progress,
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask, a masked head's output being zero."""
    by_layer = [by_layers(heads) for heads in masks]
    parts = []
    for rows in progress(_chunks(stack, prompts), "masking heads (zero)"):
        short = linear_pass(stack, prompts[rows])
        parts.append(torch.stack([short.prediction(heads) for heads in by_layer]))
    return torch.cat(parts, dim=1)


def streams(
    stack: DeepWeights,
    prompts: Prompts,
    *,
    heads: Sequence[Head],
    positions: Sequence[int],
) -> Float[Tensor, "layer batch pos d_model"]:
    """The stream before each layer and after the last, with heads masked."""
    parts = []
    for rows in _chunks(stack, prompts):
        chunk = prompts[rows]
        tokens = chunk.tokens[:, list(positions)]
        maps = linear_pass(stack, chunk).maps(by_layers(heads))
        parts.append(torch.stack([tokens @ T for T in maps]))
    return torch.cat(parts, dim=1)


def query_streams(
    stack: DeepWeights, prompts: Prompts, layer: int, *, heads: Sequence[Head]
) -> Float[Tensor, "batch pos d_model"]:
    """The stream after some layers of every covariate of a prompt run as its query, the query's own last."""
    parts = []
    for rows in _chunks(stack, prompts):
        chunk = prompts[rows]
        x = torch.cat([chunk.x, chunk.x_query[:, None]], dim=1)
        T = linear_pass(stack, chunk).maps(by_layers(heads))[layer]
        parts.append(x @ T[:, : stack.d_x])
    return torch.cat(parts)


def _chunks(stack: DeepWeights, prompts: Prompts) -> list[slice]:
    length = prompts.x.shape[1]
    what = f"{stack.n_layers} layers on prompts of {length} pairs"
    return chunks(len(prompts), together(deep_bytes(stack, length + 1), what, most=CHUNK))
