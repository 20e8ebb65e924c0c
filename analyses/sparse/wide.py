"""One trained model of sparse regression in a task where the published construction can win: d_x
64, 4 entries +-1/2, 64 heads.

Linear scores, 4 layers, width 144, heads of width 2, prompts of 32 to 128 pairs, noise variance
0.25, one seed. There are as many heads as coordinates, d_x / s = 16, and room for x and R x side by
side. Model and rivals share the prompts; C10 uses a quarter of them. Run: python -m analyses
sparse/wide (15 minutes; --quick half a minute)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, records
from analyses.sparse.crossed import crossed
from analyses.sparse.heads import heads_frame, spread, spread_records
from analyses.sparse.probes import written
from analyses.sparse.pruning import ASKED, RULES, cost_records, cost_rows, errors_of
from analyses.sparse.setting import TARGETS, against, frames_of, ratio, rivals, trained, unseen
from mechinterp import Prompts, p_probe, probe
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.probing.p_probe import RAW
from mechinterp.analysis.stats import mean_and_sem

NAME = "sparse-wide-s0"
ONE_SIZE = tuple(f"{name}, 3 steps of one size" for name in ("GD", "Algorithm 1"))
RIVALS = ("ridge", "GD", *ONE_SIZE, "Algorithm 1", "lasso")
SEED = "one seed, three asked"


def risks(prompts: Prompts) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner."""
    own = masked_errors(trained(NAME).model, prompts, [[]])[:, 0]
    found = rivals(prompts, steps=64, n_lasso=len(prompts) // 4)
    return {NAME: own} | {name: found[name] for name in ("ridge", "lasso", *found)}


def beaten(found: dict[str, np.ndarray], n_prompts: int) -> list[Record]:
    pairs = {r: {NAME: ratio(found[NAME][-len(found[r]) :], found[r])} for r in RIVALS}
    return against("sparse-wide", pairs, n_prompts)


def pruned(prompts: Prompts) -> tuple[pd.DataFrame, list[Record]]:
    found = {name: crossed(trained(NAME).model, prompts, RULES[name]) for name in ASKED}
    costs = cost_rows(found, errors_of(NAME, prompts))
    return costs, cost_records({NAME: costs}, len(prompts), note=SEED, suffix="-wide")


def first_layer(prompts: Prompts) -> tuple[pd.DataFrame, dict, list[Record]]:
    model = trained(NAME).model
    probes = probe(model, prompts, targets=TARGETS).probes
    curves = p_probe({NAME: model}, prompts)
    area = float(curves.log_area[-1]), float(curves.log_area_sem[-1])
    raw = curves.features.index(RAW)
    end = curves.risk[-1, 16] / curves.risk[raw, 16]
    asked = {"raw-wide": {NAME: area}, "end-wide": {NAME: end}}
    claims = [*written({NAME: probes}, suffix="-wide"), *records("sparse-C15-", asked, note=SEED)]
    frames = {what: each.to_frame() for what, each in probes.items()}
    return frames_of(frames, "target"), {"descent": curves.plot()}, claims


def measure(quick: bool) -> Measured:
    prompts = unseen(trained(NAME).config.task, 400 if quick else 4096)
    found = risks(prompts)
    rows = [(name, *map(float, mean_and_sem(values))) for name, values in found.items()]
    of_heads = prompts[: 32 if quick else 1024]
    spread_found = spread(NAME, of_heads)
    heads = heads_frame(spread_found)
    pages = {"rise": spread_found.found.plot(), "importance": spread_found.found.plot_importance()}
    more = spread_records({NAME: spread_found}, len(of_heads), suffix="-wide", note=SEED)
    costs, pruning = pruned(prompts)
    probes, descent, layer = first_layer(prompts)
    risk = pd.DataFrame(rows, columns=["learner", "risk", "risk_sem"])
    frames = {"risk": risk, "heads": heads, "pruning": costs, "probes": probes}
    claims = [*beaten(found, len(prompts)), *more, *pruning, *layer]
    return Measured(frames_of(frames, "part"), pages | descent, claims)
