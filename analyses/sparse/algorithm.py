"""C4, C7 and C8 of sparse regression: tasks in which Algorithm 1 (preprocess then optimise) wins,
and tasks in which it loses.

No trained model. Excess risks at the best step or penalty, one for all prompts; ratios are on the
same prompts.
Run: python -m analyses sparse/algorithm (a minute; --quick seconds)"""

from dataclasses import replace

import numpy as np
import pandas as pd

from analyses.lib import Measured, record
from analyses.lib.theory.sparse import best_ridge_risk, ols_risk
from analyses.sparse import setting as at
from analyses.sparse.setting import SMALL, WIDE, best, draw, ratio
from mechinterp import Prompts
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.icl import sparse_predictors as learners

TASKS = {"wide": WIDE, "wide, L 64": replace(WIDE, context_length=64), "small": SMALL}
TASKS |= {
    "dense": replace(SMALL, sparsity=16),
    "gauss": replace(SMALL, nonzeros="gaussian", beta_var=1.0, noise_var=0.0),
}


def risks(prompts: Prompts) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner."""
    both = {"ours": learners.preprocess_then_optimise, "descent": learners.gradient_descent}
    ours, plain = (learner(prompts, steps=256) for learner in both.values())
    paths = {"ours": ours[:129], "ours, 256 steps": ours, "descent": plain[:129]}
    paths |= {"ours, step 8": ours[8:9], "descent, step 8": plain[8:9]}
    paths["ols"] = [learners.ols(prompts)]
    found = {name: best(path, prompts) for name, path in paths.items()}
    found |= {"ridge": at.best_ridge(prompts), "permuted": at.permuted(prompts)}
    for steps in (2, 3):
        for name, learner in both.items():
            found[f"{name}, {steps} steps of one size"] = at.best_fixed_step(
                learner, prompts, steps
            )
    return found


def ratios(found: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Values for C4, C7 and C8, by the rest of their ids."""
    wide, few, small = found["wide"], found["wide, L 64"], found["small"]
    dense, gauss = found["dense"], found["gauss"]
    asked = {
        "C4-ridge": {"L 128": ratio(wide["ours"], wide["ridge"])},
        "C4-least-squares": {"L 128": ratio(wide["ours"], wide["ols"])},
        "C4-descent": {"L 128": ratio(wide["ours"], wide["descent"])},
        "C4-step-8": {"L 128": ratio(wide["ours, step 8"], wide["descent, step 8"])},
        "C4-few": {"L 64": ratio(few["ours"], few["ridge"])},
    }
    for name, one in (("wide", wide), ("small", small)):
        ours, plain = (
            [one[f"{learner}, {steps} steps of one size"] for steps in (2, 3)]
            for learner in ("ours", "descent")
        )
        pairs = map(ratio, ours, plain)
        asked[f"C4-one-size-{name}"] = dict(zip(("2 steps", "3 steps"), pairs, strict=True))
    asked |= {
        "C7-dense": {"d 16": ratio(dense["ours"], dense["ridge"])},
        "C7-permuted": {
            "d 16": ratio(small["permuted"], small["ours"]),
            "d 64": ratio(wide["permuted"], wide["ours"]),
        },
        "C7-gaussian": {"d 16": mean_and_sem(gauss["ours, 256 steps"])},
        "C7-gaussian-exact": {"d 16": mean_and_sem(gauss["ols"])},
    }
    sizes = {"d_x": 64, "context_length": 128, "noise_var": 0.25}
    formulas = {"ols": ols_risk(**sizes), "ridge": best_ridge_risk(signal_var=1.0, **sizes)}
    for name, expected in formulas.items():
        risk, sem = mean_and_sem(wide[name])
        asked[f"C8-{name}"] = {"d 64": (risk / expected, sem / expected)}
    return asked


def measure(quick: bool) -> Measured:
    found = {name: risks(draw(task, 64 if quick else 512)) for name, task in TASKS.items()}
    over = {"prompts": 64 if quick else 512}
    half = {"selection": "step size chosen on the other half"}
    claims = [
        record(f"sparse-{name}", pairs, over=over | (half if "one-size" in name else {}))
        for name, pairs in ratios(found).items()
    ]
    rows = [
        (task, name, *map(float, mean_and_sem(values)))
        for task, one in found.items()
        for name, values in one.items()
    ]
    columns = ("task", "learner", "risk", "risk_sem")
    return Measured(pd.DataFrame(rows, columns=columns), claims=claims)
