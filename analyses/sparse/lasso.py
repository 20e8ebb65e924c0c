"""C5 and C6 of sparse regression: Algorithm 1 is similar to lasso if L >= d, and its risk hardly
grows with d.

No trained model. Excess risks at the best step, penalty or alpha, one for all prompts; ratios are
on the same prompts.
Run: python -m analyses sparse/lasso (two minutes; --quick half a minute)"""

from dataclasses import replace

import numpy as np
import pandas as pd

from analyses.lib import Measured, records
from analyses.sparse import setting as at
from analyses.sparse.setting import RISK_AXIS, SMALL, WIDE, best, draw, over, ratio
from mechinterp import figures
from mechinterp.analysis.stats import mean_and_sem
from mechinterp.icl.sparse_predictors import preprocess_then_optimise

PLACES = ((16, 40), (16, 64), (64, 64), (64, 128), (64, 256), (128, 128), (128, 256), (128, 512))
GROWTH, LEARNERS = (64, 128, 256), ("ours", "lasso", "ridge")


def risks(d_x: int, length: int, n_prompts: int) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner."""
    task = replace(SMALL if d_x == 16 else WIDE, d_x=d_x, context_length=length)
    prompts = draw(task, n_prompts)
    ours = best(preprocess_then_optimise(prompts, steps=128), prompts)
    return {"ours": ours, "lasso": at.best_lasso(prompts), "ridge": at.best_ridge(prompts)}


def measure(quick: bool) -> Measured:
    found = {place: risks(*place, 32 if quick else 256) for place in PLACES}
    means = {place: {n: mean_and_sem(v) for n, v in one.items()} for place, one in found.items()}
    likeness = {
        f"d {d}, L {length}": ratio(one["ours"], one["lasso"]) for (d, length), one in found.items()
    }
    falling = [means[64, length]["ours"] for length in GROWTH]
    level, sem = (np.array(column, dtype=float) for column in zip(*falling, strict=True))
    steps = np.log(GROWTH) - np.log(GROWTH).mean()
    slope = steps @ np.log(level) / (steps @ steps)
    slope_sem = np.sqrt(np.square(steps / (steps @ steps) * sem / level).sum())
    asked = {"C5-lasso": likeness, "C5-slope": {"d 64": (slope, slope_sem)}}
    for name, id in (("ours", "C6-algorithm"), ("ridge", "C6-ridge")):
        asked[id] = {"L 256": over(means[128, 256][name], means[64, 256][name])}
    claims = records("sparse-", asked, over={"prompts": 32 if quick else 256})
    columns = ("d_x", "context_length", "learner", "risk", "risk_sem")
    rows = [
        (*place, n, *map(float, pair)) for place, one in means.items() for n, pair in one.items()
    ]
    curves = {name: tuple(np.transpose([means[64, n][name] for n in GROWTH])) for name in LEARNERS}
    axes = {"x_title": "context length L", "log_x": True} | RISK_AXIS
    title = "Excess risk at d = 64, noise variance 0.25"
    figure = figures.lines(np.array(GROWTH), curves, title=title, **axes)
    return Measured(pd.DataFrame(rows, columns=columns), {"risk": figure}, claims)
