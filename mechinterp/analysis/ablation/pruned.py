"""Weights without the masked heads, and a checkpoint of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool

from mechinterp.analysis.ablation.pruning_rules import checked, masked_by
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.weights import Weights

SAVED_WITHIN = 1e-5
"""Largest difference between the saved and the masked model, relative to the largest prediction."""


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """Weights without the dropped heads, with as many heads per layer as the largest layer needs.

    Raises:
        ValueError: If `kept` does not have the model's shape, or keeps no head.
    """
    kept = checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
) -> Checkpoint:
    """Save the pruned model as a checkpoint, and check that it predicts as the masked model.

    Its heads are renumbered in the order of `kept_heads` in its origin.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts on which both predictions are compared.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model predicts otherwise.
    """
    checkpoint = checkpoint_of(checkpoint, "save_pruned")
    weights = pruned_weights(checkpoint.weights, kept)
    expected = checkpoint.predictor.run(prompts, [masked_by(kept)])[0]
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    save(
        path,
        replace(checkpoint.config, model=weights.model),
        weights,
        step=checkpoint.step,
        assumed=checkpoint.assumed_and_doubt,
        origin={"pruned_from": checkpoint.name, "kept_heads": heads},
    )
    saved = load(path)  # its predictions are checked below
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((saved.predictor.run(prompts)[0] - expected).abs().max() / size).item()
    if not error <= SAVED_WITHIN:
        raise ValueError(
            f"{path}: the saved model must predict as the masked model to {SAVED_WITHIN}, got a difference of {error:.2g}."
        )
    return saved
