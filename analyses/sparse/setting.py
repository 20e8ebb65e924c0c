"""What the scripts of sparse regression share: two tasks, learners at their best, and ratios of
risks.

Settings and thresholds are ours: Chen, Zhao and Zou 2024, arXiv 2408.04532, is known to us by its
abstract and captions.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from analyses.lib import Record, records
from mechinterp import Prompts, TaskConfig, generator_for, sample_prompts
from mechinterp.analysis.probing.linear import preconditioned, reweighted
from mechinterp.analysis.stats import RESAMPLES, carried_by_few, ratio_and_sem
from mechinterp.icl.predictors import ridge
from mechinterp.icl.sparse_predictors import (
    descend,
    excess_risk,
    gradient_descent,
    lasso,
    ols,
    preprocess_then_optimise,
)

Pair = tuple[float, float]
SMALL = TaskConfig(d_x=16, context_length=40, sparsity=4, nonzeros="signs", noise_var=0.4)
WIDE = TaskConfig(d_x=64, context_length=128, sparsity=4, nonzeros="signs", noise_var=0.25)
RISK_AXIS = {"y_title": "excess risk (y²)", "log_y": True}
"""Of a figure."""
ALPHAS, PENALTIES = np.geomspace(0.01, 0.5, 10), np.geomspace(0.3, 300, 31)


def draw(task: TaskConfig, n_prompts: int) -> Prompts:
    """Prompts in float64."""
    return sample_prompts(
        task, n_prompts, generator=generator_for(0, "eval", 0), dtype=torch.float64
    )


def best(predictions: Iterable[torch.Tensor], prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt under the prediction that is best on average."""
    risks = excess_risk(torch.stack(list(predictions)), prompts).double().numpy()
    return risks[risks.mean(1).argmin()]


def best_ridge(prompts: Prompts) -> np.ndarray:
    return best((ridge(prompts, penalty=p) for p in PENALTIES), prompts)


def best_lasso(prompts: Prompts) -> np.ndarray:
    return best((lasso(prompts, alpha=a) for a in ALPHAS), prompts)


def permuted(prompts: Prompts) -> np.ndarray:
    """Algorithm 1 with each correlation at another coordinate."""
    r = (prompts.x * prompts.y).mean(1)
    order = torch.rand(r.shape, generator=torch.Generator().manual_seed(0)).argsort(1)
    shuffled = r.gather(1, order)
    features, query = prompts.x * shuffled[:, None], prompts.x_query * shuffled
    return best(descend(features[..., None], prompts.y, query[..., None], steps=128), prompts)


def best_fixed_step(learner: Callable, prompts: Prompts, steps: int) -> np.ndarray:
    """One step size for all prompts, chosen on the first half; risks of the second."""
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
    """Ratio of two mean risks on the same prompts, or of medians where a hundredth of the prompts
    carries most of a mean, with its standard error; and which of the two it is."""
    if not (carried_by_few(own) or carried_by_few(theirs)):
        return ratio(own, theirs), "mean"
    drawn = np.random.default_rng(0).integers(len(own), size=(RESAMPLES, len(own)))
    medians = np.median(own[drawn], axis=1) / np.median(theirs[drawn], axis=1)
    return (float(np.median(own) / np.median(theirs)), float(medians.std(ddof=1))), "median"


def over(one: Pair, other: Pair) -> Pair:
    """Ratio of two numbers, their errors taken as independent."""
    value = one[0] / other[0]
    return value, value * float(np.hypot(one[1] / one[0], other[1] / other[0]))


def rivals(prompts: Prompts, *, steps: int, n_lasso: int) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner at its best; lasso and steps of one size have the last
    of the prompts."""
    double = prompts.to(torch.float64)
    found = {"ridge": best_ridge(double), "OLS": best([ols(double)], double)}
    found["lasso"] = best_lasso(double[-n_lasso:])
    for name, learner in {"GD": gradient_descent, "Algorithm 1": preprocess_then_optimise}.items():
        found[name] = best(learner(double, steps=steps), double)
        found[f"{name}, 3 steps of one size"] = best_fixed_step(learner, double, 3)
    return found


def against(prefix: str, pairs: Mapping[str, Mapping[str, Pair]], n_prompts: int) -> list[Record]:
    """Whether models beat each rival, from ratios of risks by rival and model."""
    named = {"-".join(rival.lower().replace(",", "").split()): one for rival, one in pairs.items()}
    return records(f"{prefix}-", named, over={"prompts": n_prompts})


TARGETS = {"R x": reweighted, "(S - 1) x": preconditioned}
"""What a first layer may write, as targets of a probe."""
