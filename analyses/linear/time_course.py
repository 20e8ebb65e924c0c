"""Merged heads over time: eq. (10) for a white covariance, the escape time, and D + 1 numbers for
any covariance.

Zhang et al. 2025, arXiv 2501.16265, eq. (10) and section 3. The white covariance is the identity in
four dimensions; w_eff is |W_1 e + w_2| / 2, the growing part of random initial weights.
Run: python -m analyses linear/time_course (seconds; --quick 1 seed)"""

from functools import partial

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, record, records
from analyses.lib.plateaus import drops
from analyses.lib.theory import linear_dynamics as dynamics
from analyses.linear.setting import FOUND, LENGTH, MOMENTS, half_time, named, trained
from mechinterp.theory.linear import MergedHeads, merged_heads, modes, population_moments
from mechinterp.training.linear import Flow, flow

WHITE = population_moments(np.ones(4), context_length=LENGTH)
MODES = modes(WHITE)
SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def aligned() -> MergedHeads:
    r = np.random.default_rng(0).standard_normal(8)
    r /= np.linalg.norm(r)
    return MergedHeads(v=1e-2 * r, U=1e-2 * r[:, None, None] * np.eye(4) / 2)


def white(heads: MergedHeads) -> tuple[Flow, np.ndarray, float, float]:
    """A run, the loss of eq. (10), its largest error relative to the first loss, and the error of
    the half-time."""
    scale = dynamics.effective_scale(heads, MODES)
    half = dynamics.white_half_time(MODES, scale=scale)
    found = flow(heads, WHITE, duration=4 * half, times=np.linspace(0, 4 * half, 2001))
    _, loss = dynamics.white_time_course(found.time, MODES, scale=scale)
    sigma = np.trace(found.M, axis1=1, axis2=2) / 4
    late = np.interp(MODES.targets[0] / 2, sigma, found.time) / half - 1
    return found, loss, float(np.abs(found.loss - loss).max() / loss[0]), abs(late)


def reduced(seed: int) -> float:
    """Largest difference in loss between eight heads and the D + 1 numbers, for init 1e-3."""
    heads, times = merged_heads(8, 4, std=1e-3, seed=seed), np.linspace(0, 400, 2001)
    found = flow(heads, MOMENTS, duration=400.0, times=times)
    scale = dynamics.effective_scale(heads, FOUND)
    loss = dynamics.merged_time_course(times, FOUND, scale=scale)[2]
    return float(np.abs(found.loss - loss).max())


def random_starts(init: float, n_seeds: int) -> list[Record]:
    """Errors of eq. (10) from random weights: with w_eff, and with the norm of a layer instead."""
    drawn = [merged_heads(8, 4, std=init, seed=seed) for seed in range(n_seeds)]
    errors = np.array([white(heads)[2:] for heads in drawn])
    half = partial(dynamics.white_half_time, MODES)
    layer = [half(scale=np.linalg.norm(heads.v)) for heads in drawn]
    effective = [half(scale=dynamics.effective_scale(heads, MODES)) for heads in drawn]
    naive = abs(np.array(layer) / effective - 1)
    asked = {"loss": errors[:, 0], "half": errors[:, 1], "layer": naive}
    return records("linear-7-", {f"{n}-init{init:g}": named(v, "seed") for n, v in asked.items()})


def measure(quick: bool) -> Measured:
    seeds = range(1 if quick else 5)
    claims = [record("linear-7-aligned", {"aligned": white(aligned())[2]})]
    for init in (1e-2, 1e-3):
        claims += random_starts(init, len(seeds))
    runs = [[trained(merged_heads(8, 4, std=s, seed=seed)) for s in SCALES] for seed in seeds]
    slopes = np.diff([[half_time(one) for one in row] for row in runs]) / -np.log(10)
    counts = np.array([[len(drops(one)) for one in row] for row in runs])
    asked = {
        "8-slope": named(slopes * np.linalg.norm(FOUND.rates), "seed", "decade"),
        "8-drops": named(counts, "seed", "init"),
        "9-reduction": named(np.array([reduced(seed) for seed in seeds]), "seed"),
    }
    claims += records("linear-", asked)
    drawn = {f"init {init:g}": merged_heads(8, 4, std=init, seed=0) for init in (0.1, 1e-3)}
    found = {name: white(heads) for name, heads in drawn.items()}
    time = np.linspace(0, 8, 201)
    curves = {name: np.interp(time, one.time, one.loss) for name, (one, *_) in found.items()}
    for name, (one, loss, *_) in found.items():
        curves[f"{name}, eq. (10)"] = np.interp(time, one.time, loss)
    return Measured(pd.DataFrame({"time": time} | curves), claims=claims)
