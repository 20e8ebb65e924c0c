"""The cost of rules that name the heads to keep, and of masking head after head."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float

from mechinterp import figures
from mechinterp.analysis.ablation.cross_fitting import (
    SPLITS,
    MaskedErrors,
    choices_on_halves,
    choose,
    one_choice,
)
from mechinterp.analysis.ablation.masked_risk import single_masks
from mechinterp.analysis.ablation.orders import PruningCurves, greedy_heads, pruning_curves
from mechinterp.analysis.ablation.pruning import RULES, Pruning, cost_names, pruning_of
from mechinterp.analysis.number_format import with_error
from mechinterp.analysis.result import Table
from mechinterp.analysis.stats import halves
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

FULL = "full model"
WIDE = 100
"""Spread of the risks from which on bars stand on a logarithmic axis."""


@dataclass(frozen=True, eq=False, repr=False)
class RulePruning(Result):
    """What rules of which heads to keep cost, beside the full model, on the same prompts; nothing is retrained."""

    by_rule: Mapping[str, Pruning]
    """The full model first."""
    curves: PruningCurves | None = None
    """Head after head in orders that were chosen on other prompts; None if they were not measured."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules, the full model first."""
        return tuple(self.by_rule)

    @property
    def pruned(self) -> dict[str, Pruning]:
        """What each rule costs, without the full model."""
        return {name: each for name, each in self.by_rule.items() if name != FULL}

    @property
    def rule(self) -> tuple[str, ...]:
        """Rule that says which heads are kept: best-later keeps all heads of the first layer and of each later one
        the head that is missed most; least-later the one missed least, best-first the best of the first layer and all
        later heads: both are controls."""
        return self.rules

    def sentences(self) -> list[str]:
        """How many heads each order needs, what each rule costs, and where the choice hangs on the prompts."""
        told = []
        if self.curves is not None:
            counts = [f"{self.curves.needed(n)} in the order {n!r}" for n in self.curves.orders]
            told.append(
                f"Of {len(self.curves.heads[0])} heads, the excess risk stays within twice the full model's with "
                f"{' and '.join(counts)}."
            )
        costs = [
            f"{name} keeps {each.kept.sum()} and has {with_error(*each.to_read[:2])} times the risk{each.to_read[2]}"
            for name, each in self.pruned.items()
        ]
        few = [name for name, each in self.by_rule.items() if each.carried_by_few]
        told.append(
            f"By rule, {'; '.join(costs)}." if costs else "With one head, no rule prunes anything."
        )
        if few:
            told.append(
                f"Of {' and '.join(few)} one prompt in a hundred carries most of the risk as it is."
            )
        return told + self._by_chance()

    def _by_chance(self) -> list[str]:
        if "best-later" not in self.by_rule:
            return []
        often = self.by_rule["best-later"].chosen.max(1)
        layers = [f"{share:.0%} in layer {layer}" for layer, share in enumerate(often) if share < 1]
        if not layers:
            return []
        return [
            "Which head best-later keeps depends on the prompts: the one that is chosen most often is so in "
            f"{', '.join(layers)} of the choices on halves of them."
        ]

    def tables(self) -> dict[str, Table]:
        """Rules, curves, and how often each head is chosen."""
        tables = {"rules": Table(self.to_frame(), "Heads kept by rules")}
        if self.curves is not None:
            title = "Head after head, in orders chosen on other prompts"
            tables["pruning"] = Table(self.curves.to_frame(), title, per="order")
        if len(self.rules) > 1:
            tables["chosen"] = Table(self.chosen_frame(), "How often each head is kept", per="rule")
        return tables

    def figures(self) -> dict[str, go.Figure]:
        """Curves, rules, and how often each head is chosen."""
        drawn = {} if self.curves is None else {"pruning": self.curves.plot()}
        chosen = {"chosen": self.plot_chosen()} if len(self.rules) > 1 else {}
        return drawn | {"rules": self.plot()} | chosen

    def __repr__(self) -> str:
        ratios = [
            f"{name} {with_error(*each.to_read[:2])} times{each.to_read[2]}"
            for name, each in self.pruned.items()
        ]
        return f"RulePruning({', '.join(ratios) or FULL})"

    def to_frame(self) -> pd.DataFrame:
        """One row per rule, numbers with a new read-out first where few prompts carry a risk."""
        each = self.by_rule.values()
        few = any(one.carried_by_few for one in each)
        names = ("heads_per_layer", *cost_names(few))
        columns = {name: [getattr(one, name) for one in each] for name in names}
        return pd.DataFrame({"rule": self.rules, **columns})

    def chosen_frame(self) -> pd.DataFrame:
        """One row per rule and head: whether it is kept, and how often it is chosen."""
        frames = [each.to_frame().assign(rule=name) for name, each in self.pruned.items()]
        return pd.concat(frames, ignore_index=True)[["rule", "layer", "head", "kept", "chosen"]]

    def plot_chosen(self) -> go.Figure:
        """How often each head is chosen, a row per rule and layer."""
        chosen = {
            f"{rule} L{layer}": row
            for rule, each in self.pruned.items()
            for layer, row in enumerate(each.chosen)
        }
        rows = np.array(list(chosen.values()))
        return figures.heatmap(
            rows,
            title="Share of the choices on halves of the prompts that keep a head",
            rows=list(chosen),
            columns=[f"H{head}" for head in range(rows.shape[1])],
            unit="share",
            signed=False,
        )

    def plot(self) -> go.Figure:
        """Excess risk under each rule, as the model is and with a new read-out."""
        frame, named = self.to_frame(), {"as it is": "risk", "with a new read-out": "refit_risk"}
        figure = figures.bars(
            self.rules,
            {how: frame[name].to_numpy() for how, name in named.items()},
            errors={how: frame[f"{name}_sem"].to_numpy() for how, name in named.items()},
            title="Excess risk of the model pruned by rules",
            y_title="excess risk (y²)",
        )
        risks = frame[list(named.values())].to_numpy()
        wide = risks.min() > 0 and risks.max() > WIDE * risks.min()
        return figure.update_yaxes(type="log") if wide else figure


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
) -> RulePruning:
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
    Example:
        >>> from mechinterp.models.constructions.descent import gradient_descent_model
        >>> found = prune_by_rules_and_orders(gradient_descent_model([0.5, 0.3], d_x=4), n_prompts=64)
        >>> found.curves.orders
        ('greedy', 'least rise first')
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
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
    rise: Float[np.ndarray, "layer head"] | None = None,
    *,
    splits: int = SPLITS,
    progress: ProgressCallback = no_progress,
) -> RulePruning:
    """What the rules of `analysis.heads.pruning` cost that prune this model at all.

    Args:
        prompts: On which risks are measured; more than the stream is wide.
        rise: Of the excess risk when each head is masked, on other prompts: what the rules see. None: the rises on
            these prompts, and the risks are cross-fitted as `prune` does it.
        splits: Number of random halvings; of no effect if `rise` is given.
        progress: Optional progress callback.
    Raises:
        ValueError: If `rise` is not of the model's shape, or there are too few prompts for a read-out, or splits.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 64, generator=generator_for(0, "eval", 0))
        >>> model = load("checkpoints/softmax-h2-s0").model
        >>> prune_by_rules(model, prompts, np.array([[1.0, 2.0]])).rules
        ('full model', 'best-first')
    """
    predictor = predictor_of(source)
    shape = (predictor.n_layers, predictor.n_heads)
    if rise is not None and rise.shape != shape:
        raise ValueError(f"rise must have a value for each of {shape} heads, got {rise.shape}.")
    errors = MaskedErrors(predictor, prompts, progress)
    every, none = np.ones(len(prompts), dtype=bool), np.zeros(shape)
    whole = np.ones(shape, dtype=bool)
    found = {FULL: pruning_of(errors, whole, none, one_choice(whole, len(prompts)))}
    for name, rule in RULES.items():
        kept, seen = (
            choose(errors, rule, every, sequential=False) if rise is None else (rule(rise), rise)
        )
        if kept.all():
            continue
        choices = (
            choices_on_halves(errors, rule, sequential=False, splits=splits)
            if rise is None
            else one_choice(kept, len(prompts))
        )
        found[name] = pruning_of(errors, kept, seen, choices)
    return RulePruning(found)
