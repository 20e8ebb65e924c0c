"""Pruning of heads by every rule, and one head after another in orders."""

from dataclasses import replace

import numpy as np

from mechinterp.analysis.ablation.cross_fitting import SPLITS, Choices, MaskedErrors
from mechinterp.analysis.ablation.masked_risk import single_masks
from mechinterp.analysis.ablation.orders import greedy_heads, pruning_curves
from mechinterp.analysis.ablation.pruning import RULES, pruned_by, pruning_of
from mechinterp.analysis.ablation.pruning_result import FULL, Pruning
from mechinterp.analysis.stats import halves
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

GREEDY_HEADS = 32
"""Largest number of heads with a greedy search, which needs n (n + 1) / 2 masks."""
LEAST_PART = 64
"""Smallest number of prompts in a part, if there are as many."""


def prune_by_rules_and_orders(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Pruning:
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
        >>> found = prune_by_rules_and_orders(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=64)
        >>> found.curves.orders
        ('greedy', 'least rise first')
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
    return replace(prune_by_rules(predictor, prompts, progress=progress), curves=curves)


def _part(prompts: Prompts, part: int) -> Prompts:
    """The first prompts, one in `part` but at least LEAST_PART; an even number, because prompts may
    swap in pairs."""
    size = min(max(len(prompts) // part, LEAST_PART), len(prompts))
    return prompts[: size // 2 * 2]


def prune_by_rules(
    source: Source,
    prompts: Prompts,
    *,
    splits: int = SPLITS,
    progress: ProgressCallback = no_progress,
) -> Pruning:
    """Costs of the rules in `RULES` that prune this model, next to the full model, measured as in
    `prune`.

    Args:
        prompts: Prompts to measure risks on; more than the stream is wide.
        splits: Number of random halvings.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are too few prompts for a read-out, or too few splits.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> model = gradient_descent_model([0.5, 0.3], d_x=4)
        >>> prune_by_rules(model, evaluation_prompts(model, n_prompts=64)).rules
        ('full model',)
    """
    predictor = predictor_of(source)
    errors = MaskedErrors(predictor, prompts, progress)
    every = np.ones((predictor.n_layers, predictor.n_heads), dtype=bool)
    # No prompt was used in this choice.
    choices = Choices(every[None], np.ones(1), np.ones((1, len(prompts))))
    full = pruning_of(errors, every, np.zeros(every.shape), choices)
    by_rule = {name: pruned_by(errors, rule, splits=splits) for name, rule in RULES.items()}
    pruned = {name: each for name, each in by_rule.items() if not each.kept.all()}
    return replace(next(iter(pruned.values()), full), by_rule={FULL: full, **pruned})
