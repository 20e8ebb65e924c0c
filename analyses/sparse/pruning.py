"""C11 to C13 and C16 of sparse regression: cost of keeping one head in each later layer of trained
models.

All heads of layer 1 and the best head of each later layer are kept. Heads are scored by masking on
random halves of the prompts; risks use the other halves, and their errors are over prompts and over
the choices of heads. Nothing is retrained (sparse/fine_tuning.py trains further). New read-outs are
cross-validated ridge probes. C11 to C13 are decided by them and by medians (questions.py), because
a few prompts may dominate the mean risk without a new read-out.
Run: python -m analyses sparse/pruning (two minutes; --quick half a minute)"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, record, records
from analyses.sparse import setting as at
from analyses.sparse.crossed import Crossed, crossed
from analyses.sparse.setting import RISK_AXIS, Pair, over, ratio
from mechinterp import Prompts, ablate, figures
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.ablation.pruning_rules import (
    best_head_first,
    best_head_later,
    least_head_later,
)
from mechinterp.analysis.stats import halves, mean_and_sem

RULES = {
    "best later": best_head_later,
    "least later": least_head_later,
    "best first": best_head_first,
}
AS_IS = ("risk", "risk_sem", "ratio", "ratio_sem")
COSTS = (*AS_IS, *(f"refit_{name}" for name in AS_IS), "carried_by_few")
ASKED = ("best later", "best first")
"""Rules of C11 and of C12."""
KEPT = (*AS_IS, "to_single", "to_single_sem")


def kept_curve(name: str, rise: np.ndarray, prompts: Prompts, single: np.ndarray) -> pd.DataFrame:
    """Risk with all heads of layer 1 and the best 1, 2, ... heads of each later layer."""
    order, later, sizes = rise.argsort(1)[:, ::-1], range(1, len(rise)), range(1, len(rise[0]) + 1)
    masks = [[(layer, int(h)) for layer in later for h in order[layer, k:]] for k in sizes]
    errors = masked_errors(at.trained(name).model, prompts, masks)
    rows = [(*mean_and_sem(e), *ratio(e, errors[:, -1]), *ratio(e, single)) for e in errors.T]
    return pd.DataFrame(rows, columns=KEPT, dtype=float).assign(kept_later=sizes)


def cost_rows(found: Mapping[str, Crossed], full: np.ndarray) -> pd.DataFrame:
    """Costs of rules, as means and as medians over prompts.

    Args:
        full: Error of the full model on each prompt.
    """
    rows = []
    for name, one in found.items():
        row = {"rule": name} | {cost: getattr(one, cost) for cost in COSTS}
        median = np.median(one.choices.crossed(one.errors)) / np.median(full)
        rows.append(row | {"median_ratio": float(median), "chosen": often(one)})
    return pd.DataFrame(rows)


def to_single(found: Crossed, single: np.ndarray) -> tuple[Pair, float]:
    """Risk with a new read-out relative to the one-head model, and the ratio of medians without a
    new read-out; cross-fitted."""
    median = np.median(found.choices.crossed(found.errors)) / np.median(single)
    ratio = found.choices.ratio(found.refit_errors, single, found.fit_errors)
    return ratio, float(median)


def errors_of(name: str, prompts: Prompts) -> np.ndarray:
    """Error of a model on each prompt."""
    return masked_errors(at.trained(name).model, prompts, [[]])[:, 0]


def often(found: Crossed) -> str:
    """Heads of the pruned layers, and how often each is chosen."""
    lost = ~found.kept.all(1)
    heads = [(layer, head) for layer, head in np.argwhere(found.chosen > 0) if lost[layer]]
    return ", ".join(f"L{layer}H{head} {found.chosen[layer, head]:.2f}" for layer, head in heads)


def one_model(name: str, prompts: Prompts) -> tuple[pd.DataFrame, tuple[Pair, float]]:
    """Costs of the rules and of keeping more heads; and the first rule relative to a single head."""
    model, (scored, measured) = at.trained(name).model, halves(prompts)
    full, alone = (errors_of(one, prompts) for one in (name, at.single_of(name)))
    found = {how: crossed(model, prompts, rule) for how, rule in RULES.items()}
    costs, beside = cost_rows(found, full), to_single(found["best later"], alone)
    rise = ablate(model, scored, what="heads").rise
    curve = kept_curve(name, rise, measured, alone[-len(measured) :])
    return pd.concat([costs, curve.assign(rule="best later, kept")]), beside


def chosen(n_prompts: int) -> dict[str, int | str]:
    return {"prompts": n_prompts, "selection": "chosen on halves, measured on others"}


def cost_records(
    found: dict[str, pd.DataFrame], n_prompts: int, *, note: str, suffix: str = ""
) -> list[Record]:
    """C11 and C12 by model, also by medians.

    Args:
        found: Costs of RULES for each model, one row per rule.
    """
    rows = {name: costs.set_index("rule") for name, costs in found.items()}
    later, first = ({n: row.loc[rule] for n, row in rows.items()} for rule in ASKED)
    c11, c12 = (
        {name: (row.refit_ratio, row.refit_ratio_sem) for name, row in rule.items()}
        for rule in (later, first)
    )
    measured = {"C11-refit": c11, "C12-refit": c12}
    measured["C12-beside-refit"] = {name: over(c12[name], c11[name]) for name in c11}
    for clause, rule in (("C11-as-is", later), ("C12-as-is", first)):
        measured[clause] = {name: row.median_ratio for name, row in rule.items()}
    named = {f"{clause}{suffix}": values for clause, values in measured.items()}
    return records("sparse-", named, over=chosen(n_prompts), note=note)


def noise_records(claims: list[Record]) -> list[Record]:
    """C16: number of failures of C11 to C13 at each noise variance."""
    asked = [one for one in claims if one.said_by == "second hand"]
    made = []
    for noise in (0.1, 0.4, 0.8):
        names = [(one, name) for one in asked for name in one.values if f"noise{noise}-" in name]
        failed = sum(name not in one.holding for one, name in names)
        values, text, note = {f"noise {noise}": failed}, f"{failed} of {len(names)}", at.NOTE
        values, text, note = (values, text, note) if names else ({}, "not trained", "")
        made.append(record(f"sparse-C16-noise{noise}", values, text=text, note=note))
    return made


def measure(quick: bool) -> Measured:
    frames, singles, pages = {}, {}, {}
    n_prompts = 256 if quick else 4096
    for noise in at.NOISES:
        prompts = at.prompts_of(noise, n_prompts)
        for name in at.shipped(noise, at.SEVERAL).values():
            frames[name], singles[name] = one_model(name, prompts)
            curve = frames[name].query("rule == 'best later, kept'")
            axes = {"x_title": "heads kept in each later layer"} | RISK_AXIS
            kept = curve.kept_later.to_numpy()
            risk = {name: (curve.risk.to_numpy(), curve.risk_sem.to_numpy())}
            title = "Excess risk with the best heads of each later layer"
            pages[f"{name}-kept"] = figures.lines(kept, risk, title=title, **axes)
    costs = {name: frame[frame.rule.isin(RULES)] for name, frame in frames.items()}
    claims = cost_records(costs, n_prompts, note=at.NOTE)
    kept = {
        how: {n: one[i] for n, one in singles.items()} for i, how in enumerate(("refit", "as-is"))
    }
    claims += records("sparse-C13-", kept, over=chosen(n_prompts), note=at.NOTE)
    return Measured(at.frames_of(frames), pages, [*claims, *noise_records(claims)])
