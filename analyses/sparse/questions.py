"""Measurements of sparse/settings.py on one trained model; no other file of it runs models.

One function per question, from a model and prompts to numbers. Heads are always chosen on `scored`
and measured on `measured`, which share no prompts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from analyses.lib import claims
from analyses.sparse.setting import TARGETS
from mechinterp import (
    ICLTransformer,
    Prompts,
    ablate,
    probe,
)
from mechinterp.analysis.ablation.ablation import Ablation
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruning import refit_errors
from mechinterp.analysis.ablation.pruning_rules import masked_by
from mechinterp.analysis.ablation.shares import effective_number
from mechinterp.analysis.probing.p_probe import IDEAL, RAW, descent_curves
from mechinterp.analysis.probing.target_functions import reweighted
from mechinterp.analysis.stats import resampled
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.sparse_predictors import descend, excess_risk
from mechinterp.models.run.predictor import predictor_of

AT, STEPS, PAIR_PROMPTS = 16, 32, 512
Pair = tuple[float, float]
Head = tuple[int, int]


def trained(folders: Iterable[Path]) -> list[Checkpoint]:
    """Models in these folders; unfinished ones are left out."""
    return [load(folder) for folder in folders if (folder / "config.json").exists()]


def risks(model: ICLTransformer, prompts: Prompts, gone: list[Head] | None = None) -> np.ndarray:
    """Excess risk of each prompt, with heads masked."""
    return masked_errors(model, prompts, [gone or []])[:, 0]


def refit_risks(model: ICLTransformer, prompts: Prompts, gone: list[Head]) -> np.ndarray:
    """Excess risk of each prompt with heads masked and a new read-out."""
    return refit_errors(model, prompts, gone)[0]


def rises(model: ICLTransformer, scored: Prompts) -> np.ndarray:
    """Rise of the excess risk when a head is masked, [layer, head]."""
    return ablate(model, scored, what="heads").rise


def spread(
    model: ICLTransformer, rise: np.ndarray, measured: Prompts
) -> tuple[Ablation, np.ndarray]:
    """Ablation of single heads, and the share of the head of each layer that was best on other
    prompts."""
    found = ablate(model, measured, what="heads")
    return found, np.take_along_axis(found.importance, rise.argmax(1)[:, None], 1)[:, 0]


@dataclass(frozen=True)
class EffectiveHeads:
    """Number of effective heads of each layer: exp of the entropy of the shares of its rises."""

    number: np.ndarray
    """From the mean rises, [layer]."""
    sem: np.ndarray
    """Standard error of `number`, from resampled prompts.

    If all heads of a layer count equally, the number is the maximum, and every sample is below it.
    Then the spread over samples is 0.6 (1 / sqrt(3)) of this error. The root mean square distance
    from the maximum is 0.7, 0.9 and 1.2 of it for 2, 4 and 8 heads."""
    of_medians: np.ndarray
    """From the median rises, [layer]."""

    def to_frame(self) -> pd.DataFrame:
        numbers = {"": self.number, "_sem": self.sem, "_of_medians": self.of_medians}
        frame = pd.DataFrame({f"effective_heads{end}": values for end, values in numbers.items()})
        return frame.rename_axis("layer").reset_index()


def rises_of(model: ICLTransformer, prompts: Prompts) -> np.ndarray:
    """Rise of each prompt's risk when each head is masked, [prompt, layer, head]."""
    predictor = predictor_of(model)
    errors = masked_errors(predictor, prompts, [[], *([head] for head in predictor.heads)])
    return (errors[:, 1:] - errors[:, :1]).reshape(len(errors), predictor.n_layers, -1)


def effective_heads(rises: np.ndarray) -> EffectiveHeads:
    """Effective heads from the rises of each prompt, [prompt, layer, head]."""
    samples = [np.tensordot(shares, rises, axes=1) for shares in resampled(len(rises))]
    return EffectiveHeads(
        number=effective_number(rises.mean(0)),
        sem=effective_number(np.array(samples)).std(0, ddof=1),
        of_medians=effective_number(np.median(rises, axis=0)),
    )


def as_text(shares: Iterable[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def without(rule, rise: np.ndarray) -> list[Head]:
    """Heads that a pruning rule drops."""
    return masked_by(rule(rise))


def best_pairs(model: ICLTransformer, shape: tuple[int, int], scored: Prompts) -> list[Head]:
    """Heads that are masked when the best pair of each later layer is kept, chosen layer by layer."""
    layers, heads = shape
    gone: list[Head] = []
    for layer in range(1, layers) if heads > 2 else []:
        masks = [
            [(layer, head) for head in range(heads) if head not in pair]
            for pair in combinations(range(heads), 2)
        ]
        errors = masked_errors(model, scored[:PAIR_PROMPTS], masks)
        gone += masks[int(np.median(errors, axis=0).argmin())]
    return gone


def probe_risks(model: ICLTransformer, prompts: Prompts, gone: list[Head]) -> np.ndarray:
    """Risk of a linear probe of the response at the query, before each layer and at the end."""
    return probe(model, prompts, targets="y", heads=gone).probes["y"].risk[:, -1]


def first_layer(model: ICLTransformer, prompts: Prompts) -> dict[str, float]:
    """R^2 of probes of the first layer's output for its possible targets."""
    found = probe(model, prompts, targets=TARGETS).probes
    return {name: float(each.r2[1, -1]) for name, each in found.items()}


def features(models: dict[str, ICLTransformer], prompts: Prompts) -> dict[str, torch.Tensor]:
    """Features for descent: raw x, R x, and the first layer's output of models."""
    found = {RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)}
    found[IDEAL] = reweighted(prompts)[0]
    own = {name: predictor_of(model).query_streams(prompts, 1) for name, model in models.items()}
    return found | own


def area(phis: dict[str, torch.Tensor], prompts: Prompts, *, of: str, over: str) -> Pair:
    """Mean log risk of descent on some features minus that on others."""
    curves = descent_curves({n: phis[n] for n in (over, of)}, prompts, steps=STEPS)
    return float(curves.log_area[1]), float(curves.log_area_sem[1])


def risk_at(phi: torch.Tensor, prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt after 16 steps of descent on the features."""
    columns, target = phi.double()[..., None], prompts.to(torch.float64)
    path = descend(columns[:, :-1], target.y, columns[:, -1], steps=AT)
    return excess_risk(path[-1], target).numpy()


def over_training(checkpoint: Checkpoint, prompts: Prompts) -> list[dict[str, object]]:
    """Effective heads, and the shares of the first layer's heads, at each saved step."""
    rows: list[dict[str, object]] = []
    for step, weights in sorted(checkpoint.snapshots.items()):
        model = ICLTransformer.from_weights(weights, task=checkpoint.task)
        found = ablate(model, prompts, what="heads")
        row = {"step": step, "risk": found.full_risk, "shares_1": as_text(found.importance[0])}
        effective = effective_heads(rises_of(model, prompts))
        for layer, (number, sem) in enumerate(zip(effective.number, effective.sem, strict=True), 1):
            row |= {f"n_eff_{layer}": float(number), f"n_eff_{layer}_sem": float(sem)}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Numbers:
    """Measured numbers of a model."""

    effective: Sequence[float]
    """Effective heads of each layer, by median rises."""
    shares: Sequence[float]
    """Share of the head of each layer that was best on other prompts."""
    later: float
    """Risk with one head in each later layer and a new read-out, relative to the full model."""
    later_median: float
    """Median risk with one head in each later layer and no new read-out, relative to the full
    model."""
    first: float
    """Risk with one head in layer 1 and a new read-out, relative to the full model."""

    def by_clause(self) -> dict[str, float]:
        """Numbers that decide C10 to C12, by the rest of the claim's id."""
        return {
            "C10-several": self.effective[0],
            "C10-later": self.effective[0] / max(self.effective[1:]),
            "C10-top-first": self.shares[0],
            "C10-top-later": float(np.median(self.shares[1:])),
            "C11-refit": self.later,
            "C11-as-is": self.later_median,
            "C12-refit": self.first,
            "C12-beside-refit": self.first / self.later,
        }


def verdicts(found: Numbers) -> dict[str, bool]:
    """Verdicts on C10 to C12: a claim holds if all of its clauses do."""
    values = found.by_clause()
    held = {name: claims()[f"sparse-{name}"].holds(value) for name, value in values.items()}
    return {
        claim: all(holds for name, holds in held.items() if name.startswith(claim))
        for claim in ("C10", "C11", "C12")
    }


def of_row(row: Mapping[str, object]) -> dict[str, object]:
    """Verdicts on C10 to C12 for a row of results/sparse_settings.csv, on C11 with a pair instead
    of one head, and on C13 with a new read-out if there is a single head to compare with."""
    layers = range(1, int(row["n_layers"]) + 1)
    effective = [float(row[f"n_eff_{layer}_median"]) for layer in layers]
    shares = [float(row[f"top_share_{layer}"]) for layer in layers]
    one, pair = (
        verdicts(
            Numbers(
                effective,
                shares,
                later=float(row[f"{name}_refit"]),
                later_median=float(row[f"{name}_median"]),
                first=float(row["first_refit"]),
            )
        )
        for name in ("later", "pairs")
    )
    judged = one | {"C11_pairs": pair["C11"]}
    if np.isnan(row.get("to_single", np.nan)):
        return judged
    # Both are ratios of means over the same prompts, so the full model's risk cancels.
    kept = float(row["later_refit"]) * float(row["to_single"])
    holds = claims()["sparse-C13-refit"].holds(kept)
    return judged | {"later_refit_to_single": kept, "C13": holds}
