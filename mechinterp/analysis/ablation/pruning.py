"""Pruning: heads chosen on half of the prompts, and the cost of masking the others on the other half."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Bool, Float

from mechinterp import figures, heatmaps
from mechinterp.analysis.ablation.contrasts import Mask, heads_alone, rise
from mechinterp.analysis.ablation.measured import EXCESS, estimated
from mechinterp.analysis.ablation.pruned import save_pruned
from mechinterp.analysis.ablation.pruning_rules import (
    Rule,
    best_head_first,
    best_head_later,
    checked,
    least_head_later,
    masked_by,
)
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.probing.linear import cross_validated_probe
from mechinterp.analysis.result import HEAD_COLUMNS, Table, records
from mechinterp.analysis.stats import halves, mean_and_sem, ratio_and_sem
from mechinterp.checkpoints.checkpoint import checkpoint_of
from mechinterp.checkpoints.native.folder import require_new
from mechinterp.config import TaskLike
from mechinterp.display import Result, head_axes, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.hooked.masks import Head
from mechinterp.models.run.evaluation import prompts_and_law
from mechinterp.models.run.n_prompts import stream_width
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.run.ways import Predictor

WIDE_RANGE = 100
"""Ratio of the largest to the smallest risk above which the bars use a logarithmic axis."""
COSTS = with_sem("risk", "ratio")
RULES: dict[str, Rule] = {
    "best-later": best_head_later,
    "least-later": least_head_later,
    "best-first": best_head_first,
}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Refit:
    """Excess risk with a new read-out: a cross-validated ridge regression on the stream at the query, unit y^2."""

    risk: float
    """Excess risk of the pruned model."""
    risk_sem: float
    """Standard error over prompts and the fit."""
    ratio: float
    """`risk` divided by the risk of the unchanged full model."""
    ratio_sem: float
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pruning(Result):
    """Cost of masking the heads that a rule drops, on prompts that did not choose them; nothing is retrained."""

    COLUMNS: ClassVar = HEAD_COLUMNS | {
        "kept": "True for heads that are kept.",
        "rise": "Rise of the excess risk when a head is masked, on the prompts that chose; the rule reads it.",
        "risk": "Excess risk of the pruned model on the other prompts.",
        "risk_sem": "Standard error over prompts. The choice of heads adds to it: see other seeds.",
        "ratio": "risk divided by that of the full model.",
        "ratio_sem": "Standard error of ratio, paired over prompts.",
        "median_rise": "Median over prompts of the rise of the error.",
        "carried_by_few": "True if 1% of the prompts make up more than half of the rise; its median then says more.",
        "full_risk": "Excess risk of the full model.",
        "refit_risk": "Excess risk with a new read-out, a cross-validated ridge regression on the stream at the query.",
        "refit_ratio": "Risk with a new read-out divided by the risk of the unchanged full model.",
        "model": "The full or the pruned model.",
    }
    """Meaning and unit of the columns that are no field."""
    UNITS: ClassVar = {"y²": ("rise", "risk", "median_rise", "full_risk", "refit_risk")}

    kept: Bool[np.ndarray, "layer head"]
    rise: Float[np.ndarray, "layer head"]
    risk: float
    risk_sem: float
    ratio: float
    ratio_sem: float
    median_rise: float
    carried_by_few: bool
    full_risk: float
    full_risk_sem: float
    refit: Refit | None = None
    """Risks with a new read-out; None with refit=False."""
    saved: str | None = None
    """Folder of the pruned model; None if it was not saved."""

    def __repr__(self) -> str:
        times = with_error(self.ratio, self.ratio_sem)
        risk = f"excess risk {digits(self.full_risk)} to {digits(self.risk)}, {times} times"
        if self.carried_by_few:
            risk = f"median rise {digits(self.median_rise)}; {risk}, carried by few prompts"
        if self.refit is not None:
            risk += f"; {digits(self.refit.risk)} with a new read-out"
        return f"Pruning({', '.join(map(str, self.kept.sum(1)))} heads kept: {risk})"

    def sentences(self) -> list[str]:
        """Number of heads kept, their cost, and whether few prompts carry it."""
        heads = ", ".join(map(str, self.kept.sum(1)))
        times = with_error(self.ratio, self.ratio_sem)
        few = "1% of the prompts make up most of this rise: read the median"
        return [
            f"heads kept in layers 0 to {len(self.kept) - 1}: {heads} of {self.kept.shape[1]} per layer.",
            f"Without the others the excess risk is {times} times that of the full model, on prompts that did not choose.",
            *([f"{few}, {digits(self.median_rise)} y²."] if self.carried_by_few else []),
            *([f"Pruned model: {self.saved}"] if self.saved else []),
        ]

    def to_document(self) -> dict:
        """Risks and heads."""
        names = ("full_risk", "full_risk_sem", *COSTS, "median_rise", "carried_by_few")
        refit = {} if self.refit is None else vars(self.refit)
        return {
            **{name: getattr(self, name) for name in names},
            **{_refit_name(name): value for name, value in refit.items()},
            "heads_per_layer": self.kept.sum(1),
            "heads": records(self.to_frame()),
            "checkpoint": self.saved,
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        axes = pd.MultiIndex.from_product(head_axes(self.kept).values()).to_frame(index=False)
        axes.columns = ["layer", "head"]
        return axes.assign(kept=self.kept.ravel(), rise=self.rise.ravel())

    def cost_frame(self) -> pd.DataFrame:
        """Risks of the full and of the pruned model, as they are and, with refit=True, with a new read-out."""
        full = {"model": "full", "risk": self.full_risk, "risk_sem": self.full_risk_sem}
        pruned = {"model": "pruned"} | {name: getattr(self, name) for name in COSTS}
        if self.refit is not None:
            again = self.refit
            full |= {"refit_risk": again.full_risk, "refit_risk_sem": again.full_risk_sem}
            pruned |= {f"refit_{name}": getattr(again, name) for name in COSTS}
        return pd.DataFrame([full, pruned])

    def tables(self) -> dict[str, Table]:
        """Risks, and the heads."""
        return {
            "pruning": Table(self.cost_frame(), "Excess risk"),
            "kept": Table(self.to_frame(), "Heads kept, and the rises that chose them", by="rise"),
        }

    def figures(self) -> dict[str, go.Figure]:
        """Risks, and the heads that are kept."""
        title = "Heads that are kept"
        kept = heatmaps.heatmap(self.kept.astype(float), title=title, unit="kept", signed=False)
        return {"pruning": self.plot(), "kept": kept}

    def plot(self) -> go.Figure:
        """Excess risk of the full and the pruned model."""
        frame = self.cost_frame()
        groups = {"as it is": with_sem("risk")}
        if self.refit is not None:
            groups["with a new read-out"] = with_sem("refit_risk")
        bars = {how: tuple(frame[[*names]].to_numpy().T) for how, names in groups.items()}
        title = "Excess risk of the full and the pruned model"
        figure = figures.bars([*frame["model"]], bars, title=title, y_title="excess risk (y²)")
        risks = frame[[names[0] for names in groups.values()]].to_numpy()
        wide = risks.min() > 0 and risks.max() > WIDE_RANGE * risks.min()
        return figure.update_yaxes(type="log") if wide else figure


def _refit_name(name: str) -> str:
    return f"full_refit_{name.removeprefix('full_')}" if "full" in name else f"refit_{name}"


def prune(
    source: Source,
    prompts: Prompts | None = None,
    *,
    task: TaskLike | None = None,
    rule: Rule | str = "best-later",
    refit: bool = False,
    out: str | Path | None = None,
    n_prompts: int | None = None,
    seed: int = 0,
) -> Pruning:
    """Excess risk of a model without the heads that a rule drops, on prompts that did not choose them.

    Each head is masked alone on the first half of the prompts, and the rule keeps heads by these rises. The others are
    then masked together on the second half. Standard errors are over its prompts. Between heads that are nearly equal
    the choice depends on the prompts: other seeds show by how much the risk moves with it.

    Args:
        prompts: Prompts to use; None draws `n_prompts` of the model's own task with `seed`.
        task: Law of the prompts; None: the model's own.
        rule: "best-later" keeps all heads of the first layer and the head with the largest rise of
            each later layer. Controls are "least-later", the head with the smallest rise of each later
            layer, and "best-first", the best head of the first layer and all later heads. Or a function
            from the rises to the kept heads.
        refit: True: also with a new read-out, which separates lost information from information that is only stored
            differently. It is a cross-validated ridge regression on the stream at the query, of the second half.
        out: New folder for the pruned model; None: it is not saved. `train(config, start=load(out), out=...)` trains it
            further.
        n_prompts: None means 4096, or 512 for models with norms or MLPs, more for a wide stream.
    Raises:
        ValueError: If the rule is unknown, keeps no head or its mask has another shape, there are too
            few prompts, or the folder is not empty. Also if a model that is to be saved is no checkpoint.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532, who keep all heads of the first layer and
        the best head of each later layer. The scores and the read-out are choices made here.
    See also:
        `ablate`, `train`.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> prune(preprocess_then_optimise_model([0.5], d_x=4), n_prompts=64).ratio
        1.0
    """
    if out is not None:
        require_new(Path(out))
    predictor = predictor_of(source)
    chosen = _rule_of(rule, predictor.n_layers) if isinstance(rule, str) else rule
    given, _ = prompts_and_law(
        source,
        prompts,
        analysis="prune",
        task=task,
        n_prompts=n_prompts,
        seed=seed,
        fitted=2 * stream_width(source) if refit else 1,
    )
    found = _pruned(predictor, given, chosen, refit)
    if out is None:
        return found
    save_pruned(checkpoint_of(source, "out"), found.kept, out, prompts=given)
    return replace(found, saved=str(out))


def _pruned(predictor: Predictor, prompts: Prompts, rule: Rule, refit: bool) -> Pruning:
    """Heads chosen on the first half of the prompts, and the cost of masking the others on the second."""
    chosen_on, measured_on = halves(prompts)
    shape = (predictor.n_layers, predictor.n_heads)
    alone = estimated(predictor, chosen_on, heads_alone(predictor)).columns["rise"].reshape(shape)
    kept = checked(rule(alone), shape)
    mask = Mask(tuple(masked_by(kept)))
    rows = {("pruned",): {"risk": {mask: 1.0}, "rise": rise(mask)}}
    cost = estimated(predictor, measured_on, rows)
    return Pruning(
        kept=kept,
        rise=alone,
        **{name: float(cost.columns[name][0]) for name in (*COSTS, "median_rise")},
        carried_by_few=bool(cost.carried_by_few[0]),
        full_risk=cost.full[0],
        full_risk_sem=cost.full[1],
        refit=_refit(predictor, measured_on, mask.heads) if refit else None,
        saved=None,
    )


def _rule_of(named: str, n_layers: int) -> Rule:
    """The rule of this name, for a model with this number of layers."""
    if named not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {named!r}.")
    if n_layers == 1:
        raise ValueError(
            "prune needs a model of several layers, got one; use ablate to mask its heads."
        )
    return RULES[named]


def _refit(predictor: Predictor, prompts: Prompts, gone: Sequence[Head]) -> Refit:
    """Risks with new read-outs of the pruned and of the full model."""
    predictions = predictor.run(prompts)[0]
    full = EXCESS.values(predictions, prompts).numpy(force=True)
    refitted, fit_sem = refit_errors(predictor, prompts, gone)
    full_refitted, full_fit_sem = refit_errors(predictor, prompts, [])
    risk, risk_sem = mean_and_sem(refitted)
    ratio, ratio_sem = ratio_and_sem(refitted, full)
    full_risk, full_risk_sem = mean_and_sem(full_refitted)
    return Refit(
        risk=float(risk),
        risk_sem=float(np.hypot(risk_sem, fit_sem)),
        ratio=float(ratio),
        ratio_sem=float(np.hypot(ratio_sem, fit_sem / full.mean())),
        full_risk=float(full_risk),
        full_risk_sem=float(np.hypot(full_risk_sem, full_fit_sem)),
    )


def refit_errors(
    source: Source, prompts: Prompts, gone: Sequence[Head]
) -> tuple[Float[np.ndarray, " prompt"], float]:
    """Squared error with heads masked and a new read-out, and the standard error of its mean due to
    the fit.

    The read-out is a cross-validated ridge regression on the stream at the query.

    Raises:
        ValueError: If there are too few prompts for the features.
    """
    stream = predictor_of(source).streams(prompts, heads=gone)[-1, :, 0]
    exact = (each.double().numpy(force=True) for each in (stream, prompts.y_query))
    (fitted,) = cross_validated_probe(*exact)
    clean = prompts.y_query_clean.double().numpy(force=True)
    return np.square(fitted.prediction - clean).mean(1), fitted.fit_sem(clean)
