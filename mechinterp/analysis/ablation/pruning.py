"""Pruning of heads: rules that choose heads, the cost of masking the others, and the smaller model
itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float

from mechinterp.analysis.ablation.cross_fitting import (
    SPLITS,
    Choices,
    MaskedErrors,
    Rule,
    checked,
    choices_on_halves,
    choose,
    masked_by,
)
from mechinterp.analysis.ablation.pruning_result import Pruning
from mechinterp.analysis.stats import carried_by_few, estimates, mean_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress


def best_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Keeps all heads of the first layer, and the head with the largest rise of each later layer.

    Example:
        >>> best_head_later(np.array([[1.0, 2.0], [1.0, 2.0], [0.0, -1.0]])).tolist()
        [[True, True], [False, True], [True, False]]
    """
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps all heads of the first layer, and the head with the smallest rise of each
    later layer."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps the head with the largest rise of the first layer, and all heads of the later
    layers."""
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[1:] = True
    return kept


SAVED_WITHIN = 1e-5
"""Largest difference between the saved and the masked model, relative to the largest prediction."""
RULES: dict[str, Rule] = {
    "best-later": best_head_later,
    "least-later": least_head_later,
    "best-first": best_head_first,
}


def prune(
    source: Source,
    prompts: Prompts | None = None,
    *,
    rule: Rule = best_head_later,
    sequential: bool = False,
    splits: int = SPLITS,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Pruning:
    """Excess risk of a model without the heads that a rule drops, as it is and with a new read-out.

    Heads are scored by zero ablation. `kept` is chosen on all prompts, so measure it on others. The
    risks are cross-fitted: the prompts are halved at random `splits` times, heads are chosen on
    each half, and the error of a prompt is its mean over the choices that did not use it. The
    standard error is

    sqrt(SEM^2 + V / 2 + F^2),

    with SEM that of the mean of these errors over prompts (paired, by the delta method, for
    ratios), V the variance of the risk (or ratio) over the 2 splits choices, and F the error of the
    fit of a new read-out. V is 0 if the choice is clear. V is halved, not divided by the number of
    halves, because halves of the same prompts overlap: V / 2 is the variance of the mean over
    choices between two equally good heads.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        rule: Function from the rises to the kept heads, such as `best_head_later`.
        sequential: True: layers are pruned one after another from the first, and the heads of a
            layer are scored with the earlier layers pruned. False: all heads are scored on the full
            model.
        splits: Number of random halvings.
        progress: Optional progress callback.
    Raises:
        ValueError: If the rule keeps no head or its mask has another shape, or there are too few
            prompts or splits.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who keep all heads of the first layer and
        the best head of each later layer. The scores and the read-out are choices made here.
    See also:
        `ablate_heads`, `fine_tune`.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> prune(preprocess_then_optimise_model([0.5], d_x=4), n_prompts=64).ratio
        1.0
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    errors = MaskedErrors(predictor_of(source), prompts, progress)
    return pruned_by(errors, rule, sequential=sequential, splits=splits)


def pruned_by(
    errors: MaskedErrors, rule: Rule, *, sequential: bool = False, splits: int
) -> Pruning:
    """Heads that a rule keeps and their cost, chosen on all prompts and on halves of them."""
    every = np.ones(len(errors.prompts), dtype=bool)
    kept, rise = choose(errors, rule, every, sequential=sequential)
    choices = choices_on_halves(errors, rule, sequential=sequential, splits=splits)
    return pruning_of(errors, kept, rise, choices)


def pruning_of(
    errors: MaskedErrors,
    kept: Bool[np.ndarray, "layer head"],
    rise: Float[np.ndarray, "layer head"],
    choices: Choices,
) -> Pruning:
    """Result of a choice of heads: its cost on prompts that were not used in the choice, next to
    the full model."""
    masks = [masked_by(each) for each in choices.kept]
    full, as_is = errors.of([[]])[:, 0], errors.of(masks).T
    (full_refitted, (full_fit,)), (refitted, fits) = errors.refitted([[]]), errors.refitted(masks)
    full_refit_risk, full_refit_sem = mean_and_sem(full_refitted[:, 0])
    costs = estimates(
        risk=choices.risk(as_is),
        ratio=choices.ratio(as_is, full),
        refit_risk=choices.risk(refitted.T, fits),
        refit_ratio=choices.ratio(refitted.T, full, fits),
        full_risk=mean_and_sem(full),
        full_refit_risk=(full_refit_risk, np.hypot(full_refit_sem, full_fit)),
    )
    few = bool(carried_by_few(choices.crossed(as_is)))
    return Pruning(kept=kept, rise=rise, chosen=choices.chosen, carried_by_few=few, **costs)


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """Weights without the dropped heads, with as many heads per layer as the largest layer needs.

    Raises:
        ValueError: If `kept` does not have the model's shape, or keeps no head.
    """
    kept = checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


def pruned_origin(
    checkpoint: Checkpoint, kept: Bool[np.ndarray, "layer head"]
) -> dict[str, object]:
    """Origin entry of the checkpoint of a pruned model; its heads are renumbered in the order of
    `kept_heads`."""
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    return {"pruned_from": checkpoint.name, "kept_heads": heads}


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
) -> Checkpoint:
    """Save the pruned model as a checkpoint, and check that it predicts as the masked model.

    Args:
        kept: Mask of kept heads, as in `Pruning`.
        prompts: Prompts on which both predictions are compared.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model does not predict as the masked model.
    """
    predictor = checkpoint_of(checkpoint, "save_pruned").predictor
    gone = masked_by(checked(kept, (predictor.n_layers, predictor.n_heads)))
    weights = pruned_weights(checkpoint.weights, kept)
    save(
        path,
        replace(checkpoint.config, model=weights.model),
        weights,
        step=checkpoint.step,
        assumed=checkpoint.assumed,
        origin=pruned_origin(checkpoint, kept),
    )
    saved = load(path, anyway=True)  # Its predictions are checked below.
    own, expected = saved.predictor.run(prompts)[0], predictor.run(prompts, [gone])[0]
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((own - expected).abs().max() / size).item()
    if not error <= SAVED_WITHIN:
        raise ValueError(
            f"{path}: the saved model must predict as the masked model to {SAVED_WITHIN}, got a difference of {error:.2g}."
        )
    return saved


def _only(heads: np.ndarray, n_heads: int) -> np.ndarray:
    """Mask with one head per layer."""
    return heads[:, None] == np.arange(n_heads)
