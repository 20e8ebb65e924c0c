"""One trained model of sparse regression where the published construction can win: d_x 64, 4 entries +-1/2, 64 heads.

Linear scores, 4 layers, width 144, heads of width 2, prompts of 32 to 128 pairs, noise variance 0.25, one seed: as many
heads as coordinates, d_x / s = 16 and room for x and R x beside each other. Same prompts for the model and its rivals.
Run: python analyses/sparse_wide.py (three minutes; --quick half a minute)
"""

import numpy as np
import pandas as pd
import torch
from measured import Claim, Measured, run
from sparse_models import frames_of, trained
from sparse_setting import TARGETS, best, best_fixed_step, best_lasso, best_ridge, each, ratio

from mechinterp.analysis.estimates import mean_and_sem
from mechinterp.analysis.heads.ablation import ablate_heads
from mechinterp.analysis.heads.errors import masked_errors
from mechinterp.analysis.heads.pruning import best_head_first, best_head_later, prune
from mechinterp.analysis.probing.p_probing import RAW, p_probe
from mechinterp.analysis.probing.probes import probe_layers
from mechinterp.icl.prompts import Prompts, generator_for, sample_prompts
from mechinterp.icl.sparse_predictors import gradient_descent, preprocess_then_optimise

NAME = "sparse-wide-s0"
RIVALS = {
    "ridge": "the model beats ridge at its best penalty",
    "GD": "and GD at its best step",
    "GD, 3 steps of one size": "and GD with three steps of one size",
    "Algorithm 1, 3 steps of one size": "and Algorithm 1 with three steps of one size",
    "Algorithm 1": "and Algorithm 1 at its best step",
    "lasso": "and lasso at its best penalty",
}
Pair = tuple[float, float]


def risks(prompts: Prompts) -> dict[str, np.ndarray]:
    """Excess risk of each prompt, by learner; those of one step size have the last half of the prompts."""
    found, double = {NAME: masked_errors(trained(NAME).model, prompts, [[]])[:, 0]}, prompts.to(torch.float64)  # fmt: skip
    found |= {"ridge": best_ridge(double), "lasso": best_lasso(double[-len(double) // 4 :])}
    for name, learner in {"GD": gradient_descent, "Algorithm 1": preprocess_then_optimise}.items():
        found[name] = best(learner(double, steps=64), double)
        found[f"{name}, 3 steps of one size"] = best_fixed_step(learner, double, 3)
    return found


def beaten(found: dict[str, np.ndarray]) -> list[Claim]:
    values = {rival: ratio(found[NAME][-len(found[rival]) :], found[rival]) for rival in RIVALS}
    return [Claim("", f"{text}: ratio below 1 by two standard errors", NAME, "lower for the algorithm" if rival in ("ridge", "GD") else "not asked", each({"ratio": values[rival]}), bool(values[rival][0] + 2 * values[rival][1] < 1)) for rival, text in RIVALS.items()]  # fmt: skip


def spread_over_heads(prompts: Prompts) -> tuple[pd.DataFrame, dict, list[Claim]]:
    found = ablate_heads(trained(NAME).model, prompts)
    n, sems, tops = found.effective_heads, found.effective_heads_sem, found.importance.max(1)
    text = each({f"L{layer}": (float(v), float(s)) for layer, (v, s) in enumerate(zip(n, sems, strict=True))}, 1)  # fmt: skip
    shares = ", ".join(f"{top:.2f}" for top in tops)
    claims = [
        Claim("C10", "layer 1 uses several heads: N_eff at least 2, and 1.5 times as many as any later layer", NAME, "several", text, bool(n[0] >= max(2, 1.5 * n[1:].max()))),
        Claim("C10", "the best head of layer 1 has at most 0.6 of its importance, that of later layers 0.7 (median)", NAME, "one dominates later layers", f"from L0 on: {shares}", bool(tops[0] <= 0.6 and np.median(tops[1:]) >= 0.7)),
    ]  # fmt: skip
    pages = {"rise": found.plot(), "importance": found.plot_importance()}
    return found.to_frame().merge(found.layer_frame()), pages, claims


def pruned(prompts: Prompts) -> tuple[pd.DataFrame, list[Claim]]:
    rules = {"best later": best_head_later, "best first": best_head_first}
    found = {name: prune(trained(NAME).model, prompts, rule=rule) for name, rule in rules.items()}
    later, first = found.values()
    told = [f"ratio {one.ratio:.2f} ± {one.ratio_sem:.2f}; with a new read-out {one.refit_ratio:.2f} ± {one.refit_ratio_sem:.2f}" for one in (later, first)]  # fmt: skip
    claims = [
        Claim("C11", "one head in each later layer will do: risk at most 2 times, 1.25 with a new read-out", NAME, "preserved", told[0], bool(later.ratio <= 2 and later.refit_ratio <= 1.25)),
        Claim("C12", "one head in layer 1 will not: risk at least 2 times, and 1.5 times the ratio of C11", NAME, "not asked", told[1], bool(first.ratio >= max(2, 1.5 * later.ratio))),
    ]  # fmt: skip
    names = ("ratio", "ratio_sem", "risk", "risk_sem", "refit_risk", "refit_risk_sem", "refit_ratio", "refit_ratio_sem")  # fmt: skip
    rows = [{"rule": rule} | {name: getattr(one, name) for name in names} for rule, one in found.items()]  # fmt: skip
    return pd.DataFrame(rows), claims


def first_layer(prompts: Prompts) -> tuple[pd.DataFrame, dict, list[Claim]]:
    model, claims, frames = trained(NAME).model, [], {}
    for what, target in TARGETS.items():
        probe = probe_layers(model, prompts, target=target)
        frames[what] = probe.to_frame()
        values: dict[str, Pair] = {when: (float(probe.r2[layer, -1]), float(probe.r2_sem[layer, -1])) for when, layer in (("after it", 1), ("before", 0))}  # fmt: skip
        why = "what it does (inferred)" if what == "R x" else "not asked"
        claims.append(Claim("", f"layer 1 writes {what}: a linear map of it explains at least 0.9, of the input nothing", NAME, why, f"R² {each(values)}", bool(values["after it"][0] >= 0.9 and values["before"][0] < 0.05)))  # fmt: skip
    curves = p_probe({NAME: model}, prompts)
    area, sem = float(curves.log_area[-1]), float(curves.log_area_sem[-1])
    behind = float(curves.risk[-1, 16] / curves.risk[curves.features.index(RAW), 16])
    claims += [
        Claim("C15", "GD on layer 1 is ahead of GD on raw x: mean log risk of 32 steps", NAME, "shown (second hand)", f"minus that of raw x {area:.3f} ± {sem:.3f}", bool(area + 2 * sem < 0)),
        Claim("C15", "after 16 steps it is at 0.8 of the risk on raw x, or below", NAME, "not asked", f"ratio {behind:.3f}", bool(behind <= 0.8)),
    ]  # fmt: skip
    return frames_of(frames, "target"), {"descent": curves.plot()}, claims


def measure(quick: bool) -> Measured:
    task, generator = trained(NAME).config.task, generator_for(1, "eval", 0)
    prompts = sample_prompts(task, 400 if quick else 2048, generator=generator)
    found = risks(prompts)
    rows = [(name, *map(float, mean_and_sem(values))) for name, values in found.items()]
    heads, pages, more = spread_over_heads(prompts[: 32 if quick else 512])
    costs, pruning = pruned(prompts)
    probes, descent, layer = first_layer(prompts)
    frames = {"risk": pd.DataFrame(rows, columns=["learner", "risk", "risk_sem"]), "heads": heads, "pruning": costs, "probes": probes}  # fmt: skip
    return Measured(frames_of(frames, "part"), pages | descent, [*beaten(found), *more, *pruning, *layer])  # fmt: skip


if __name__ == "__main__":
    run(measure, __file__)
