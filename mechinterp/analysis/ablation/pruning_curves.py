"""Pruning of heads by every rule, and head after head in orders."""

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
"""Most heads whose greedy order is searched: it takes n (n + 1) / 2 masks."""
LEAST_PART = 64
"""Prompts that no part of them goes below, if there are as many."""


def prune_by_rules_and_orders(
    source: Source,
    prompts: Prompts | None = None,
    *,
    n_prompts: int | None = None,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> Pruning:
    """What is left of a model as heads are masked for good: by rules that name what stays, and head after head.

    For the rules the prompts are halved at random 8 times, heads chosen on each half and measured on the other; ± is
    over prompts and over which heads were chosen. A new read-out is a ridge regression on the stream at the query,
    cross-validated: it tells what is lost from what has only moved. One order goes by the rises of the single masks
    on the first half of the prompts; the greedy one, searched for up to 32 heads, masks at each step the head that is
    missed least with those before it gone. The risks of the curves are those of other prompts, a quarter of the second
    half. Nothing is retrained.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are fewer than 8 prompts, or too few for a read-out.
    See also:
        `prune`, `greedy_order`.
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
    """The first of the prompts, one in `part` but no fewer than LEAST_PART; an even number, as they may swap."""
    size = min(max(len(prompts) // part, LEAST_PART), len(prompts))
    return prompts[: size // 2 * 2]


def prune_by_rules(
    source: Source,
    prompts: Prompts,
    *,
    splits: int = SPLITS,
    progress: ProgressCallback = no_progress,
) -> Pruning:
    """What those of `RULES` cost that prune this model at all, beside the full model, as `prune` measures it.

    Args:
        prompts: On which risks are measured; more than the stream is wide.
        splits: Number of random halvings.
        progress: Optional progress callback.
    Raises:
        ValueError: If there are too few prompts for a read-out, or splits.
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> model = gradient_descent_model([0.5, 0.3], d_x=4)
        >>> prune_by_rules(model, evaluation_prompts(model, n_prompts=64)).rules
        ('full model',)
    """
    predictor = predictor_of(source)
    errors = MaskedErrors(predictor, prompts, progress)
    every = np.ones((predictor.n_layers, predictor.n_heads), dtype=bool)
    # No prompt had a part in this choice.
    choices = Choices(every[None], np.ones(1), np.ones((1, len(prompts))))
    full = pruning_of(errors, every, np.zeros(every.shape), choices)
    by_rule = {name: pruned_by(errors, rule, splits=splits) for name, rule in RULES.items()}
    pruned = {name: each for name, each in by_rule.items() if not each.kept.all()}
    return replace(next(iter(pruned.values()), full), by_rule={FULL: full, **pruned})
