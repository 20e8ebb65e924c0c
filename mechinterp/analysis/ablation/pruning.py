"""Pruning of heads: rules that choose heads, the cost of masking the others, and the smaller model itself.

Cross-fitting: heads are chosen on random halves of the prompts, and their cost is measured on the
other halves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.masked_risk import (
    PruningCurves,
    greedy_heads,
    masked_errors,
    pruning_curves,
    single_masks,
)
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.probing.linear import cross_validated, streams
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import (
    carried_by_few,
    estimates,
    halves,
    mean_and_sem,
    random_halves,
    ratio_and_sem,
)
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.display import Result, frame_of, head_axes, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import evaluation_prompts, stream_width
from mechinterp.models.run.predictor import Predictor, Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress

FULL = "full model"
WIDE = 100
"""Ratio of the largest to the smallest risk above which the bars use a logarithmic axis."""
COSTS = {"as it is": ("risk", "ratio"), "with a new read-out": ("refit_risk", "refit_ratio")}
"""Names of the costs without and with a new read-out."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pruning(Result):
    """Cost of a rule that masks heads for good, without retraining."""

    kept: Bool[np.ndarray, "layer head"]
    """Heads chosen on all prompts. The risks are of heads that are chosen anew on each half of the
    prompts."""
    rise: Float[np.ndarray, "layer head"]
    """Rise of the excess risk when a head is masked, on all prompts, unit y^2; the rule reads it.
    """
    chosen: Float[np.ndarray, "layer head"]
    """Share of the choices on halves of the prompts that keep a head."""
    risk: float
    """Excess risk of the pruned model, on prompts that were not used to choose its heads."""
    risk_sem: float
    """Standard error over prompts and choices of heads; with a new read-out also over its fit."""
    ratio: float
    """`risk` divided by that of the full model."""
    ratio_sem: float
    refit_risk: float
    """Excess risk of the pruned model with a new read-out: a cross-validated ridge regression on
    the stream at the query."""
    refit_risk_sem: float
    refit_ratio: float
    """Risk with a new read-out divided by the risk of the unchanged full model."""
    refit_ratio_sem: float
    carried_by_few: bool
    """True if 1% of the prompts make up more than half of `risk`; the risk with a new read-out is
    then more informative."""
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float
    full_refit_risk: float
    """Excess risk of the full model with a new read-out."""
    full_refit_risk_sem: float

    @property
    def heads_per_layer(self) -> str:
        """Number of heads kept in each layer, from the first."""
        return ", ".join(map(str, self.kept.sum(1)))

    def cost(self, unit: str = "times") -> str:
        """The ratio to report, with its error; with a new read-out if few prompts dominate the
        risk."""
        if self.carried_by_few:
            ratio = with_error(self.refit_ratio, self.refit_ratio_sem)
            return f"{ratio} {unit} with a new read-out"
        return f"{with_error(self.ratio, self.ratio_sem)} {unit}"

    def __repr__(self) -> str:
        times = with_error(self.ratio, self.ratio_sem)
        as_is = f"excess risk {digits(self.full_risk)} to {digits(self.risk)}, {times} times"
        refit = f"{digits(self.refit_risk)} with a new read-out"
        if self.carried_by_few:
            as_is, refit = refit, f"{as_is}, dominated by few prompts"
        return f"Pruning({self.heads_per_layer} heads kept: {as_is}; {refit})"

    def sentences(self) -> list[str]:
        """Kept heads and their cost."""
        n_layers, n_heads = self.kept.shape
        full = with_error(self.full_risk, self.full_risk_sem)
        risk = with_error(self.risk, self.risk_sem)
        as_is = f"Excess risk {full} y² with all heads, {risk} with these (ratio {with_error(self.ratio, self.ratio_sem)})."
        refit = f"Ratio with a new read-out: {with_error(self.refit_ratio, self.refit_ratio_sem)}."
        few = "1% of the prompts make up most of this risk: read the number with a new read-out."
        return [
            f"heads kept in layers 0 to {n_layers - 1}: {self.heads_per_layer} of {n_heads} per layer.",
            *((refit, as_is, few) if self.carried_by_few else (as_is, refit)),
            "Heads are chosen on random halves of the prompts, risks measured on the other halves.",
            "kept: chosen on all prompts. chosen: share of the halves that keep the head.",
        ]

    def to_document(self) -> dict:
        """Risks and heads."""
        full = with_sem("full_risk", "full_refit_risk")
        return {
            **{name: getattr(self, name) for name in (*full, *cost_names(self.carried_by_few))},
            "heads_per_layer": self.kept.sum(1),
            "heads": records(self.to_frame()),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        return frame_of(self, "kept", "chosen", "rise", **head_axes(self.kept))

    def plot(self) -> go.Figure:
        """Excess risk of the full and the pruned model, without and with a new read-out."""
        full = {name: getattr(self, f"full_{name}") for name in with_sem("risk", "refit_risk")}
        return _cost_bars({FULL: full, "pruned": vars(self)})

    def plot_chosen(self) -> go.Figure:
        """Share of the choices that keep each head."""
        return _shares({f"L{layer}": row for layer, row in enumerate(self.chosen)})


@dataclass(frozen=True, eq=False, repr=False)
class PruningByRules(Result):
    """Costs of several rules on the same prompts, and curves of masking one head after another."""

    by_rule: Mapping[str, Pruning]
    """Result of each rule that prunes this model, after the full model."""
    curves: PruningCurves
    """Curves of masking one head after another, in orders chosen on other prompts."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules, the full model first."""
        return tuple(self.by_rule)

    @property
    def pruned(self) -> dict[str, Pruning]:
        """Results of the rules, without the full model."""
        return {name: each for name, each in self.by_rule.items() if name != FULL}

    def __repr__(self) -> str:
        ratios = [f"{name} {each.cost()}" for name, each in self.pruned.items()]
        return f"PruningByRules({', '.join(ratios) or FULL})"

    def sentences(self) -> list[str]:
        """Heads that the curves need, and cost of each rule."""
        costs = [
            f"{name} keeps {each.kept.sum()} heads at {each.cost('times the excess risk')}"
            for name, each in self.pruned.items()
        ]
        rules = (
            f"Rules: {'; '.join(costs)}." if costs else "With one head, no rule prunes anything."
        )
        few = " and ".join(name for name, each in self.by_rule.items() if each.carried_by_few)
        note = f"{few}: 1% of the prompts make up most of the excess risk without a new read-out."
        return [self.curves.sentence, rules, *([note] if few else [])]

    def tables(self) -> dict[str, Table]:
        """Costs of the rules, the curves, and how often each head is chosen."""
        title = "Head after head, in orders chosen on other prompts"
        tables = {
            "rules": Table(self.to_frame(), "Heads kept by rules"),
            "pruning": Table(self.curves.to_frame(), title, per="order"),
        }
        if self.pruned:
            tables["chosen"] = Table(self.chosen_frame(), "How often each head is kept", per="rule")
        return tables

    def figures(self) -> dict[str, go.Figure]:
        """Curves, costs of the rules, and how often each head is chosen."""
        chosen = {"chosen": self.plot_chosen()} if self.pruned else {}
        return {"pruning": self.curves.plot(), "rules": self.plot(), **chosen}

    def to_frame(self) -> pd.DataFrame:
        """One row per rule; numbers with a new read-out come first if few prompts dominate a
        risk."""
        each = self.by_rule.values()
        names = ("heads_per_layer", *cost_names(any(one.carried_by_few for one in each)))
        columns = {name: [getattr(one, name) for one in each] for name in names}
        return pd.DataFrame({"rule": self.rules, **columns})

    def chosen_frame(self) -> pd.DataFrame:
        """One row per rule and head: whether it is kept, and how often it is chosen."""
        frames = [each.to_frame().assign(rule=name) for name, each in self.pruned.items()]
        return pd.concat(frames, ignore_index=True)[["rule", "layer", "head", "kept", "chosen"]]

    def plot(self) -> go.Figure:
        """Excess risk of the full model and under each rule, without and with a new read-out."""
        return _cost_bars({name: vars(each) for name, each in self.by_rule.items()})

    def plot_chosen(self) -> go.Figure:
        """Share of the choices that keep each head, one row per layer and rule."""
        each = self.pruned.items()
        return _shares({f"{name} L{n}": row for name, e in each for n, row in enumerate(e.chosen)})


def cost_names(few: bool) -> tuple[str, ...]:
    """Names of the cost fields; those with a new read-out come first if few prompts dominate the
    risk."""
    as_is, refit = (with_sem(*names) for names in COSTS.values())
    return (*((*refit, *as_is) if few else (*as_is, *refit)), "carried_by_few")


def _cost_bars(models: Mapping[str, Mapping[str, object]]) -> go.Figure:
    frame = pd.DataFrame(models.values())
    bars = {
        how: tuple(frame[[risk, f"{risk}_sem"]].to_numpy(dtype=float).T)
        for how, (risk, _) in COSTS.items()
    }
    title = "Excess risk of the model pruned by rules"
    figure = figures.bars(list(models), bars, title=title, y_title="excess risk (y²)")
    risks = frame[["risk", "refit_risk"]].to_numpy(dtype=float)
    wide = risks.min() > 0 and risks.max() > WIDE * risks.min()
    return figure.update_yaxes(type="log") if wide else figure


def _shares(rows: Mapping[str, np.ndarray]) -> go.Figure:
    values = np.array(list(rows.values()))
    return heatmaps.heatmap(
        values,
        title="Share of the halves of the prompts that keep a head",
        rows=list(rows),
        columns=[f"H{head}" for head in range(values.shape[1])],
        unit="share",
        signed=False,
    )


Rule = Callable[[np.ndarray], np.ndarray]
"""Function from the rises [layer, head] of the excess risk to a mask [layer, head], True for heads
that are kept."""
Mask = tuple[Head, ...]
SPLITS = 8
"""Number of random halvings of the prompts. More halvings average over more choices and cost more
runs."""


@dataclass(frozen=True, eq=False)
class Choices:
    """The distinct sets of heads that were chosen, with their shares."""

    kept: Bool[np.ndarray, "set layer head"]
    share: Float[np.ndarray, " set"]
    """Share of all choices that chose this set."""
    weight: Float[np.ndarray, "set prompt"]
    """Among the choices that did not use this prompt, the share that chose this set; sums to 1 over
    the sets."""

    @property
    def chosen(self) -> Float[np.ndarray, "layer head"]:
        """Share of the choices that keep each head."""
        return np.tensordot(self.share, self.kept, axes=1)

    def ratio(
        self,
        errors: Float[np.ndarray, "set prompt"],
        full: Float[np.ndarray, " prompt"],
        fit_sem: Float[np.ndarray, " set"] | float = 0.0,
    ) -> tuple[float, float]:
        """Ratio of the cross-fitted risk to another risk on the same prompts, with its standard
        error over prompts, choices and fits; next to errors of 1 the risk itself.

        Args:
            fit_sem: Standard error of each set's mean due to a fitted read-out.
        """
        ratio, sem = ratio_and_sem(self.crossed(errors), full)
        values = ratio_and_sem(errors.T, full)[0]
        # The mean over many halves of the same prompts varies from sample to sample by the covariance C
        # of the values of two halves. The spread over the halves is V = variance of one value - C. Two
        # halves share half of their prompts, so the two rises that decide them have correlation 1/2.
        # Between two equal heads the choice is the sign of a normal variable. With a difference D of the
        # risks the variance is D^2 / 4 and, by Sheppard's formula,
        # C = D^2 / 4 * (2 / pi) asin(1/2) = D^2 / 12, hence V = D^2 / 6 = 2 C. If one head is better, V
        # exceeds 2 C (2.6 C if its lead on a half is one standard error, 5.3 C at two), so that V / 2 is
        # conservative. V is then small, and 0 for a clear choice.
        between = self.share @ np.square(values - self.share @ values) / 2
        # All fits see the same noise, so their errors add up.
        fit = (self.share * fit_sem).sum() / full.mean()
        return float(ratio), float(np.sqrt(sem**2 + between + fit**2))

    def crossed(self, errors: Float[np.ndarray, "set prompt"]) -> Float[np.ndarray, " prompt"]:
        """Error of each prompt, averaged over the choices that did not use it."""
        return (self.weight * errors).sum(0)


class MaskedErrors:
    """Squared errors of a model on some prompts with heads masked; each mask is run once and
    cached."""

    def __init__(
        self, predictor: Predictor, prompts: Prompts, progress: ProgressCallback = no_progress
    ) -> None:
        self.predictor, self.prompts, self.progress = predictor, prompts, progress
        self._as_is: dict[Mask, np.ndarray] = {}
        self._refitted: dict[Mask, tuple[np.ndarray, float]] = {}

    def of(self, masks: Sequence[Sequence[Head]]) -> Float[np.ndarray, "prompt mask"]:
        """Errors under each mask."""
        keys = [tuple(sorted(mask)) for mask in masks]
        if new := [key for key in dict.fromkeys(keys) if key not in self._as_is]:
            errors = masked_errors(self.predictor, self.prompts, new, progress=self.progress)
            self._as_is |= zip(new, errors.T, strict=True)
        return np.stack([self._as_is[key] for key in keys], axis=1)

    def refitted(
        self, masks: Sequence[Sequence[Head]]
    ) -> tuple[Float[np.ndarray, "prompt mask"], Float[np.ndarray, " mask"]]:
        """Errors with a new read-out for each mask, and the standard error of each mean due to the
        fit."""
        keys = [tuple(sorted(mask)) for mask in masks]
        new = [key for key in dict.fromkeys(keys) if key not in self._refitted]
        for key in self.progress(new, "new read-outs") if new else ():
            self._refitted[key] = refit_errors(self.predictor, self.prompts, key)
        errors, fit_sems = zip(*(self._refitted[key] for key in keys), strict=True)
        return np.stack(errors, axis=1), np.array(fit_sems)

    def rises(
        self, scored: Bool[np.ndarray, " prompt"], layers: Sequence[int], gone: Sequence[Head] = ()
    ) -> Float[np.ndarray, "layer head"]:
        """Rise of the excess risk when each head of these layers is masked in addition to the heads
        `gone`."""
        heads = [(layer, head) for layer in layers for head in range(self.predictor.n_heads)]
        errors = self.of([gone, *([*gone, head] for head in heads)])[scored].mean(0)
        return (errors[1:] - errors[0]).reshape(len(layers), self.predictor.n_heads)


def choose(
    errors: MaskedErrors, rule: Rule, scored: Bool[np.ndarray, " prompt"], *, sequential: bool
) -> tuple[Bool[np.ndarray, "layer head"], Float[np.ndarray, "layer head"]]:
    """Heads that a rule keeps when they are scored on some of the prompts, and the rises that it
    used.

    Raises:
        ValueError: If the rule keeps no head, or its mask has another shape.
    """
    layers = range(errors.predictor.n_layers)
    rise = errors.rises(scored, layers)
    kept = checked(rule(rise), rise.shape)
    for layer in layers if sequential else ():
        gone = [head for head in masked_by(kept) if head[0] < layer]
        if gone:
            rise[layer] = errors.rises(scored, [layer], gone)[0]
            kept = checked(rule(rise), rise.shape)
    return kept, rise


def choices_on_halves(
    errors: MaskedErrors, rule: Rule, *, sequential: bool, splits: int
) -> Choices:
    """Heads that a rule keeps on each half of several random halvings of the prompts."""
    scored = random_halves(len(errors.prompts), splits)
    kept = [choose(errors, rule, half, sequential=sequential)[0] for half in scored]
    different, which = np.unique(np.array(kept), axis=0, return_inverse=True)
    one_of = np.arange(len(different))[:, None] == which.ravel()
    return Choices(different, one_of.mean(1), one_of.astype(float) @ ~scored / splits)


def masked_by(kept: Bool[np.ndarray, "layer head"]) -> list[Head]:
    """Heads that are not kept.

    Example:
        >>> masked_by(np.array([[True, False], [True, True]]))
        [(0, 1)]
    """
    return [(int(layer), int(head)) for layer, head in np.argwhere(~kept)]


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> tuple[Float[np.ndarray, " prompt"], float]:
    """Squared error with heads masked and a new read-out, and the standard error of its mean due to
    the fit.

    The read-out is a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = streams(source, prompts, heads=gone)[-1, :, 0]
    (fitted,) = cross_validated(stream, prompts.y_query.double().numpy(force=True))
    clean = prompts.y_query_clean.double().numpy(force=True)
    return np.square(fitted.prediction - clean).mean(1), fitted.fit_sem(clean)


def checked(kept: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The mask of a rule, checked.

    Raises:
        ValueError: If it is not a boolean array of this shape, or keeps no head.
    """
    if kept.shape != shape or kept.dtype != bool:
        raise ValueError(
            f"A rule must return a boolean array of shape {shape}, got {kept.dtype} of shape {kept.shape}."
        )
    if not kept.any():
        raise ValueError(f"A rule must keep at least one of {kept.size} heads, got none.")
    return kept


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
