"""Figure 6: larger initial weights shorten the plateaus of separate heads until they vanish.

Zhang et al. 2025, arXiv 2501.16265, figure 6 and section 4.3: 5 heads of rank one, D = 4, weights
from N(0, init^2).
Run: python -m analyses linear/figure_6_initial_scale (seconds; --quick 2 seeds)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, records
from analyses.lib.plateaus import crossings
from analyses.linear.setting import FOUND, MOMENTS, NORMS, losses, named, page, trained
from mechinterp.theory.linear import SeparateHeads, separate_heads
from mechinterp.training.linear import Flow, flow

SCALES = (1e-3, 1e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)
# Times at which seed 0 reaches a loss of 0.9, from an independent integration.
TIMES = (10737, 1066, 207, 99.1, 45.1, 11.4, 2.16)


def start_time(found: Flow) -> float:
    """Time at which a tenth of the variance is learned."""
    return float(np.interp(-0.9, -found.loss, found.time))


def growth_times() -> np.ndarray:
    """lambda_m^2 times the time at which a head that starts on e_m, with v = |k| = |q| = 0.02,
    reaches half of its v."""
    scaled = []
    for mode in range(4):
        one = 0.02 * np.eye(4)[mode].reshape(1, 1, 4)
        heads = SeparateHeads(v=np.array([0.02]), K=one, Q=one)
        found = flow(heads, MOMENTS, duration=55 / FOUND.rates[mode])
        half = np.interp(NORMS[mode] / 2, found.heads.v[:, 0], found.time)
        scaled.append(half * FOUND.rates[mode])
    return np.array(scaled)


def first_jump(init: float, seed: int) -> float:
    """init times the time of the first jump."""
    heads = separate_heads(5, 4, std=init, seed=seed)
    found = flow(heads, MOMENTS, duration=1e9, until_loss=FOUND.levels[1] + 1e-3)
    return init * crossings(found, FOUND.levels)[0]


def measure(quick: bool) -> Measured:
    seeds = range(2 if quick else 10)
    runs = [
        [trained(separate_heads(5, 4, std=scale, seed=seed)) for scale in SCALES] for seed in seeds
    ]
    times = np.array([[start_time(found) for found in row] for row in runs])
    jumps = np.array([[first_jump(init, seed) for init in (1e-2, 3e-3, 1e-3)] for seed in seeds])
    scaled = growth_times()
    names = [f"init {scale:g}" for scale in SCALES]
    asked = {
        "18-times": dict(zip(names, times[0] / TIMES, strict=True)),
        "18-shorter": named((times[:, 1:-1] / times[:, :-2]).max(1), "seed"),
        "18-gone": named(times[:, -1], "seed"),
        "14-decade": named(jumps[:, 0] / jumps[:, 2], "seed"),
        "14-half-decade": named(jumps[:, 1] / jumps[:, 2], "seed"),
        "14-eigenvalue": named(scaled / scaled[0], "direction"),
    }
    grid = np.geomspace(0.1, max(found.time[-1] for found in runs[0]), 400)
    curves = losses(grid, dict(zip(names, runs[0], strict=True)))
    title = "Separate heads from small to large weights; levels L(M_m) dotted"
    figure = page(grid, curves, title, log_x=True)
    data = pd.DataFrame({"time": grid} | curves)
    return Measured(data, {"loss": figure}, records("linear-", asked))
