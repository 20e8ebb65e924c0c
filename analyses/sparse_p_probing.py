"""C15 of sparse regression: whether the first layer of trained models preprocesses, by GD on what it writes.

Every token is run as a query, so that it holds no response of its own; GD on what layer 1 wrote is compared with GD on
raw x and on R x, the step 1 / lambda_max of each prompt for all of them. Same prompts, paired standard errors.
Run: python analyses/sparse_p_probing.py (three minutes; --quick half a minute)
"""

import numpy as np
import torch
from measured import Claim, Measured, run
from sparse_models import SEVERAL, SINGLE, prompts_of, trained
from sparse_setting import each, ratio

from mechinterp.analysis.p_probing import IDEAL, RAW, DescentCurves, descent_curves, query_features
from mechinterp.analysis.probes import reweighted
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk

AT, STEPS = 16, 32
MODELS = (SINGLE, *SEVERAL)


def features(prompts: Prompts) -> dict[str, torch.Tensor]:
    """Of every token and the query, by what they are."""
    found = {RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)}
    found[IDEAL] = reweighted(prompts)[0]
    return found | {name: query_features(trained(name).model, prompts, layer=1) for name in MODELS}


def risk_at(phi: torch.Tensor, prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt after 16 steps."""
    columns, target = phi.double()[..., None], prompts.to(torch.float64)
    path = descend(columns[:, :-1], target.y, columns[:, -1], steps=AT)
    return excess_risk(path[-1], target).numpy()


def areas(curves: DescentCurves) -> dict[str, tuple[float, float]]:
    """Mean log risk over the steps minus that of the first features, by features."""
    values = zip(curves.log_area, curves.log_area_sem, strict=True)
    return {name: (float(v), float(s)) for name, (v, s) in zip(curves.features, values, strict=True)}  # fmt: skip


def least(curves: DescentCurves) -> dict[str, tuple[float, float]]:
    """The least risk of any step, by features."""
    found = {}
    for name, risk, sem in zip(curves.features, curves.risk, curves.risk_sem, strict=True):
        found[name] = (float(risk.min()), float(sem[risk.argmin()]))
    return found


def measure(quick: bool) -> Measured:
    prompts = prompts_of(256 if quick else 4096)
    phis = features(prompts)
    late = {name: risk_at(phis[name], prompts) for name in (RAW, *MODELS)}
    curves = descent_curves(phis, prompts, steps=STEPS)
    to_raw = areas(curves)
    to_single = areas(descent_curves({n: phis[n] for n in MODELS}, prompts, steps=STEPS))
    ends, claims = least(curves), []
    for name in SEVERAL:
        pairs = {"that of raw x": to_raw[name], "that of one head": to_single[name]}
        below = all(value + 2 * sem < 0 for value, sem in pairs.values())
        behind = ratio(late[name], late[RAW])
        claims += [
            Claim("C15", f"GD on layer 1 is ahead of GD on raw x, and on a single head's layer 1: mean log risk of {STEPS} steps", f"{name}, {SINGLE}", "shown (second hand)", f"minus {each(pairs)}", below),
            Claim("C15", f"after {AT} steps it is at 0.8 of the risk on raw x, or below", name, "not asked", each({"ratio": behind}), behind[0] <= 0.8),
        ]  # fmt: skip
    claims += [
        Claim("C15", "GD on R x, the ideal, is comparable to GD on layer 1 or better: least risk of any step", "closed form", "expected", each({n: ends[n] for n in (IDEAL, *SEVERAL)}), ends[IDEAL][0] <= min(ends[n][0] for n in SEVERAL)),
        Claim("", "layer 1 lets GD end lower than on raw x: least risk of any step, by two standard errors", "sparse-h[148]-noise0.1-s0", "not asked", each({n: ends[n] for n in (RAW, *MODELS)}), all(ends[n][0] + 2 * np.hypot(ends[n][1], ends[RAW][1]) < ends[RAW][0] for n in MODELS)),
        Claim("", f"a single head's layer 1 lets GD be ahead of raw x, too: mean log risk of {STEPS} steps", SINGLE, "not asked", each({"minus that of raw x": to_raw[SINGLE]}), to_raw[SINGLE][0] + 2 * to_raw[SINGLE][1] < 0),
    ]  # fmt: skip
    return Measured(curves.to_frame(), {"descent": curves.plot()}, claims)


if __name__ == "__main__":
    run(measure, __file__)
