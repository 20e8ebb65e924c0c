"""Excess risk against the number of heads kept, and the cost of rules that name them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from mechinterp import figures
from mechinterp.analysis.ablation.cross_fitting import (
    SPLITS,
    Choices,
    MaskedErrors,
    choices_on_halves,
    choose,
    cost,
    one_choice,
)
from mechinterp.analysis.ablation.masked_risk import masked_errors
from mechinterp.analysis.ablation.pruning import RULES
from mechinterp.analysis.stats import mean_and_sem, ratio_and_sem
from mechinterp.display import Result
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.progress import ProgressCallback, no_progress

FULL = "full model"
WIDE = 100
"""Spread of the risks from which on bars stand on a logarithmic axis."""


@dataclass(frozen=True, eq=False, repr=False)
class PruningCurves(Result):
    """The excess risk as head after head is masked, in several orders, on the same prompts."""

    orders: tuple[str, ...]
    heads: tuple[tuple[str, ...], ...]
    """L0H0, ... as each order masks them."""
    risk: Float[np.ndarray, "order size"]
    """Excess risk with the first 0, 1, ..., all heads of the order masked, unit y^2."""
    risk_sem: Float[np.ndarray, "order size"]
    ratio: Float[np.ndarray, "order size"]
    """Risk over that of the full model."""
    ratio_sem: Float[np.ndarray, "order size"]
    """Standard error of `ratio`, paired over prompts."""

    def __repr__(self) -> str:
        needed = ", ".join(f"{name} {self.needed(name)}" for name in self.orders)
        return f"PruningCurves(heads for twice the risk at most: {needed} of {len(self.heads[0])})"

    def needed(self, order: str, *, ratio: float = 2.0) -> int:
        """The least number of heads of an order with which the risk is no more than this many times the full one."""
        ratios = self.ratio[self.orders.index(order)]
        return int(len(ratios) - 1 - np.flatnonzero(ratios <= ratio).max())

    def to_frame(self) -> pd.DataFrame:
        """One row per order and number of kept heads."""
        n_orders, n_sizes = self.risk.shape
        columns: dict[str, object] = {
            "order": np.repeat(self.orders, n_sizes),
            "n_kept": np.tile(np.arange(n_sizes)[::-1], n_orders),
            "masked_next": [name for names in self.heads for name in (*names, "")],
        }
        for name in ("risk", "risk_sem", "ratio", "ratio_sem"):
            columns[name] = getattr(self, name).ravel()
        return pd.DataFrame(columns)

    def plot(self) -> go.Figure:
        """Excess risk over the number of heads that are kept, a curve per order."""
        return figures.lines(
            np.arange(self.risk.shape[1])[::-1],
            dict(zip(self.orders, self.risk, strict=True)),
            errors=dict(zip(self.orders, self.risk_sem, strict=True)),
            title="Excess risk against the number of heads that are kept",
            x_title="heads kept",
            y_title="excess risk (y²)",
            log_y=True,
        )


@dataclass(frozen=True, eq=False, repr=False)
class RulePruning(Result):
    """What rules of which heads to keep cost, beside the full model, on the same prompts; nothing is retrained."""

    rules: tuple[str, ...]
    """The full model first."""
    kept: Bool[np.ndarray, "rule layer head"]
    """As chosen on all prompts, or by the rises that were given."""
    chosen: Float[np.ndarray, "rule layer head"]
    """In which share of the choices a head is kept."""
    risk: Float[np.ndarray, " rule"]
    """Excess risk, unit y^2, on prompts that the heads were not chosen on."""
    risk_sem: Float[np.ndarray, " rule"]
    """Standard error over prompts and over what is chosen, as are the others."""
    ratio: Float[np.ndarray, " rule"]
    """Risk over that of the full model."""
    ratio_sem: Float[np.ndarray, " rule"]
    refit_risk: Float[np.ndarray, " rule"]
    """Excess risk with a new read-out: a cross-validated ridge regression on the stream at the query."""
    refit_risk_sem: Float[np.ndarray, " rule"]
    refit_ratio: Float[np.ndarray, " rule"]
    """That over the risk of the full model as it is."""
    refit_ratio_sem: Float[np.ndarray, " rule"]
    carried_by_few: Bool[np.ndarray, " rule"]
    """Whether a hundredth of the prompts carries more than half of `risk`; then `refit_risk` says more."""

    def __repr__(self) -> str:
        ratios = ", ".join(
            f"{name} {ratio:.3g} ± {sem:.2g} times{how}"
            for name, ratio, sem, how in self.ratios_to_read()
        )
        return f"RulePruning({ratios or FULL})"

    def ratios_to_read(self) -> list[tuple[str, float, float, str]]:
        """Rule, ratio, standard error and how it is to be read: with a new read-out where few prompts carry the risk."""
        as_is = zip(self.ratio, self.ratio_sem, strict=True)
        refit = zip(self.refit_ratio, self.refit_ratio_sem, strict=True)
        rows = zip(self.rules, as_is, refit, self.carried_by_few, strict=True)
        return [
            (name, *(new if few else old), " with a new read-out" if few else "")
            for name, old, new, few in rows
        ][1:]

    def to_frame(self) -> pd.DataFrame:
        """One row per rule, numbers with a new read-out first where few prompts carry a risk."""
        per_layer = [", ".join(map(str, kept.sum(1))) for kept in self.kept]
        columns: dict[str, object] = {"rule": self.rules, "heads_per_layer": per_layer}
        as_is = ("risk", "risk_sem", "ratio", "ratio_sem")
        refit = tuple(f"refit_{name}" for name in as_is)
        order = (*refit, *as_is) if self.carried_by_few.any() else (*as_is, *refit)
        for name in (*order, "carried_by_few"):
            columns[name] = getattr(self, name)
        return pd.DataFrame(columns)

    def chosen_frame(self) -> pd.DataFrame:
        """One row per rule and head: whether it is kept, and how often it is chosen."""
        rule, layer, head = (index.ravel() for index in np.indices(self.kept.shape))
        columns = {"rule": np.array(self.rules)[rule], "layer": layer, "head": head}
        frame = pd.DataFrame(columns | {"kept": self.kept.ravel(), "chosen": self.chosen.ravel()})
        return frame[frame["rule"] != FULL].reset_index(drop=True)

    def plot_chosen(self) -> go.Figure:
        """How often each head is chosen, a row per rule and layer."""
        n_rules, n_layers, n_heads = self.chosen[1:].shape
        return figures.heatmap(
            self.chosen[1:].reshape(n_rules * n_layers, n_heads),
            title="Share of the choices on halves of the prompts that keep a head",
            rows=[f"{rule} L{layer}" for rule in self.rules[1:] for layer in range(n_layers)],
            columns=[f"H{head}" for head in range(n_heads)],
            unit="share",
            signed=False,
        )

    def plot(self) -> go.Figure:
        """Excess risk under each rule, as the model is and with a new read-out."""
        figure = figures.bars(
            self.rules,
            {"as it is": self.risk, "with a new read-out": self.refit_risk},
            errors={"as it is": self.risk_sem, "with a new read-out": self.refit_risk_sem},
            title="Excess risk of the model pruned by rules",
            y_title="excess risk (y²)",
        )
        risks = np.concatenate([self.risk, self.refit_risk])
        wide = risks.min() > 0 and risks.max() > WIDE * risks.min()
        return figure.update_yaxes(type="log") if wide else figure


def pruning_curves(
    source: Source,
    prompts: Prompts,
    orders: Mapping[str, Sequence[Head]],
    *,
    progress: ProgressCallback = no_progress,
) -> PruningCurves:
    """The excess risk with the first 0, 1, ..., all heads of each order masked.

    Args:
        orders: All heads of the model in the order in which they go, by name; chosen on other prompts.
        progress: Optional progress callback.
    Raises:
        ValueError: If there is no order, or one does not name every head once.
    Example:
        >>> from mechinterp import load
        >>> from mechinterp.config import TaskConfig
        >>> from mechinterp.icl.prompts import generator_for, sample_prompts
        >>> prompts = sample_prompts(TaskConfig(), 64, generator=generator_for(0, "eval", 0))
        >>> model = load("checkpoints/softmax-h2-s0").model
        >>> pruning_curves(model, prompts, {"last first": [(0, 1), (0, 0)]}).ratio[0, 0]
        np.float64(1.0)
    """
    if not orders:
        raise ValueError("orders must name at least one order of heads, got none.")
    every = predictor_of(source).heads
    for name, heads in orders.items():
        if sorted(heads) != every:
            raise ValueError(
                f"The order {name!r} must name each of {len(every)} heads once, got {len(heads)} heads."
            )
    masks = [list(heads[:size]) for heads in orders.values() for size in range(len(every) + 1)]
    errors = masked_errors(source, prompts, masks, progress=progress)
    shape = (len(orders), len(every) + 1)
    risks = (*mean_and_sem(errors), *ratio_and_sem(errors, errors[:, 0]))
    names = tuple(tuple(f"L{layer}H{head}" for layer, head in heads) for heads in orders.values())
    return PruningCurves(tuple(orders), names, *(values.reshape(shape) for values in risks))


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
    every = np.ones(len(prompts), dtype=bool)
    kept, choices = {FULL: np.ones(shape, dtype=bool)}, {}
    for name, rule in RULES.items():
        here = choose(errors, rule, every, sequential=False)[0] if rise is None else rule(rise)
        if here.all():
            continue
        kept[name] = here
        if rise is None:
            choices[name] = choices_on_halves(errors, rule, sequential=False, splits=splits)
    found = [choices.get(name, one_choice(here, len(prompts))) for name, here in kept.items()]
    return _rule_pruning(kept, found, errors)


def _rule_pruning(
    kept: Mapping[str, np.ndarray], choices: Sequence[Choices], errors: MaskedErrors
) -> RulePruning:
    costs = pd.DataFrame([asdict(cost(errors, each)) for each in choices])
    return RulePruning(
        rules=tuple(kept),
        kept=np.stack(list(kept.values())),
        chosen=np.stack([each.chosen for each in choices]),
        **{name: costs[name].to_numpy() for name in costs},
    )
