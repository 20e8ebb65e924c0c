"""Shared code of the scripts of sparse regression: two tasks, learners at their best, ratios of
risks, and shipped models.

Settings and thresholds are ours: only the abstract and captions of Chen, Zhao and Zou 2024, arXiv
2408.04532, are known to us. The shipped models have linear scores, 4 layers, width 64, and 50,000
steps on prompts of 8 to 40 pairs with d_x 16 and 4 entries +-1/2; 1, 4 and 8 heads at noise
variances 0.1 and 0.4, two seeds. `sweeps/sparse.json` trains them again."""

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
import torch

from analyses.lib import Record, records
from analyses.lib.measured import ROOT
from analyses.lib.theory.learners import lasso
from mechinterp import Prompts, TaskConfig, ablate
from mechinterp.analysis.ablation.pruning_rules import best_head_later
from mechinterp.analysis.probing.target_functions import preconditioned, reweighted
from mechinterp.analysis.stats import RESAMPLES, carried_by_few, ratio_and_sem
from mechinterp.checkpoints.checkpoint import Checkpoint, load
from mechinterp.icl.predictors import ridge
from mechinterp.icl.prompts import draw_prompts, generator_for
from mechinterp.icl.sparse_predictors import (
    descend,
    excess_risk,
    gradient_descent,
    ols,
    preprocess_then_optimise,
)

Pair = tuple[float, float]
SMALL = TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4)
WIDE = TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.25)
RISK_AXIS = {"y_title": "excess risk (y²)", "log_y": True}
"""Options of the risk axis of figures."""
ALPHAS, PENALTIES = np.geomspace(0.01, 0.5, 10), np.geomspace(0.3, 300, 31)


def draw(task: TaskConfig, n_prompts: int) -> Prompts:
    """Prompts in float64."""
    return draw_prompts(task, n_prompts, generator=generator_for(0, "eval", 0), dtype=torch.float64)


def unseen(task: TaskConfig, n_prompts: int, *, length: int | None = None) -> Prompts:
    """Prompts that no model was trained or evaluated on during training."""
    generator = generator_for(1, "eval", 0)
    return draw_prompts(task, n_prompts, generator=generator, context_length=length)


def best(predictions: Iterable[torch.Tensor], prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt for the prediction that is best on average."""
    risks = excess_risk(torch.stack(list(predictions)), prompts).double().numpy()
    return risks[risks.mean(1).argmin()]


def best_ridge(prompts: Prompts) -> np.ndarray:
    return best((ridge(prompts, penalty=p) for p in PENALTIES), prompts)


def best_lasso(prompts: Prompts) -> np.ndarray:
    return best((lasso(prompts, alpha=a) for a in ALPHAS), prompts)


def permuted(prompts: Prompts) -> np.ndarray:
    """Algorithm 1 with the correlations permuted over coordinates."""
    r = (prompts.x * prompts.y).mean(1)
    order = torch.rand(r.shape, generator=torch.Generator().manual_seed(0)).argsort(1)
    shuffled = r.gather(1, order)
    features, query = prompts.x * shuffled[:, None], prompts.x_query * shuffled
    return best(descend(features[..., None], prompts.y, query[..., None], steps=128), prompts)


def best_fixed_step(learner: Callable, prompts: Prompts, steps: int) -> np.ndarray:
    """Risks on the second half of the prompts with one step size for all, chosen on the first half."""
    half = len(prompts) // 2
    tuning, measured, etas = prompts[:half], prompts[half:], np.geomspace(0.05, 20, 32)
    risks = [excess_risk(learner(tuning, steps=steps, eta=e)[-1], tuning).mean() for e in etas]
    eta = float(etas[int(np.argmin(risks))])
    return excess_risk(learner(measured, steps=steps, eta=eta)[-1], measured).double().numpy()


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> tuple[float, float]:
    """Ratio of two mean risks on the same prompts, and its standard error."""
    found, sem = ratio_and_sem(numerator, denominator)
    return float(found), float(sem)


def typical_ratio(own: np.ndarray, theirs: np.ndarray) -> tuple[Pair, str]:
    """Ratio of two mean risks on the same prompts, with its standard error and "mean"; or of
    medians, with "median", if 1% of the prompts make up most of a mean."""
    if not (carried_by_few(own) or carried_by_few(theirs)):
        return ratio(own, theirs), "mean"
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    medians = np.median(own[drawn], axis=1) / np.median(theirs[drawn], axis=1)
    return (float(np.median(own) / np.median(theirs)), float(medians.std(ddof=1))), "median"


def told(name: str, pair: Pair) -> dict[str, float]:
    """A number and its standard error as two columns."""
    return {name: pair[0], f"{name}_sem": pair[1]}


def over(one: Pair, other: Pair) -> Pair:
    """Ratio of two numbers with independent errors."""
    value = one[0] / other[0]
    return value, value * float(np.hypot(one[1] / one[0], other[1] / other[0]))


def rivals(prompts: Prompts, *, steps: int, n_lasso: int) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner at its best; lasso and steps of one size use the last
    prompts only."""
    double = prompts.to(torch.float64)
    found = {"ridge": best_ridge(double), "OLS": best([ols(double)], double)}
    found["lasso"] = best_lasso(double[-n_lasso:])
    for name, learner in {"GD": gradient_descent, "Algorithm 1": preprocess_then_optimise}.items():
        found[name] = best(learner(double, steps=steps), double)
        found[f"{name}, 3 steps of one size"] = best_fixed_step(learner, double, 3)
    return found


def against(prefix: str, pairs: Mapping[str, Mapping[str, Pair]], n_prompts: int) -> list[Record]:
    """Records of whether models beat each rival, from ratios of risks by rival and model."""
    named = {"-".join(rival.lower().replace(",", "").split()): one for rival, one in pairs.items()}
    return records(f"{prefix}-", named, over={"prompts": n_prompts})


TARGETS = {"R x": reweighted, "(S - 1) x": preconditioned}
"""Possible outputs of a first layer, as targets of a probe."""

SEVERAL = (4, 8)


def named(n_heads: int, noise: float, seed: int) -> str:
    """Name of a model.

    Example:
        >>> named(4, 0.1, 0)
        'sparse-h4-noise0.1-s0'
    """
    return f"sparse-h{n_heads}-noise{noise}-s{seed}"


def seeds(noise: float) -> list[int]:
    """Seeds for which the models of 1, 4 and 8 heads are shipped."""
    there = {file.parent.name for file in (ROOT / "checkpoints").glob("sparse-h*/config.json")}
    return [s for s in range(9) if {named(h, noise, s) for h in (1, *SEVERAL)} <= there]


NOISES = tuple(noise for noise in (0.1, 0.4, 0.8) if seeds(noise))
"""Noise variances for which models are shipped."""


def single_of(name: str) -> str:
    """The one-head model of the same noise and seed.

    Example:
        >>> single_of("sparse-h4-noise0.1-s1")
        'sparse-h1-noise0.1-s1'
    """
    return re.sub("-h[0-9]+-", "-h1-", name)


def shipped(noise: float, heads: tuple[int, ...] = (1, *SEVERAL)) -> dict[str, str]:
    """Names of the models at a noise variance, by number of heads and seed: "h4 s0"."""
    return {f"h{h} s{seed}": named(h, noise, seed) for h in heads for seed in seeds(noise)}


NOTE = "two seeds, three asked"
"""Remark on the verdicts of C9 to C16."""


def trained(name: str) -> Checkpoint:
    """A shipped model."""
    return load(ROOT / "checkpoints" / name)


def prompts_of(noise: float, n_prompts: int, *, context_length: int | None = None) -> Prompts:
    """Prompts of the task of a noise variance that no model was trained or evaluated on during
    training."""
    task = trained(named(1, noise, 0)).config.task
    return unseen(task, n_prompts, length=context_length)


def frames_of(frames: Mapping[str, pd.DataFrame], column: str = "model") -> pd.DataFrame:
    """Frames stacked, with a column that names their source."""
    return pd.concat([frame.assign(**{column: name}) for name, frame in frames.items()])


def best_later_on(name: str, scored: Prompts) -> np.ndarray:
    """Mask that keeps all heads of the first layer and the best head of each later layer, chosen on
    these prompts."""
    return best_head_later(ablate(trained(name).model, scored, what="heads").rise)
