"""Pruning of heads: rules that choose heads, the cost of masking the others, and the smaller model
itself."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float

from mechinterp.analysis.ablation.cross_fitting import (
    SPLITS,
    MaskedErrors,
    Rule,
    checked,
    choices_on_halves,
    choose,
    masked_by,
)
from mechinterp.analysis.ablation.masked_risk import single_masks
from mechinterp.analysis.ablation.orders import greedy_heads, pruning_curves
from mechinterp.analysis.ablation.pruning_result import FULL, Pruning, PruningByRules
from mechinterp.analysis.stats import carried_by_few, estimates, halves, mean_and_sem
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
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps all heads of the first layer, and the head with the smallest rise of each
    later layer."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Control: keeps the head with the largest rise of the first layer, and all heads of the later
    layers."""
    kept = rise.argmax(1)[:, None] == np.arange(rise.shape[1])
    kept[1:] = True
    return kept


SAVED_WITHIN = 1e-5
"""Largest difference between the saved and the masked model, relative to the largest prediction."""
RULES: dict[str, Rule] = {
    "best-later": best_head_later,
    "least-later": least_head_later,
    "best-first": best_head_first,
}
GREEDY_HEADS = 32
"""Largest number of heads with a greedy search, which needs n (n + 1) / 2 masks."""
LEAST_PART = 64
"""Smallest number of prompts in a part, if there are as many."""


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
    errors: MaskedErrors, rule: Rule, *, sequential: bool = False, splits: int = SPLITS
) -> Pruning:
    """Heads that a rule keeps and their cost, chosen on all prompts and on halves of them."""
    prompts = np.ones(len(errors.prompts))
    kept, rise = choose(errors, rule, prompts > 0, sequential=sequential)
    choices = choices_on_halves(errors, rule, sequential=sequential, splits=splits)
    masks = [masked_by(each) for each in choices.kept]
    full, as_is = errors.of([[]]), errors.of(masks).T
    (full_refitted, full_fit), (refitted, fits) = errors.refitted([[]]), errors.refitted(masks)
    risk, sem = mean_and_sem(full_refitted[:, 0])
    costs = estimates(
        risk=choices.ratio(as_is, prompts),
        ratio=choices.ratio(as_is, full[:, 0]),
        refit_risk=choices.ratio(refitted.T, prompts, fits),
        refit_ratio=choices.ratio(refitted.T, full[:, 0], fits),
        full_risk=mean_and_sem(full[:, 0]),
        full_refit_risk=(risk, np.hypot(sem, full_fit[0])),
    )
    few = bool(carried_by_few(choices.crossed(as_is)))
    return Pruning(kept=kept, rise=rise, chosen=choices.chosen, carried_by_few=few, **costs)


def prune_by_rules(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> PruningByRules:
    """Excess risk as heads are masked for good: by rules that choose heads, and one head after
    another.

    For the rules the prompts are halved at random 8 times: heads are chosen on each half and
    measured on the other. ± is over prompts and choices. A new read-out is a cross-validated ridge
    regression on the stream at the query; it separates lost information from information that is
    only stored differently. One order follows the rises of the single masks on the first half of
    the prompts. The greedy order, for up to 32 heads, masks at each step the head whose loss costs
    least in addition to those before it. The risks of the curves use other prompts, a quarter of
    the second half. Nothing is retrained.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        n_prompts: None means 4096, or 512 for models with norms or MLPs; more if probes of a wide
            stream need more.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are fewer than 8 prompts, or too few for a read-out.
    See also:
        `prune`, `ablate_heads`.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> found = prune_by_rules(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=64)
        >>> found.rules, found.curves.orders
        (('full model',), ('greedy', 'least rise first'))
    """
    prompts = evaluation_prompts(
        source, prompts, n_prompts=n_prompts, seed=seed, fitted=stream_width(source)
    )
    predictor = predictor_of(source)
    scored, measured = halves(prompts)
    heads = predictor.heads
    rises = single_masks(predictor, scored, progress=progress)[1].mean(0).ravel()
    orders = {"least rise first": [heads[i] for i in rises.argsort(kind="stable")]}
    if len(heads) <= GREEDY_HEADS:
        chosen_on, _ = halves(_part(scored, 8))
        orders = {"greedy": greedy_heads(predictor, chosen_on, progress=progress), **orders}
    curves = pruning_curves(predictor, _part(measured, 4), orders, progress=progress)
    errors = MaskedErrors(predictor, prompts, progress)
    full = pruned_by(errors, lambda rise: np.ones(rise.shape, dtype=bool))
    by_rule = {name: pruned_by(errors, rule) for name, rule in RULES.items()}
    pruned = {name: each for name, each in by_rule.items() if not each.kept.all()}
    return PruningByRules({FULL: full, **pruned}, curves)


def _part(prompts: Prompts, part: int) -> Prompts:
    """The first prompts, one in `part` but at least LEAST_PART; an even number, because prompts may
    swap in pairs."""
    size = min(max(len(prompts) // part, LEAST_PART), len(prompts))
    return prompts[: size // 2 * 2]


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
