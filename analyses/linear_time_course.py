"""Merged heads in time: eq. (10) for a white covariance, the escape time, and D + 1 numbers for any covariance.

Zhang et al. 2025, arXiv 2501.16265, eq. (10) and section 3. The white covariance is the identity of four dimensions;
w_eff is |W_1 e + w_2| / 2, the growing part of random initial weights.
Run: python analyses/linear_time_course.py (seconds; --quick 1 seed)
"""

import numpy as np
import pandas as pd
from linear_setting import FOUND, LENGTH, MOMENTS, half_time, page, trained
from measured import Claim, Measured, numbers, run

from mechinterp.analysis.dynamics.plateaus import drops
from mechinterp.theory import linear_dynamics as dynamics
from mechinterp.theory.linear import modes, population_moments
from mechinterp.theory.linear_heads import MergedHeads, merged_heads
from mechinterp.training.flow import Flow, flow

WHITE = population_moments(np.ones(4), context_length=LENGTH)
MODES = modes(WHITE)
SCALES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)


def aligned() -> MergedHeads:
    r = np.random.default_rng(0).standard_normal(8)
    r /= np.linalg.norm(r)
    return MergedHeads(v=1e-2 * r, U=1e-2 * r[:, None, None] * np.eye(4) / 2)


def white(heads: MergedHeads) -> tuple[Flow, np.ndarray, float, float]:
    """A run, eq. (10), its largest error in loss over the first loss, and in the half-time."""
    scale = dynamics.effective_scale(heads, MODES)
    half = dynamics.white_half_time(MODES, scale=scale)
    found = flow(heads, WHITE, duration=4 * half, times=np.linspace(0, 4 * half, 2001))
    _, loss = dynamics.white_time_course(found.time, MODES, scale=scale)
    sigma = np.trace(found.M, axis1=1, axis2=2) / 4
    late = np.interp(MODES.targets[0] / 2, sigma, found.time) / half - 1
    return found, loss, float(np.abs(found.loss - loss).max() / loss[0]), abs(late)


def reduced(seed: int) -> float:
    """Largest difference in loss between eight heads and D + 1 numbers, init 1e-3."""
    heads, times = merged_heads(8, 4, std=1e-3, seed=seed), np.linspace(0, 400, 2001)
    found = flow(heads, MOMENTS, duration=400.0, times=times)
    scale = dynamics.effective_scale(heads, FOUND)
    loss = dynamics.merged_time_course(times, FOUND, scale=scale)[2]
    return float(np.abs(found.loss - loss).max())


def measure(quick: bool) -> Measured:
    seeds, claims = range(1 if quick else 5), []
    exact = white(aligned())[2]
    claims.append(Claim("L-7", "eq. (10) from aligned weights: loss within 1e-8", "8 heads, exact flow", "exact", f"within {exact:.0e}", exact < 1e-8))  # fmt: skip
    for init, limit in ((1e-2, 5e-3), (1e-3, 1e-3)):
        drawn = [merged_heads(8, 4, std=init, seed=seed) for seed in seeds]
        errors = np.array([white(heads)[2:] for heads in drawn])
        scales = [(np.linalg.norm(heads.v), dynamics.effective_scale(heads, MODES)) for heads in drawn]  # fmt: skip
        naive = [dynamics.white_half_time(MODES, scale=a) / dynamics.white_half_time(MODES, scale=b) - 1 for a, b in scales]  # fmt: skip
        claims.append(Claim("L-7", f"eq. (10) with w_eff, init {init:g}: loss and half-time within {limit:.1%}", f"{len(seeds)} seeds", "exact as init tends to 0", f"loss {numbers(100 * errors[:, 0])}%, half-time {numbers(100 * errors[:, 1])}%", bool(errors.max() < limit)))  # fmt: skip
        claims.append(Claim("", f"with w_init = |w_2| in place of w_eff, init {init:g}: half-time within {limit:.1%}", f"{len(seeds)} seeds", "the norm of a layer", f"off by {numbers(100 * np.array(naive), 1)}%", bool(np.abs(naive).max() < limit)))  # fmt: skip
    runs = [[trained(merged_heads(8, 4, std=scale, seed=seed)) for scale in SCALES] for seed in seeds]  # fmt: skip
    slopes = np.diff([[half_time(one) for one in row] for row in runs]) / -np.log(10)
    off = np.abs(slopes * np.linalg.norm(FOUND.rates) - 1).max()
    single = all(len(drops(one)) == 1 for row in runs for one in row)
    misses = [reduced(seed) for seed in seeds]
    claims += [
        Claim("L-8", "half-time grows as ln(1/init)/|Lambda^2|, within 1% from 1e-6 to 1e-2, with one drop", f"{len(seeds)} seeds", "1", f"slope within {off:.2%}", bool(off < 0.01 and single)),
        Claim("L-9", "D + 1 numbers, any covariance: loss within 5e-4, init 1e-3", f"{len(seeds)} seeds", "not asked", f"within {max(misses):.1e}", max(misses) < 5e-4),
    ]  # fmt: skip
    drawn = {f"init {init:g}": merged_heads(8, 4, std=init, seed=0) for init in (0.1, 1e-3)}
    found = {name: white(heads) for name, heads in drawn.items()}
    time = np.linspace(0, 8, 201)
    curves = {name: np.interp(time, one.time, one.loss) for name, (one, *_) in found.items()}
    curves |= {f"{name}, eq. (10)": np.interp(time, one.time, loss) for name, (one, loss, *_) in found.items()}  # fmt: skip
    figure = page(time, curves, "White covariance: exact flow and eq. (10) with w_eff", levels=MODES.levels[-1:])  # fmt: skip
    return Measured(pd.DataFrame({"time": time} | curves), {"white": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
