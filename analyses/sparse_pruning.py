"""C11 to C13 and C16 of sparse regression: what trained models lose with one head in each later layer.

Kept are all heads of layer 1 and the best of each later one, scored by masking on the first half of the prompts; risks
are those of the second, nothing retrained. New read-outs are cross-validated ridge probes.
Run: python analyses/sparse_pruning.py (three minutes; --quick half a minute)
"""

import numpy as np
import pandas as pd
from measured import Claim, Measured, run
from sparse_models import SEVERAL, SINGLE, named, prompts_of, trained
from sparse_setting import each, ratio

from mechinterp import figures
from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.head_sets import halves
from mechinterp.analysis.masking import masked_errors
from mechinterp.analysis.pruning import (  # fmt: skip
    Pruning,
    best_head_first,
    best_head_later,
    least_head_later,
    prune,
)
from mechinterp.icl.prompts import Prompts

RULES = {"best later": best_head_later, "least later": least_head_later, "best first": best_head_first}  # fmt: skip
COSTS = ("risk", "risk_sem", "ratio", "ratio_sem", "refit_risk", "refit_risk_sem")
KEPT = ("risk", "risk_sem", "ratio", "ratio_sem", "to_single", "to_single_sem")


def kept_curve(name: str, rise: np.ndarray, prompts: Prompts, single: np.ndarray) -> pd.DataFrame:
    """Risk with all heads of layer 1 and the best 1, 2, ... of each later one."""
    order, later, sizes = rise.argsort(1)[:, ::-1], range(1, len(rise)), range(1, len(rise[0]) + 1)
    masks = [[(layer, int(h)) for layer in later for h in order[layer, k:]] for k in sizes]
    errors = masked_errors(trained(name).model, prompts, masks)
    rows = [(*mean_and_sem(e), *ratio(e, errors[:, -1]), *ratio(e, single)) for e in errors.T]
    return pd.DataFrame(rows, columns=KEPT, dtype=float).assign(kept_later=sizes)


def refitted(found: Pruning) -> tuple[float, float]:
    """Risk with a new read-out over that of the full model; the standard error is an upper bound, as if unpaired."""
    value = found.refit_risk / found.full_risk
    parts = (found.refit_risk_sem / found.refit_risk, found.full_risk_sem / found.full_risk)
    return value, value * float(np.hypot(*parts))


def measure(quick: bool) -> Measured:
    prompts, frames, claims, curves = prompts_of(256 if quick else 4096), {}, [], {}
    single = masked_errors(trained(SINGLE).model, halves(prompts)[1], [[]])[:, 0]
    for name in SEVERAL:
        found = {rule: prune(trained(name).model, prompts, rule=how) for rule, how in RULES.items()}
        curve = kept_curve(name, found["best later"].rise, halves(prompts)[1], single)
        curves[name], first = curve, curve.iloc[0]
        bare, control = ((found[r].ratio, found[r].ratio_sem) for r in ("best later", "best first"))
        new, last = refitted(found["best later"]), refitted(found["best first"])
        claims += [
            Claim("C11", "one head in each later layer will do: risk at most 2 times, 1.25 with a new read-out", name, "preserved", each({"as it is": bare, "new read-out": new}, 2), bare[0] <= 2 and new[0] <= 1.25),
            Claim("C12", "one head in layer 1 will not: risk at least 2 times, and 1.5 times the ratio of C11", name, "not asked", each({"as it is": control, "new read-out": last}, 2), control[0] >= max(2, 1.5 * bare[0])),
            Claim("C13", "pruned as in C11 it still beats a single head: at most 0.95 of its risk", f"{name}, {SINGLE}", "shown (second hand)", each({"ratio": (first.to_single, first.to_single_sem)}, 2), bool(first.to_single <= 0.95)),
        ]  # fmt: skip
        costs = [{"rule": rule} | {c: getattr(p, c) for c in COSTS} for rule, p in found.items()]
        frames[name] = pd.concat([pd.DataFrame(costs), curve.assign(rule="best later, kept")])
    held = [bool(claim.holds) for claim in claims]
    text = f"at 0.1 {held.count(False)} of {len(held)} fail; no models at 0.4 and 0.8 shipped"
    claims.append(Claim("C16", "C11 to C13 hold for noise variances 0.1, 0.4 and 0.8", "sparse-h[48]-noise0.1-s0", "several noise levels", text, "not testable" if all(held) else False))  # fmt: skip
    widest = curves[SEVERAL[-1]]
    figure = figures.lines(widest.kept_later.to_numpy(), {SEVERAL[-1]: widest.risk.to_numpy()}, errors={SEVERAL[-1]: widest.risk_sem.to_numpy()}, title="Excess risk with the best heads of each later layer", x_title="heads kept in each later layer", y_title="excess risk (y²)", log_y=True)  # fmt: skip
    return Measured(named(frames), {"kept": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
