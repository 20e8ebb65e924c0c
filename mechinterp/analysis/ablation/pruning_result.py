"""Heads that a rule keeps, and the cost of masking the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pruning(Result):
    """Cost of a rule that masks heads for good, without retraining. It may include other rules, and
    curves of masking one head after another."""

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
    by_rule: Mapping[str, "Pruning"] = field(default_factory=dict)
    """Results of the rules on the same prompts, the full model first. This result is the first rule
    that prunes. Empty for a single rule."""
    curves: PruningCurves | None = None
    """Curves of masking one head after another, in orders chosen on other prompts; None if not
    measured."""
    COLUMNS: ClassVar = {
        "rule": "Rule that chooses the heads. best-later keeps all heads of the first layer and the head with the largest "
        "rise of each later layer. Controls: least-later keeps the head with the smallest rise of each later layer, "
        "best-first the best head of the first layer and all later heads."
    }

    @property
    def heads_per_layer(self) -> str:
        """Number of heads kept in each layer, from the first."""
        return ", ".join(map(str, self.kept.sum(1)))

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules, the full model first."""
        return tuple(self.by_rule)

    @property
    def pruned(self) -> dict[str, "Pruning"]:
        """Results of the rules, without the full model."""
        return {name: each for name, each in self.by_rule.items() if name != FULL}

    @property
    def to_read(self) -> tuple[float, float, str]:
        """Ratio to report, its standard error and a suffix; with a new read-out if few prompts
        dominate the risk."""
        if self.carried_by_few:
            return self.refit_ratio, self.refit_ratio_sem, " with a new read-out"
        return self.ratio, self.ratio_sem, ""

    @property
    def times(self) -> str:
        """The ratio to report, as text."""
        return f"{with_error(*self.to_read[:2])} times{self.to_read[2]}"

    def __repr__(self) -> str:
        if self.by_rule:
            ratios = [f"{name} {each.times}" for name, each in self.pruned.items()]
            return f"Pruning({', '.join(ratios) or FULL})"
        times = with_error(self.ratio, self.ratio_sem)
        as_is = f"excess risk {digits(self.full_risk)} to {digits(self.risk)}, {times} times"
        refit = f"{digits(self.refit_risk)} with a new read-out"
        if self.carried_by_few:
            as_is, refit = refit, f"{as_is}, dominated by few prompts"
        return f"Pruning({self.heads_per_layer} heads kept: {as_is}; {refit})"

    def sentences(self) -> list[str]:
        """Kept heads and their cost: one rule in detail, or several rules and orders in brief."""
        return self._of_rules() if self.by_rule else self._of_one()

    def _of_one(self) -> list[str]:
        n_layers, n_heads = self.kept.shape
        full = with_error(self.full_risk, self.full_risk_sem)
        risk = with_error(self.risk, self.risk_sem)
        as_is = f"Excess risk {full} y² with all heads, {risk} with these (ratio {with_error(self.ratio, self.ratio_sem)})."
        refit = f"Ratio with a new read-out: {with_error(self.refit_ratio, self.refit_ratio_sem)}."
        few = "1% of the prompts make up most of this risk: read the number with a new read-out."
        return [
            f"heads kept in layers 0 to {n_layers - 1}: {self.heads_per_layer} of {n_heads} per layer.",
            *((refit, as_is, few) if self.carried_by_few else (as_is, refit)),
            "Heads are chosen on random halves of the prompts, risks measured on the other halves; ± is over prompts and "
            "choices.",
            "kept: chosen on all prompts. chosen: share of the halves that keep the head.",
        ]

    def _of_rules(self) -> list[str]:
        sentences = [] if self.curves is None else [self.curves.sentence]
        costs = [
            f"{name} keeps {each.kept.sum()} heads at {with_error(*each.to_read[:2])} times the excess risk{each.to_read[2]}"
            for name, each in self.pruned.items()
        ]
        sentences.append(
            f"Rules: {'; '.join(costs)}." if costs else "With one head, no rule prunes anything."
        )
        few = " and ".join(name for name, each in self.by_rule.items() if each.carried_by_few)
        if few:
            sentences.append(
                f"{few}: 1% of the prompts make up most of the excess risk without a new read-out."
            )
        often = self.pruned["best-later"].chosen.max(1) if "best-later" in self.pruned else ()
        layers = [f"{share:.0%} in layer {layer}" for layer, share in enumerate(often) if share < 1]
        if layers:
            sentences.append(
                "The head that best-later keeps depends on the prompts: the most frequent choice is kept in "
                f"{', '.join(layers)} of the halves."
            )
        return sentences

    def tables(self) -> dict[str, Table]:
        """Kept heads; for several rules their costs, the curves, and how often each head is chosen."""
        if not self.by_rule:
            return {"heads": Table(self.to_frame(), "Heads")}
        tables = {"rules": Table(self.to_frame(), "Heads kept by rules")}
        if self.curves is not None:
            title = "Head after head, in orders chosen on other prompts"
            tables["pruning"] = Table(self.curves.to_frame(), title, per="order")
        if self.pruned:
            tables["chosen"] = Table(self.chosen_frame(), "How often each head is kept", per="rule")
        return tables

    def figures(self) -> dict[str, go.Figure]:
        """Curves, costs of the rules, and how often each head is chosen."""
        drawn = {} if self.curves is None else {"pruning": self.curves.plot()}
        chosen = {"chosen": self.plot_chosen()} if self.pruned or not self.by_rule else {}
        return drawn | {"rules": self.plot()} | chosen

    def to_document(self) -> dict:
        """One rule: risks and heads, with a new read-out first if few prompts dominate the risk.
        Several rules: tables."""
        if self.by_rule:
            rows = {name: records(table.frame) for name, table in self.tables().items()}
            return {"analysis": "prune", "result": repr(self), "rows": rows.pop("rules"), **rows}
        names = (*with_sem("full_risk", "full_refit_risk"), *cost_names(self.carried_by_few))
        return {
            **{name: getattr(self, name) for name in names},
            "heads_per_layer": self.kept.sum(1),
            "heads": records(self.to_frame()),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per head, or one per rule; numbers with a new read-out come first if few prompts
        dominate a risk."""
        if not self.by_rule:
            return frame_of(self, "kept", "chosen", "rise", **head_axes(self.kept))
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
        names = {"as it is": "risk", "with a new read-out": "refit_risk"}
        bars = {name: vars(each) for name, each in self.by_rule.items()}
        if not bars:
            full = {name: getattr(self, f"full_{name}") for name in with_sem(*names.values())}
            bars = {FULL: full, "pruned": vars(self)}
        frame = pd.DataFrame(bars.values())
        figure = figures.bars(
            list(bars),
            {
                how: tuple(frame[[name, f"{name}_sem"]].to_numpy(dtype=float).T)
                for how, name in names.items()
            },
            title="Excess risk of the model pruned by rules",
            y_title="excess risk (y²)",
        )
        risks = frame[list(names.values())].to_numpy(dtype=float)
        wide = risks.min() > 0 and risks.max() > WIDE * risks.min()
        return figure.update_yaxes(type="log") if wide else figure

    def plot_chosen(self) -> go.Figure:
        """Share of the choices that keep each head, one row per layer and rule."""
        rows = {
            f"{rule} L{layer}".strip(): row
            for rule, each in (self.pruned or {"": self}).items()
            for layer, row in enumerate(each.chosen)
        }
        return heatmaps.heatmap(
            np.array(list(rows.values())),
            title="Share of the halves of the prompts that keep a head",
            rows=list(rows),
            columns=[f"H{head}" for head in range(self.kept.shape[1])],
            unit="share",
            signed=False,
        )


def cost_names(few: bool) -> tuple[str, ...]:
    """Names of the cost fields; those with a new read-out come first if few prompts dominate the
    risk."""
    as_is, refit = with_sem("risk", "ratio"), with_sem("refit_risk", "refit_ratio")
    return (*((*refit, *as_is) if few else (*as_is, *refit)), "carried_by_few")
