"""Masks of one attention layer in closed form: heads' outputs add up, so every mask is a partial sum."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechinterp.icl.prompts import Prompts
from mechinterp.models.heads import head_outputs
from mechinterp.models.hooked.masks import Head, swapped
from mechinterp.models.weights import Weights
from mechinterp.progress import progress

CHUNK_OF_ONE_LAYER = 4096


def masked_predictions(
    weights: Weights, prompts: Prompts, masks: Sequence[Sequence[Head]], *, method: str
) -> Float[Tensor, "mask batch d_y"]:
    """Predictions under each mask; a masked head's output becomes 0, its mean over prompts, or another prompt's output."""
    starts = progress(range(0, len(prompts), CHUNK_OF_ONE_LAYER), f"masking heads ({method})")
    parts = [head_outputs(weights, prompts[start : start + CHUNK_OF_ONE_LAYER]) for start in starts]
    outputs = torch.cat(parts)  # [batch, head, d_y]
    instead = {
        "zero": lambda: torch.zeros_like(outputs[:1]),
        "mean": lambda: outputs.double().mean(0, keepdim=True).to(outputs),
        "resample": lambda: swapped(outputs),
    }[method]()
    full, changed = outputs.sum(1), outputs - instead
    predictions = torch.stack([_without(full, outputs, instead, changed, heads) for heads in masks])
    return predictions + weights.output_bias


def _without(
    full: Tensor, outputs: Tensor, instead: Tensor, changed: Tensor, heads: Sequence[Head]
) -> Float[Tensor, "batch d_y"]:
    """Sum of the outputs with masked heads replaced. Exact if the masked heads write nothing or all heads are masked."""
    masked = sorted({head for _, head in heads})
    if 2 * len(masked) <= outputs.shape[1]:
        return full - changed[:, masked].sum(1)
    kept = [head for head in range(outputs.shape[1]) if head not in masked]
    return outputs[:, kept].sum(1) + instead[:, masked].sum(1)
