"""C15 of sparse regression: test of whether the first layer of trained models preprocesses, by GD
on its output.

Every token is run as a query, so that its features do not contain its own response. GD on the
output of layer 1 is compared with GD on raw x and on R x, all with the step 1 / lambda_max of each
prompt. Same prompts, paired standard errors.
Run: python -m analyses sparse/p_probing (three minutes; --quick half a minute)"""

import torch

from analyses.lib import Measured, Record, records
from analyses.sparse import questions as ask
from analyses.sparse import setting as at
from mechinterp import Prompts
from mechinterp.analysis.probing.p_probe import IDEAL, RAW, DescentCurves, descent_curves

Found = dict[str, dict[str, at.Pair]]
"""Measured numbers by question and by model."""


def features(noise: float, prompts: Prompts) -> dict[str, torch.Tensor]:
    """Features of every token and the query, by name."""
    models = {short: at.trained(name).model for short, name in at.shipped(noise).items()}
    return ask.features(models, prompts)


def areas(curves: DescentCurves) -> dict[str, at.Pair]:
    """Mean log risk over the steps minus that of the first features, by features."""
    values = zip(curves.log_area, curves.log_area_sem, strict=True)
    return {
        name: (float(v), float(s)) for name, (v, s) in zip(curves.features, values, strict=True)
    }


def least(curves: DescentCurves) -> dict[str, at.Pair]:
    """Smallest risk of any step, by features."""
    found = {}
    for name, risk, sem in zip(curves.features, curves.risk, curves.risk_sem, strict=True):
        found[name] = (float(risk.min()), float(sem[risk.argmin()]))
    return found


def one_noise(
    noise: float, phis: dict[str, torch.Tensor], prompts: Prompts
) -> tuple[DescentCurves, dict[str, Found]]:
    """Curves of all features, and the numbers of the claims by name."""
    curves = descent_curves(phis, prompts, steps=ask.STEPS)
    to_raw, ends, raw = areas(curves), least(curves), ask.risk_at(phis[RAW], prompts)
    found: dict[str, Found] = {name: {} for name in QUESTIONS}
    for own, model in at.shipped(noise).items():
        single = f"h1 {own.split()[1]}"
        found["lower"][model] = at.over(ends[own], ends[RAW])
        if own == single:
            found["single"][model] = to_raw[own]
            continue
        pair = {name: phis[name] for name in (single, own)}
        found["C15-raw"][model] = to_raw[own]
        found["C15-single"][model] = areas(descent_curves(pair, prompts, steps=ask.STEPS))[own]
        found["C15-end"][model] = at.ratio(ask.risk_at(phis[own], prompts), raw)
        found["C15-ideal"][model] = at.over(ends[IDEAL], ends[own])
    return curves, found


QUESTIONS = ("C15-raw", "C15-single", "C15-end", "C15-ideal", "lower", "single")


def claims_of(found: dict[str, Found], n_prompts: int) -> list[Record]:
    over = {"prompts": n_prompts}
    asked, ours = ({name: found[name] for name in part} for part in (QUESTIONS[:4], QUESTIONS[4:]))
    claims = records("sparse-", asked, over=over, note=at.NOTE)
    return claims + records("sparse-descent-", ours, over=over)


def measure(quick: bool) -> Measured:
    frames, found, pages = {}, {name: {} for name in QUESTIONS}, {}
    n_prompts = 256 if quick else 4096
    for noise in at.NOISES:
        prompts = at.prompts_of(noise, n_prompts)
        curves, more = one_noise(noise, features(noise, prompts), prompts)
        frames[f"{noise}"], pages[f"descent-noise{noise}"] = curves.to_frame(), curves.plot()
        found = {name: one | more[name] for name, one in found.items()}
    return Measured(at.frames_of(frames, "noise_var"), pages, claims_of(found, n_prompts))
