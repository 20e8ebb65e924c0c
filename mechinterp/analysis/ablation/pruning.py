"""Pruning of heads: rules of what stays, what the rest costs, and the smaller model itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float

from mechinterp import figures, heatmaps
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
from mechinterp.analysis.ablation.orders import PruningCurves
from mechinterp.analysis.number_format import digits, with_error
from mechinterp.analysis.result import Table, records
from mechinterp.analysis.stats import carried_by_few, estimates, mean_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, checkpoint_of, save
from mechinterp.checkpoints.load import load
from mechinterp.display import Result, frame_of, head_axes, with_sem
from mechinterp.icl.prompts import Prompts
from mechinterp.models.run.evaluation import evaluation_prompts
from mechinterp.models.run.predictor import Source, predictor_of
from mechinterp.models.weights import Weights
from mechinterp.progress import ProgressCallback, no_progress

FULL = "full model"
WIDE = 100
"""Spread of the risks from which on bars stand on a logarithmic axis."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Pruning(Result):
    """What a model costs and keeps when a rule masks some of its heads for good, nothing retrained; beside it other rules,
    and what is left as head after head is masked, where these were asked for."""

    kept: Bool[np.ndarray, "layer head"]
    """The choice on all prompts; what the risks are of is chosen anew on each half of them."""
    rise: Float[np.ndarray, "layer head"]
    """What the rule saw on all prompts: the rise of the excess risk when a head is masked, unit y^2."""
    chosen: Float[np.ndarray, "layer head"]
    """In which share of the choices on halves of the prompts a head is kept."""
    risk: float
    """Excess risk of the pruned model, on prompts that its heads were not chosen on."""
    risk_sem: float
    """Standard error over prompts and over what is chosen, as are all of the pruned model."""
    ratio: float
    """`risk` over that of the full model."""
    ratio_sem: float
    refit_risk: float
    """Excess risk of the pruned model with a new read-out: a ridge regression on the stream at the query,
    cross-validated."""
    refit_risk_sem: float
    refit_ratio: float
    """Risk with a new read-out over that of the full model as it is."""
    refit_ratio_sem: float
    carried_by_few: bool
    """Whether a hundredth of the prompts carries more than half of `risk`; then the risk with a new read-out says
    more."""
    full_risk: float
    """Excess risk of the full model."""
    full_risk_sem: float
    full_refit_risk: float
    """Excess risk of the full model with a new read-out."""
    full_refit_risk_sem: float
    by_rule: Mapping[str, "Pruning"] = field(default_factory=dict)
    """On the same prompts, the full model first; this is the first rule that prunes. Empty of one rule alone."""
    curves: PruningCurves | None = None
    """Head after head in orders that were chosen on other prompts; None if they were not measured."""
    COLUMNS: ClassVar = {
        "rule": "Rule that says which heads are kept: best-later keeps all heads of the first layer and of each later one "
        "the head that is missed most; least-later the one missed least, best-first the best of the first layer and all "
        "later heads: both are controls."
    }

    @property
    def heads_per_layer(self) -> str:
        """Heads kept in each layer, from the first on."""
        return ", ".join(map(str, self.kept.sum(1)))

    @property
    def rules(self) -> tuple[str, ...]:
        """Names of the rules, the full model first."""
        return tuple(self.by_rule)

    @property
    def pruned(self) -> dict[str, "Pruning"]:
        """What each rule costs, without the full model."""
        return {name: each for name, each in self.by_rule.items() if name != FULL}

    @property
    def to_read(self) -> tuple[float, float, str]:
        """Ratio, its standard error and what it is of: with a new read-out where few prompts carry the risk as it is."""
        if self.carried_by_few:
            return self.refit_ratio, self.refit_ratio_sem, " with a new read-out"
        return self.ratio, self.ratio_sem, ""

    @property
    def times(self) -> str:
        """That ratio in words."""
        return f"{with_error(*self.to_read[:2])} times{self.to_read[2]}"

    def __repr__(self) -> str:
        if self.by_rule:
            ratios = [f"{name} {each.times}" for name, each in self.pruned.items()]
            return f"Pruning({', '.join(ratios) or FULL})"
        times = with_error(self.ratio, self.ratio_sem)
        as_is = f"risk {digits(self.full_risk)} to {digits(self.risk)}, {times} times"
        refit = f"{digits(self.refit_risk)} with a new read-out"
        if self.carried_by_few:
            as_is, refit = refit, f"{as_is}, which few prompts carry"
        return f"Pruning({self.heads_per_layer} heads kept: {as_is}; {refit})"

    def sentences(self) -> list[str]:
        """What is kept, and what it costs: by one rule at length, by several with the orders beside them."""
        return self._of_rules() if self.by_rule else self._of_one()

    def _of_one(self) -> list[str]:
        n_layers, n_heads = self.kept.shape
        full = with_error(self.full_risk, self.full_risk_sem)
        risk = with_error(self.risk, self.risk_sem)
        as_is = f"Excess risk {full} y² with all heads, {risk} with these: {with_error(self.ratio, self.ratio_sem)} times."
        refit = f"With a new read-out {with_error(self.refit_ratio, self.refit_ratio_sem)} times."
        few = "One prompt in a hundred carries most of this risk: read the number with a new read-out."
        return [
            f"heads kept in layers 0 to {n_layers - 1}: {self.heads_per_layer} of {n_heads}.",
            *((refit, as_is, few) if self.carried_by_few else (as_is, refit)),
            "Heads are chosen on random halves of the prompts, risks measured on the other halves; ± is over prompts and "
            "choices.",
            "kept: chosen on all prompts; chosen: in which share of the halves.",
        ]

    def _of_rules(self) -> list[str]:
        told = [] if self.curves is None else [self.curves.sentence]
        costs = [
            f"{name} keeps {each.kept.sum()} and has {with_error(*each.to_read[:2])} times the risk{each.to_read[2]}"
            for name, each in self.pruned.items()
        ]
        told.append(
            f"By rule, {'; '.join(costs)}." if costs else "With one head, no rule prunes anything."
        )
        few = " and ".join(name for name, each in self.by_rule.items() if each.carried_by_few)
        if few:
            told.append(f"Of {few} one prompt in a hundred carries most of the risk as it is.")
        often = self.pruned["best-later"].chosen.max(1) if "best-later" in self.pruned else ()
        layers = [f"{share:.0%} in layer {layer}" for layer, share in enumerate(often) if share < 1]
        if layers:
            told.append(
                "Which head best-later keeps depends on the prompts: the one that is chosen most often is so in "
                f"{', '.join(layers)} of the choices on halves of them."
            )
        return told

    def tables(self) -> dict[str, Table]:
        """What is kept of each layer; of several rules what each costs, curves, and how often each head is chosen."""
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
        """Curves, what rules cost, and how often each head is chosen."""
        drawn = {} if self.curves is None else {"pruning": self.curves.plot()}
        chosen = {"chosen": self.plot_chosen()} if self.pruned or not self.by_rule else {}
        return drawn | {"rules": self.plot()} | chosen

    def to_document(self) -> dict:
        """Of one rule risks and heads, where few prompts carry the risk what is measured with a new read-out first;
        of several rules its tables."""
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
        """One row per head; of several rules one per rule, numbers with a new read-out first where few prompts carry a risk."""
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
        """Excess risk of the full model and of what each rule leaves, as they are and with a new read-out."""
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
        """How often each head is kept, a row per layer, of several rules one for each."""
        rows = {
            f"{rule} L{layer}".strip(): row
            for rule, each in (self.pruned or {"": self}).items()
            for layer, row in enumerate(each.chosen)
        }
        return heatmaps.heatmap(
            np.array(list(rows.values())),
            title="Share of the choices on halves of the prompts that keep a head",
            rows=list(rows),
            columns=[f"H{head}" for head in range(self.kept.shape[1])],
            unit="share",
            signed=False,
        )


def cost_names(few: bool) -> tuple[str, ...]:
    """The fields of a cost, those with a new read-out first where few prompts carry the risk."""
    as_is, refit = with_sem("risk", "ratio"), with_sem("refit_risk", "refit_ratio")
    return (*((*refit, *as_is) if few else (*as_is, *refit)), "carried_by_few")


def best_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Every head of the first layer, and of each later one the head that is missed most.

    Example:
        >>> best_head_later(np.array([[1.0, 2.0], [1.0, 2.0], [0.0, -1.0]])).tolist()
        [[True, True], [False, True], [True, False]]
    """
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[0] = True
    return kept


def least_head_later(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Every head of the first layer, and of each later one the head that is missed least: a control."""
    return best_head_later(-rise)


def best_head_first(rise: Float[np.ndarray, "layer head"]) -> Bool[np.ndarray, "layer head"]:
    """Of the first layer the head that is missed most, and every head of the later ones: a control."""
    kept = _only(rise.argmax(1), rise.shape[1])
    kept[1:] = True
    return kept


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
    """The model without the heads that a rule lets go, its risk and that with a new read-out.

    Heads are scored by zero ablation. `kept` is chosen on all prompts: measure it on others. The risks are
    cross-fitted: the prompts are halved at random `splits` times, heads are chosen on each half, and a prompt's
    error is its mean over the choices that it had no part in. Their standard error is

    sqrt(SEM^2 + V),

    with SEM that of the mean of these errors over prompts (paired, by the delta method, for ratios) and V the
    variance over the 2 splits choices of the risk, or ratio, of what is chosen. V is 0 where the choice is clear.
    As halves of the same prompts overlap, it is not divided by their number; between heads that nothing tells apart
    it is twice the variance of the mean over choices, so that the error is too large there rather than too small.

    Args:
        prompts: None: `n_prompts` of the model's own task are drawn, by `seed`.
        n_prompts: None: 4096, of models with norms or MLPs 512, or as many as probes of a wide stream take.
        rule: From the rises to what is kept; `best_head_later` or any other.
        sequential: Whether the layers are pruned one after another from the first, the heads of each scored with
            those of the layers before it gone; else all are scored on the full model.
        splits: Number of random halvings.
        progress: Optional progress callback.
    Raises:
        ValueError: If the rule keeps no head or its answer has another shape, or there are too few prompts or splits.
    Source:
        After Chen, Zhao and Zou 2024, arXiv 2408.04532: all heads of the first layer and the best of each later
        one. What is scored how, and the read-out, are choices made here.
    Example:
        >>> from mechinterp.models.constructions.sparse import preprocess_then_optimise_model
        >>> prune(preprocess_then_optimise_model([0.5], d_x=4), n_prompts=64).ratio
        1.0
    """
    prompts = evaluation_prompts(source, prompts, n_prompts=n_prompts, seed=seed)
    errors = MaskedErrors(predictor_of(source), prompts, progress)
    return pruned_by(errors, rule, sequential=sequential, splits=splits)


def pruned_by(
    errors: MaskedErrors, rule: Rule, *, sequential: bool = False, splits: int
) -> Pruning:
    """What a rule keeps and costs, chosen on all prompts and on halves of them."""
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
    """The result of a choice of heads: what it costs, as measured on other prompts than chose it, beside the full model."""
    masks = [masked_by(each) for each in choices.kept]
    full, full_refitted = errors.of([[]])[:, 0], errors.refitted([[]])[:, 0]
    as_is, refitted = errors.of(masks).T, errors.refitted(masks).T
    costs = estimates(
        risk=choices.risk(as_is),
        ratio=choices.ratio(as_is, full),
        refit_risk=choices.risk(refitted),
        refit_ratio=choices.ratio(refitted, full),
        full_risk=mean_and_sem(full),
        full_refit_risk=mean_and_sem(full_refitted),
    )
    few = bool(carried_by_few(choices.crossed(as_is)))
    return Pruning(kept=kept, rise=rise, chosen=choices.chosen, carried_by_few=few, **costs)


def pruned_weights(weights: Weights, kept: Bool[np.ndarray, "layer head"]) -> Weights:
    """The weights of the model without the other heads, with as few heads per layer as the fullest one needs.

    Raises:
        ValueError: If `kept` is not of the model's shape or keeps no head.
    """
    kept = checked(kept, (weights.n_layers, weights.n_heads))
    return weights.without(masked_by(kept)).compact()


def pruned_origin(
    checkpoint: Checkpoint, kept: Bool[np.ndarray, "layer head"]
) -> dict[str, object]:
    """What the checkpoint of a pruned model says of where it comes from; its heads are numbered anew, in this order."""
    heads = [[int(head) for head in np.flatnonzero(layer)] for layer in kept]
    return {"pruned_from": checkpoint.name, "kept_heads": heads}


def save_pruned(
    checkpoint: Checkpoint,
    kept: Bool[np.ndarray, "layer head"],
    path: str | Path,
    *,
    prompts: Prompts,
    tolerance: float = 1e-5,
) -> Checkpoint:
    """The pruned model as a checkpoint of its own; read back, it predicts as the masked one.

    Args:
        kept: As in `Pruning`.
        prompts: On which both are compared.
        tolerance: Of the largest difference, relative to the largest prediction.
    Raises:
        CheckpointError: If the folder is not empty or cannot be written.
        ValueError: If no head is kept, or the saved model does not predict as the masked one.
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
    saved = load(path)
    own, expected = saved.predictor.run(prompts)[0], predictor.run(prompts, [gone])[0]
    size = expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
    error = ((own - expected).abs().max() / size).item()
    if not error <= tolerance:
        raise ValueError(
            f"{path}: the saved model must predict as the masked one to {tolerance}, got {error:.2g}."
        )
    return saved


def _only(heads: np.ndarray, n_heads: int) -> np.ndarray:
    """One head per layer."""
    return heads[:, None] == np.arange(n_heads)
