"""C15 of sparse regression: whether the first layer of trained models preprocesses, by GD on what
it writes.

Every token is run as a query, so that it holds no response of its own; GD on what layer 1 wrote is
compared with GD on raw x and on R x, the step 1 / lambda_max of each prompt for all of them. Same
prompts, paired standard errors. Run: python -m analyses.sparse.p_probing (three minutes; --quick
half a minute)
"""

import numpy as np
import torch

from analyses.lib.measured import Measured, run
from analyses.lib.records import Record, with_errors
from analyses.sparse.models import (
    EVERY,
    MODELS,
    NOISES,
    NOTE,
    SEVERAL,
    SINGLES,
    frames_of,
    named,
    prompts_of,
    seeds,
    trained,
)
from analyses.sparse.setting import ratio
from mechinterp.analysis.probing.feature_descent import (
    IDEAL,
    RAW,
    DescentCurves,
    descent_curves,
    query_features,
)
from mechinterp.analysis.probing.linear import reweighted
from mechinterp.icl.prompts import Prompts
from mechinterp.icl.sparse_predictors import descend, excess_risk

AT, STEPS = 16, 32
Pair = tuple[float, float]


def features(noise: float, prompts: Prompts) -> dict[str, torch.Tensor]:
    """Of every token and the query, by what they are."""
    found = {RAW: torch.cat([prompts.x, prompts.x_query[:, None]], dim=1)}
    found[IDEAL] = reweighted(prompts)[0]
    models = {
        f"h{h} s{s}": trained(named(h, noise, s)).model for h in (1, *SEVERAL) for s in seeds(noise)
    }
    return found | {
        short: query_features(model, prompts, layer=1) for short, model in models.items()
    }


def risk_at(phi: torch.Tensor, prompts: Prompts) -> np.ndarray:
    """Excess risk of each prompt after 16 steps."""
    columns, target = phi.double()[..., None], prompts.to(torch.float64)
    path = descend(columns[:, :-1], target.y, columns[:, -1], steps=AT)
    return excess_risk(path[-1], target).numpy()


def areas(curves: DescentCurves) -> dict[str, Pair]:
    """Mean log risk over the steps minus that of the first features, by features."""
    values = zip(curves.log_area, curves.log_area_sem, strict=True)
    return {
        name: (float(v), float(s)) for name, (v, s) in zip(curves.features, values, strict=True)
    }


def least(curves: DescentCurves) -> dict[str, Pair]:
    """The least risk of any step, by features."""
    found = {}
    for name, risk, sem in zip(curves.features, curves.risk, curves.risk_sem, strict=True):
        found[name] = (float(risk.min()), float(sem[risk.argmin()]))
    return found


def over(one: Pair, other: Pair) -> Pair:
    """Ratio of two risks, their errors taken as independent."""
    value = one[0] / other[0]
    return value, value * float(np.hypot(one[1] / one[0], other[1] / other[0]))


Found = dict[str, dict[str, Pair]]
"""What is asked of a model, by model."""


def one_noise(
    noise: float, phis: dict[str, torch.Tensor], prompts: Prompts
) -> tuple[DescentCurves, dict[str, Found]]:
    """Curves of all features, and the numbers of the claims by their names."""
    curves = descent_curves(phis, prompts, steps=STEPS)
    to_raw, ends, raw = areas(curves), least(curves), risk_at(phis[RAW], prompts)
    found: dict[str, Found] = {name: {} for name in QUESTIONS}
    for heads in (1, *SEVERAL):
        for s in seeds(noise):
            own, model = f"h{heads} s{s}", named(heads, noise, s)
            found["lower"][model] = over(ends[own], ends[RAW])
            if heads == 1:
                found["single"][model] = to_raw[own]
                continue
            pair = {n: phis[n] for n in (f"h1 s{s}", own)}
            found["C15-raw"][model] = to_raw[own]
            found["C15-single"][model] = areas(descent_curves(pair, prompts, steps=STEPS))[own]
            found["C15-end"][model] = ratio(risk_at(phis[own], prompts), raw)
            found["C15-ideal"][model] = over(ends[IDEAL], ends[own])
    return curves, found


AREA = f"difference of the mean log risk of {STEPS} steps"
QUESTIONS = {
    "C15-raw": (
        "GD on layer 1 is ahead of GD on raw x",
        AREA,
        "below",
        0,
        2,
        "second hand",
        MODELS,
    ),
    "C15-single": (
        "and of GD on a single head's layer 1",
        AREA,
        "below",
        0,
        2,
        "second hand",
        MODELS,
    ),
    "C15-end": (
        f"after {AT} steps it is well below raw x",
        "ratio of risks",
        "at most",
        0.8,
        0,
        "second hand",
        MODELS,
    ),
    "C15-ideal": (
        "GD on R x, the ideal, is comparable to GD on layer 1 or better",
        "ratio of the least risks of any step",
        "at most",
        1,
        0,
        "second hand",
        MODELS,
    ),
    "lower": (
        "layer 1 lets GD end lower than on raw x",
        "ratio of the least risks of any step",
        "below",
        1,
        2,
        "ours",
        EVERY,
    ),
    "single": (
        "a single head's layer 1 lets GD be ahead of raw x, too",
        AREA,
        "below",
        0,
        2,
        "ours",
        SINGLES,
    ),
}
"""Statement, quantity, relation, bound, margin, tag and models of each record."""


def records(found: dict[str, Found], n_prompts: int) -> list[Record]:
    return [
        Record(
            id=f"sparse-{name}" if name.startswith("C15") else f"sparse-descent-{name}",
            statement=statement,
            quantity=quantity,
            relation=relation,
            bound=bound,
            margin=margin,
            tag=tag,
            models=models,
            over={"prompts": n_prompts},
            note=NOTE if name.startswith("C15") else "",
            **with_errors(found[name]),
        )
        for name, (statement, quantity, relation, bound, margin, tag, models) in QUESTIONS.items()
    ]


def measure(quick: bool) -> Measured:
    frames, found, pages = {}, {name: {} for name in QUESTIONS}, {}
    n_prompts = 256 if quick else 4096
    for noise in NOISES:
        prompts = prompts_of(noise, n_prompts)
        curves, more = one_noise(noise, features(noise, prompts), prompts)
        frames[f"{noise}"], pages[f"descent-noise{noise}"] = curves.to_frame(), curves.plot()
        found = {name: one | more[name] for name, one in found.items()}
    return Measured(frames_of(frames, "noise_var"), pages, records(found, n_prompts))


if __name__ == "__main__":
    run(measure, __file__)
