"""Figure 6: larger initial weights shorten the plateaus of separate heads until there are none.

Zhang et al. 2025, arXiv 2501.16265, figure 6 and section 4.3: 5 heads of rank one, D = 4, weights from N(0, init^2).
Run: python analyses/linear_figure_06.py (seconds; --quick 2 seeds)
"""

import numpy as np
import pandas as pd
from linear_setting import FOUND, MOMENTS, NORMS, losses, page, trained
from measured import Claim, Measured, near, numbers, run

from mechinterp.analysis.dynamics.plateaus import crossings
from mechinterp.theory.linear_heads import SeparateHeads, separate_heads
from mechinterp.training.flow import Flow, flow

SCALES = (1e-3, 1e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
# Times to a loss of 0.9 of seed 0, from an integration of its own.
TIMES = (10737, 1066, 207, 99.1, 45.1, 11.4, 2.16)


def start_time(found: Flow) -> float:
    """When a tenth of the variance is learned."""
    return float(np.interp(-0.9, -found.loss, found.time))


def growth_times() -> np.ndarray:
    """lambda_m^2 times when a head that starts on e_m, with v = |k| = |q| = 0.02, reaches half of its v."""
    scaled = []
    for mode in range(4):
        one = 0.02 * np.eye(4)[mode].reshape(1, 1, 4)
        found = flow(SeparateHeads(v=np.array([0.02]), K=one, Q=one), MOMENTS, duration=55 / FOUND.rates[mode])  # fmt: skip
        half = np.interp(NORMS[mode] / 2, found.heads.v[:, 0], found.time)
        scaled.append(half * FOUND.rates[mode])
    return np.array(scaled)


def first_jump(init: float, seed: int) -> float:
    """init times the first jump."""
    heads = separate_heads(5, 4, std=init, seed=seed)
    found = flow(heads, MOMENTS, duration=1e9, until_loss=FOUND.levels[1] + 1e-3)
    return init * crossings(found, FOUND.levels)[0]


def measure(quick: bool) -> Measured:
    seeds, claims = range(2 if quick else 10), []
    runs = [[trained(separate_heads(5, 4, std=scale, seed=seed)) for scale in SCALES] for seed in seeds]  # fmt: skip
    times = np.array([[start_time(found) for found in row] for row in runs])
    falls = [bool((np.diff(row[:-1]) < 0).all()) for row in times]
    same = near(times[0] / TIMES, 1, within=5e-3)
    constant = np.array([[first_jump(init, seed) for init in (1e-2, 3e-3, 1e-3)] for seed in seeds])
    off = np.abs(constant[:, :2] / constant[:, 2:] - 1).max(0)
    scaled = growth_times()
    claims = [
        Claim("L-18", "time to a loss of 0.9, within 0.5%, for init " + ", ".join(f"{scale:g}" for scale in SCALES), "5 heads, seed 0", ", ".join(f"{time:g}" for time in TIMES), ", ".join(f"{time:.4g}" for time in times[0]), same),
        Claim("L-18", "it falls at every step of init up to 0.5, and init 1 has no first plateau: below 5 tau", f"{len(seeds)} seeds", "shown", f"falls in {sum(falls)} of {len(seeds)}; init 1: {numbers(times[:, -1], 1)} tau (more than at 0.5 in {sum(times[:, -1] > times[:, -2])})", all(falls) and bool(times[:, -1].max() < 5)),
        Claim("L-14", "init times the first jump is the same: within 4% for 1e-2 and 1e-3, 2% for 3e-3 and 1e-3", f"{len(seeds)} seeds", "1/init", f"within {off[0]:.1%}, {off[1]:.1%}", bool(off[0] < 0.04 and off[1] < 0.02)),
        Claim("L-14", "learning e_m takes lambda_m^-2, within 5%", "one head on e_m, m = 1 ... 4", "lambda_m^-2", f"lambda_m^2 times the time is {numbers(scaled, 2)}", bool(scaled.max() / scaled.min() < 1.05)),
    ]  # fmt: skip
    grid = np.geomspace(0.1, max(found.time[-1] for found in runs[0]), 400)
    curves = losses(grid, {f"init {scale:g}": found for scale, found in zip(SCALES, runs[0], strict=True)})  # fmt: skip
    figure = page(grid, curves, "Separate heads from small to large weights; levels L(M_m) dotted", log_x=True)  # fmt: skip
    return Measured(pd.DataFrame({"time": grid} | curves), {"loss": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
