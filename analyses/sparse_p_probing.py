"""C15 of sparse regression: whether the first layer of trained models preprocesses, by GD on what it writes.

Every token is run as a query, so that it holds no response of its own; GD on what layer 1 wrote is compared with GD on
raw x and on R x, the step 1 / lambda_max of each prompt for all of them. Same prompts, paired standard errors.
Run: python analyses/sparse_p_probing.py (three minutes; --quick half a minute)
"""

import numpy as np
import torch
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

from mechinterp.analysis.probing.p_probing import (
    IDEAL,
    RAW,
    DescentCurves,
    descent_curves,
    query_features,
)
from mechinterp.analysis.probing.probes import reweighted
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk

AT, STEPS = 16, 32
Pair = tuple[float, float]


def features(noise: float, prompts: Prompts) -> dict[str, torch.Tensor]:
    """Of every token and the query, by what they are."""
    found = {RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)}
    found[IDEAL] = reweighted(prompts)[0]
    models = {f"h{h} s{s}": trained(named(h, noise, s)).model for h in (1, *SEVERAL) for s in seeds(noise)}  # fmt: skip
    return found | {short: query_features(model, prompts, layer=1) for short, model in models.items()}  # fmt: skip


def risk_at(phi: torch.Tensor, prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt after 16 steps."""
    columns, target = phi.double()[..., None], prompts.to(torch.float64)
    path = descend(columns[:, :-1], target.y, columns[:, -1], steps=AT)
    return excess_risk(path[-1], target).numpy()


def areas(curves: DescentCurves) -> dict[str, Pair]:
    """Mean log risk over the steps minus that of the first features, by features."""
    values = zip(curves.log_area, curves.log_area_sem, strict=True)
    return {name: (float(v), float(s)) for name, (v, s) in zip(curves.features, values, strict=True)}  # fmt: skip


def least(curves: DescentCurves) -> dict[str, Pair]:
    """The least risk of any step, by features."""
    found = {}
    for name, risk, sem in zip(curves.features, curves.risk, curves.risk_sem, strict=True):
        found[name] = (float(risk.min()), float(sem[risk.argmin()]))
    return found


def claims(noise: float, phis: dict[str, torch.Tensor], prompts: Prompts) -> tuple[DescentCurves, list[Claim]]:  # fmt: skip
    curves, made = descent_curves(phis, prompts, steps=STEPS), []
    to_raw, ends, raw = areas(curves), least(curves), risk_at(phis[RAW], prompts)
    for heads in SEVERAL:
        pairs, held, behind = {}, [], {}
        for s in seeds(noise):
            own, single = f"h{heads} s{s}", f"h1 s{s}"
            apart = areas(descent_curves({n: phis[n] for n in (single, own)}, prompts, steps=STEPS))
            both = {f"s{s}, that of raw x": to_raw[own], f"s{s}, that of one head": apart[own]}
            held.append(all(value + 2 * sem < 0 for value, sem in both.values()))
            pairs |= both
            behind[f"s{s}"] = ratio(risk_at(phis[own], prompts), raw)
        models = over_seeds(heads, noise)
        made += [
            Claim("C15", f"GD on layer 1 is ahead of GD on raw x, and on a single head's layer 1: mean log risk of {STEPS} steps", models, "shown (second hand)", f"minus {each(pairs)}", verdict(held)),
            Claim("C15", f"after {AT} steps it is at 0.8 of the risk on raw x, or below", models, "not asked", each(behind), verdict(v <= 0.8 for v, _ in behind.values())),
        ]  # fmt: skip
    several = [name for name in ends if name not in (RAW, IDEAL) and not name.startswith("h1 ")]
    singles = {name: to_raw[name] for name in to_raw if name.startswith("h1 ")}
    trained_ones = [name for name in ends if name not in (RAW, IDEAL)]
    lower = [ends[n][0] + 2 * np.hypot(ends[n][1], ends[RAW][1]) < ends[RAW][0] for n in trained_ones]  # fmt: skip
    made += [
        Claim("C15", "GD on R x, the ideal, is comparable to GD on layer 1 or better: least risk of any step", f"closed form, noise {noise}", "expected", each({n: ends[n] for n in (IDEAL, *several)}), verdict(ends[IDEAL][0] <= ends[n][0] for n in several)),
        Claim("", "layer 1 lets GD end lower than on raw x: least risk of any step, by two standard errors", over_seeds("*", noise), "not asked", each({n: ends[n] for n in (RAW, *trained_ones)}), verdict(lower)),
        Claim("", f"a single head's layer 1 lets GD be ahead of raw x, too: mean log risk of {STEPS} steps", over_seeds(1, noise), "not asked", f"minus that of raw x: {each(singles)}", verdict(v + 2 * sem < 0 for v, sem in singles.values())),
    ]  # fmt: skip
    return curves, made


def measure(quick: bool) -> Measured:
    frames, made, pages = {}, [], {}
    for noise in NOISES:
        prompts = prompts_of(noise, 256 if quick else 4096)
        curves, more = claims(noise, features(noise, prompts), prompts)
        frames[f"{noise}"], pages[f"descent-noise{noise}"] = curves.to_frame(), curves.plot()
        made += more
    return Measured(frames_of(frames, "noise_var"), pages, made)


if __name__ == "__main__":
    run(measure, __file__)
