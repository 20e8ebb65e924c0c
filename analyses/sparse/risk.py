"""C9 of sparse regression: excess risk of trained models over the context length, by number of
heads.

For comparison, on the same prompts: ridge, lasso, gradient descent and Algorithm 1 at their best
penalty, step or alpha for each length, least squares, and both algorithms with three steps of one
size, as many as four layers allow.
Run: python -m analyses sparse/risk (four minutes; --quick half a minute)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, records
from analyses.sparse import setting as at
from mechinterp import figures
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.stats import mean_and_sem

LENGTHS = (8, 16, 24, 32, 40)
TWICE, FULL = 32, 40  # 2 d, and the longest of training
LASSO_PROMPTS = 1024
LEARNERS = ("ridge", "lasso", "GD", "Algorithm 1")
RIVALS = ("ridge", "OLS", "GD", "Algorithm 1", "lasso", "Algorithm 1, 3 steps of one size")


def risks(noise: float, length: int, n_prompts: int) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by model and learner; lasso and steps of one size use the last
    prompts only."""
    prompts = at.prompts_of(noise, n_prompts, context_length=length)
    found = {
        short: masked_errors(at.trained(name).model, prompts, [[]])[:, 0]
        for short, name in at.shipped(noise).items()
    }
    return found | at.rivals(prompts, steps=128, n_lasso=LASSO_PROMPTS)


def beside(found: dict[str, np.ndarray], own: str, rival: str) -> at.Pair:
    """Risk of a model relative to a rival, on the rival's prompts."""
    return at.ratio(found[own][-len(found[rival]) :], found[rival])


def rows(noise: float, length: int, found: dict[str, np.ndarray]) -> list[dict]:
    """One row per model and learner, with ratios to ridge, to Algorithm 1 and, for models, to the
    single head of the same seed."""
    table = []
    for name, values in found.items():
        risk, sem = map(float, mean_and_sem(values))
        row = {"noise_var": noise, "context_length": length, "learner": name}
        row |= {"risk": risk, "risk_sem": sem}
        rivals = {"ridge": "ridge", "algorithm": "Algorithm 1"}
        if name in at.shipped(noise):
            rivals["single"] = f"h1 {name.split()[1]}"
        for key, rival in rivals.items():
            row[f"to_{key}"], row[f"to_{key}_sem"] = at.ratio(values, found[rival][-len(values) :])
        table.append(row)
    return table


def claims_of(found: dict[float, dict[int, dict[str, np.ndarray]]], n_prompts: int) -> list[Record]:
    """C9, and trained models compared with every rival."""
    asked = {
        name: {
            model: at.ratio(one[length][short], one[length][f"h1 {short.split()[1]}"])
            for noise, one in found.items()
            for short, model in at.shipped(noise, at.SEVERAL).items()
        }
        for name, length in (("twice", TWICE), ("full", FULL))
    }
    made = records("sparse-C9-", asked, over={"prompts": n_prompts}, note=at.NOTE)
    pairs: dict[str, dict[str, at.Pair]] = {
        rival: {
            name: beside(one[FULL], short, rival)
            for noise, one in found.items()
            for short, name in at.shipped(noise).items()
        }
        for rival in RIVALS
    }
    return made + at.against("sparse-risk", pairs, n_prompts)


def measure(quick: bool) -> Measured:
    table, found, pages, n_prompts = [], {}, {}, 256 if quick else 4096
    for noise in at.NOISES:
        found[noise] = {length: risks(noise, length, n_prompts) for length in LENGTHS}
        for length, one in found[noise].items():
            table += rows(noise, length, one)
        drawn = [f"h{h} s{at.seeds(noise)[0]}" for h in (1, *at.SEVERAL)] + list(LEARNERS)
        means = {
            name: [mean_and_sem(found[noise][length][name]) for length in LENGTHS] for name in drawn
        }
        curves = {name: tuple(np.transpose(pairs)) for name, pairs in means.items()}
        axes = {"x_title": "context length L"} | at.RISK_AXIS
        title = f"Excess risk over context length at noise variance {noise}, same prompts"
        figure = figures.lines(np.array(LENGTHS), curves, title=title, **axes)
        pages[f"risk-noise{noise}"] = figure
    return Measured(pd.DataFrame(table), pages, claims_of(found, n_prompts))
