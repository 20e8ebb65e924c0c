"""C9 of sparse regression: excess risk of trained models over the context length, by their number of heads.

Beside them, on the same prompts: ridge, lasso, gradient descent and Algorithm 1 at their best penalty, step or alpha of
each length, least squares, and both algorithms with the three steps of one size that four layers have room for.
Run: python analyses/sparse_risk.py (three minutes; --quick half a minute)
"""

import numpy as np
import pandas as pd
import torch
from measured import Claim, Measured, run
from sparse_models import SEVERAL, SINGLE, prompts_of, trained
from sparse_setting import best, best_fixed_step, best_lasso, best_ridge, each, ratio

from mechinterp import figures
from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.masking import masked_errors
from mechinterp.icl.sparse_predictors import gradient_descent, ols, preprocess_then_optimise

LENGTHS = (8, 16, 24, 32, 40)
TWICE, FULL = 32, 40  # 2 d, and the longest of training
DRAWN = (SINGLE, *SEVERAL, "ridge", "lasso", "GD", "Algorithm 1")


def risks(length: int, n_prompts: int) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by model and learner; those of one step size have the last half of the prompts."""
    prompts = prompts_of(n_prompts, context_length=length)
    found = {n: masked_errors(trained(n).model, prompts, [[]])[:, 0] for n in (SINGLE, *SEVERAL)}
    prompts = prompts.to(torch.float64)
    found |= {"ridge": best_ridge(prompts), "OLS": best([ols(prompts)], prompts)}
    found["lasso"] = best_lasso(prompts)
    for name, learner in {"GD": gradient_descent, "Algorithm 1": preprocess_then_optimise}.items():
        found[name] = best(learner(prompts, steps=128), prompts)
        found[f"{name}, 3 steps of one size"] = best_fixed_step(learner, prompts, 3)
    return found


def against(found: dict[str, np.ndarray], rival: str) -> dict[str, tuple[float, float]]:
    """Risk of each model over that of a rival."""
    n = len(found[rival])
    return {name: ratio(found[name][-n:], found[rival]) for name in (SINGLE, *SEVERAL)}


def measure(quick: bool) -> Measured:
    found = {length: risks(length, 256 if quick else 4096) for length in LENGTHS}
    rows, claims = [], []
    for length, one in found.items():
        for name, values in one.items():
            mean, sem = mean_and_sem(values)
            rows.append({"context_length": length, "learner": name, "risk": float(mean), "risk_sem": float(sem)})  # fmt: skip
            rows[-1] |= dict(zip(("to_ridge", "to_ridge_sem"), ratio(values, one["ridge"][-len(values) :]), strict=True))  # fmt: skip
    for name in SEVERAL:
        values = {f"L {length}:": ratio(found[length][name], found[length][SINGLE]) for length in (TWICE, FULL)}  # fmt: skip
        value, sem = values[f"L {TWICE}:"]
        claims.append(Claim("C9", "several heads help: risk at most 0.9 of a single head's at L = 2 d", f"{name}, {SINGLE}", "lower, curves only", each(values), bool(value + 1.96 * sem <= 0.9)))  # fmt: skip
    models, last = "sparse-h[148]-noise0.1-s0", found[FULL]
    texts = {
        "ridge": "at L = 40 trained models beat ridge at its best penalty",
        "OLS": "and least squares",
        "GD": "and GD at its best step",
        "Algorithm 1": "and Algorithm 1 at its best step",
        "lasso": "and lasso at its best penalty",
        "Algorithm 1, 3 steps of one size": "and Algorithm 1 with three steps of one size",
    }
    for rival, text in texts.items():
        values = against(last, rival)
        paper = "lower for the algorithm" if rival in ("ridge", "GD") else "not asked"
        claims.append(Claim("", f"{text}: ratio below 1 by two standard errors", models, paper, each(values), all(v + 2 * s < 1 for v, s in values.values())))  # fmt: skip
    means = {name: np.array([mean_and_sem(found[length][name]) for length in LENGTHS]) for name in DRAWN}  # fmt: skip
    curves, errors = ({name: values[:, column] for name, values in means.items()} for column in (0, 1))  # fmt: skip
    figure = figures.lines(np.array(LENGTHS), curves, errors=errors, title="Excess risk over context length, same prompts", x_title="context length L", y_title="excess risk (y²)", log_y=True)  # fmt: skip
    return Measured(pd.DataFrame(rows), {"risk": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
