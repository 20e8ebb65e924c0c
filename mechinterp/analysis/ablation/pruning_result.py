"""Heads that a rule keeps, and the cost of masking the others; one rule, or several side by side."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.orders import PruningCurves
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.display import Result, frame_of, head_axes, with_sem

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
