"""C11 to C13 and C16 of sparse regression: what trained models lose with one head in each later layer.

Kept are all heads of layer 1 and the best of each later one, scored by masking on random halves of the prompts; risks
are those of the other halves, and their errors are over prompts and over which heads are chosen. Nothing is retrained
(sparse_fine_tuning.py trains further). New read-outs are cross-validated ridge probes; they stand first where one
prompt in a hundred carries most of the risk as it is.
Run: python analyses/sparse_pruning.py (two minutes; --quick half a minute)
"""

import numpy as np
import pandas as pd
from measured import Claim, Measured, run
from sparse_models import (
    NOISES,
    frames_of,
    groups,
    over_seeds,
    prompts_of,
    single_of,
    trained,
    verdict,
)
from sparse_setting import each, ratio

from mechinterp import figures
from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.heads.ablation import ablate_heads
from mechinterp.analysis.heads.choices import (
    SPLITS,
    MaskedErrors,
    choices_on_halves,
    masked_by,
)
from mechinterp.analysis.heads.errors import masked_errors
from mechinterp.analysis.heads.pairs import halves
from mechinterp.analysis.heads.pruning import (
    Pruning,
    best_head_first,
    best_head_later,
    least_head_later,
    prune,
)
from mechinterp.icl.prompts import Prompts
from mechinterp.models.predictor import predictor_of

RULES = {"best later": best_head_later, "least later": least_head_later, "best first": best_head_first}  # fmt: skip
COSTS = ("risk", "risk_sem", "ratio", "ratio_sem", "refit_risk", "refit_risk_sem", "refit_ratio", "refit_ratio_sem", "carried_by_few")  # fmt: skip
KEPT = ("risk", "risk_sem", "ratio", "ratio_sem", "to_single", "to_single_sem")
Pairs = dict[str, tuple[float, float]]


def kept_curve(name: str, rise: np.ndarray, prompts: Prompts, single: np.ndarray) -> pd.DataFrame:
    """Risk with all heads of layer 1 and the best 1, 2, ... of each later one."""
    order, later, sizes = rise.argsort(1)[:, ::-1], range(1, len(rise)), range(1, len(rise[0]) + 1)
    masks = [[(layer, int(h)) for layer in later for h in order[layer, k:]] for k in sizes]
    errors = masked_errors(trained(name).model, prompts, masks)
    rows = [(*mean_and_sem(e), *ratio(e, errors[:, -1]), *ratio(e, single)) for e in errors.T]
    return pd.DataFrame(rows, columns=KEPT, dtype=float).assign(kept_later=sizes)


def to_single(name: str, prompts: Prompts) -> tuple[float, float]:
    """Risk with the best head of each later layer over that of the model of one head, cross-fitted."""
    errors = MaskedErrors(predictor_of(trained(name).model), prompts)
    choices = choices_on_halves(errors, best_head_later, sequential=False, splits=SPLITS)
    kept = errors.of([masked_by(kept) for kept in choices.kept]).T
    return choices.ratio(kept, masked_errors(trained(single_of(name)).model, prompts, [[]])[:, 0])


def often(found: Pruning) -> str:
    """The heads of the layers that lose some, and how often each is chosen."""
    lost = ~found.kept.all(1)
    heads = [(layer, head) for layer, head in np.argwhere(found.chosen > 0) if lost[layer]]
    return ", ".join(f"L{layer}H{head} {found.chosen[layer, head]:.2f}" for layer, head in heads)


def one_model(name: str, prompts: Prompts) -> tuple[pd.DataFrame, Pairs]:
    """Costs of the rules and of what is kept, and the numbers of the claims."""
    model, (scored, measured) = trained(name).model, halves(prompts)
    single = masked_errors(trained(single_of(name)).model, measured, [[]])[:, 0]
    found = {rule: prune(model, prompts, rule=how) for rule, how in RULES.items()}
    rise = ablate_heads(model, scored).rise
    curve = kept_curve(name, rise, measured, single).assign(rule="best later, kept")
    costs = [{"rule": rule} | {c: getattr(p, c) for c in COSTS} | {"chosen": often(p)} for rule, p in found.items()]  # fmt: skip
    numbers = {"to single": to_single(name, prompts)}
    for key, rule in (("later", "best later"), ("first", "best first")):
        one = found[rule]
        pairs = {key: (one.ratio, one.ratio_sem), f"{key}, new read-out": (one.refit_ratio, one.refit_ratio_sem)}  # fmt: skip
        numbers |= dict(reversed(pairs.items())) if one.carried_by_few else pairs
    return pd.concat([pd.DataFrame(costs), curve]), numbers


def claims(models: str, found: dict[str, Pairs]) -> tuple[list[Claim], list[bool]]:
    """Of the models of all seeds, and whether each of C11 to C13 holds in each; the numbers are by seed."""
    c11, c12, c13 = (
        [one["later"][0] <= 2 and one["later, new read-out"][0] <= 1.25 for one in found.values()],
        [one["first"][0] >= max(2, 1.5 * one["later"][0]) for one in found.values()],
        [one["to single"][0] <= 0.95 for one in found.values()],
    )

    def told(key: str) -> str:
        names = {key: "as it is", f"{key}, new read-out": "new read-out"}
        return each({f"{s}, {names[name]}": pair for s, one in found.items() for name, pair in one.items() if name in names}, 2)  # fmt: skip

    later, first = told("later"), told("first")
    singles = each({f"{s}, ratio": one["to single"] for s, one in found.items()}, 2)
    made = [
        Claim("C11", "one head in each later layer will do: risk at most 2 times, 1.25 with a new read-out", models, "preserved", later, verdict(c11)),
        Claim("C12", "one head in layer 1 will not: risk at least 2 times, and 1.5 times the ratio of C11", models, "not asked", first, verdict(c12)),
        Claim("C13", "pruned as in C11 it still beats the single head of the same seed: at most 0.95 of its risk", models, "shown (second hand)", singles, verdict(c13)),
    ]  # fmt: skip
    return made, c11 + c12 + c13


def measure(quick: bool) -> Measured:
    frames, made, pages = {}, [], {}
    held: dict[float, list[bool]] = {noise: [] for noise in NOISES}
    for heads, noise, names in groups():
        prompts, found = prompts_of(noise, 256 if quick else 4096), {}
        for seed, name in names.items():
            frames[name], found[seed] = one_model(name, prompts)
            curve = frames[name].query("rule == 'best later, kept'")
            pages[f"{name}-kept"] = figures.lines(curve.kept_later.to_numpy(), {name: curve.risk.to_numpy()}, errors={name: curve.risk_sem.to_numpy()}, title="Excess risk with the best heads of each later layer", x_title="heads kept in each later layer", y_title="excess risk (y²)", log_y=True)  # fmt: skip
        more, holds = claims(over_seeds(heads, noise), found)
        made, held[noise] = made + more, held[noise] + holds
    text = "; ".join(f"at {noise} {holds.count(False)} of {len(holds)} fail" for noise, holds in held.items())  # fmt: skip
    every = all(all(holds) for holds in held.values())
    made.append(Claim("C16", "C11 to C13 hold for noise variances 0.1, 0.4 and 0.8", "sparse-h[48]-*", "several noise levels", f"{text}; others not trained", "not tested at 0.8" if every else False))  # fmt: skip
    return Measured(frames_of(frames), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
