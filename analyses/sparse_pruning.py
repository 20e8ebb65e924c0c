"""C11 to C13 and C16 of sparse regression: what trained models lose with one head in each later layer.

Kept are all heads of layer 1 and the best of each later one, scored by masking on the first half of the prompts; risks
are those of the second, nothing retrained. New read-outs are cross-validated ridge probes.
Run: python analyses/sparse_pruning.py (two minutes; --quick half a minute)
"""

from itertools import product

import numpy as np
import pandas as pd
from measured import Claim, Measured, run
from sparse_models import (  # fmt: skip
    NOISES,
    SEVERAL,
    frames_of,
    named,
    over_seeds,
    prompts_of,
    seeds,
    trained,
    verdict,
)
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
Pairs = dict[str, tuple[float, float]]


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


def one_model(heads: int, noise: float, seed: int, prompts: Prompts) -> tuple[pd.DataFrame, pd.DataFrame, Pairs]:  # fmt: skip
    """Costs of the rules, the curve of what is kept, and the numbers of the claims."""
    name, measured = named(heads, noise, seed), halves(prompts)[1]
    single = masked_errors(trained(named(1, noise, seed)).model, measured, [[]])[:, 0]
    found = {rule: prune(trained(name).model, prompts, rule=how) for rule, how in RULES.items()}
    curve = kept_curve(name, found["best later"].rise, measured, single)
    costs = [{"rule": rule} | {c: getattr(p, c) for c in COSTS} for rule, p in found.items()]
    numbers = {
        "later": (found["best later"].ratio, found["best later"].ratio_sem),
        "later, new read-out": refitted(found["best later"]),
        "first": (found["best first"].ratio, found["best first"].ratio_sem),
        "first, new read-out": refitted(found["best first"]),
        "to single": (float(curve.to_single[0]), float(curve.to_single_sem[0])),
    }
    return pd.DataFrame(costs), curve, numbers


def claims(models: str, found: dict[str, Pairs]) -> tuple[list[Claim], list[bool]]:
    """Of the models of all seeds, and whether each holds in each; the numbers are by seed."""
    c11, c12, c13 = (
        [one["later"][0] <= 2 and one["later, new read-out"][0] <= 1.25 for one in found.values()],
        [one["first"][0] >= max(2, 1.5 * one["later"][0]) for one in found.values()],
        [one["to single"][0] <= 0.95 for one in found.values()],
    )

    def told(names: dict[str, str]) -> str:
        return each({f"{s}, {text}": one[key] for s, one in found.items() for key, text in names.items()}, 2)  # fmt: skip

    later = told({"later": "as it is", "later, new read-out": "new read-out"})
    first = told({"first": "as it is", "first, new read-out": "new read-out"})
    made = [
        Claim("C11", "one head in each later layer will do: risk at most 2 times, 1.25 with a new read-out", models, "preserved", later, verdict(c11)),
        Claim("C12", "one head in layer 1 will not: risk at least 2 times, and 1.5 times the ratio of C11", models, "not asked", first, verdict(c12)),
        Claim("C13", "pruned as in C11 it still beats the single head of the same seed: at most 0.95 of its risk", models, "shown (second hand)", told({"to single": "ratio"}), verdict(c13)),
    ]  # fmt: skip
    return made, c11 + c12 + c13


def measure(quick: bool) -> Measured:
    frames, made, pages, held = {}, [], {}, {}
    for noise, heads in product(NOISES, SEVERAL):
        prompts, found = prompts_of(noise, 256 if quick else 4096), {}
        for seed in seeds(noise):
            name = named(heads, noise, seed)
            costs, curve, found[f"s{seed}"] = one_model(heads, noise, seed, prompts)
            frames[name] = pd.concat([costs, curve.assign(rule="best later, kept")])
            pages[f"{name}-kept"] = figures.lines(curve.kept_later.to_numpy(), {name: curve.risk.to_numpy()}, errors={name: curve.risk_sem.to_numpy()}, title="Excess risk with the best heads of each later layer", x_title="heads kept in each later layer", y_title="excess risk (y²)", log_y=True)  # fmt: skip
        more, holds = claims(over_seeds(heads, noise), found)
        made, held[noise] = made + more, held.get(noise, []) + holds
    text = "; ".join(f"at {noise} {holds.count(False)} of {len(holds)} fail" for noise, holds in held.items())  # fmt: skip
    every = all(all(holds) for holds in held.values())
    made.append(Claim("C16", "C11 to C13 hold for noise variances 0.1, 0.4 and 0.8", "sparse-h[48]-*", "several noise levels", f"{text}; others not trained", "not tested at 0.8" if every else False))  # fmt: skip
    return Measured(frames_of(frames), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
