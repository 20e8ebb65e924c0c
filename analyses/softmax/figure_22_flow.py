"""Figure 22: two opposite heads under gradient flow: growth, overshoot and slow drift.

He et al. 2025, arXiv 2503.12734, figure 22 and appendix B; start 0.001. The parameters of the
second case are unknown.
Run: python -m analyses softmax/figure_22_flow (seconds)"""

import numpy as np
import pandas as pd

from analyses.lib import SETTING, Measured, Record, records
from analyses.lib.theory.approximate_loss import loss_gradients
from analyses.lib.theory.two_heads import late_mu
from mechinterp import figures
from mechinterp.theory.softmax import two_head_flow

START, SCALES, TIMES = 1e-3, ("mu", "omega"), (6.0, 8.0, 12.0, 30.0, 100.0)
# The published trajectory, Euler with step 0.01, at these times; the exact one grows 2% faster up
# to t = 6.
EULER = {
    "omega": (0.3374, 0.5742, 0.5046, 0.3979, 0.3106),
    "half_loss": (None, 0.1404, 0.1267, 0.1163, 0.1126),
}


def measure(quick: bool) -> Measured:
    time = np.geomspace(0.1, 1e4, 400)
    flow = two_head_flow(time, start=START, **SETTING)
    claims = [*trajectory_records(), *late_records()]
    curves = {"omega": flow.omega, "mu": flow.mu, "mu * omega": flow.mu * flow.omega}
    curves |= {"half the loss": flow.half_loss, "mu, power 1/6": late_mu(time, **SETTING)}
    shown = {"title": "Two opposite heads under gradient flow", "x_title": "time", "y_title": ""}
    page = figures.lines(time, curves, log_x=True, log_y=True, **shown)
    columns = {"time": time, "omega": flow.omega, "mu": flow.mu, "half_loss": flow.half_loss}
    return Measured(pd.DataFrame(columns), {"flow": page}, claims)


def trajectory_records() -> list[Record]:
    """T5: the exact flow at the times of the published table, and its peak."""
    at = two_head_flow(np.array(TIMES), start=START, **SETTING)
    off = {
        name: {
            f"t = {time:g}": value / published - 1
            for time, value, published in zip(TIMES, getattr(at, name), numbers, strict=True)
            if published
        }
        for name, numbers in EULER.items()
    }
    off["growth"] = {"t = 6": off["omega"].pop("t = 6")}
    off["peak"] = {"peak": at.peak_omega / 0.5766 - 1}
    return records("softmax-T5-", {name.replace("_", "-"): one for name, one in off.items()})


def late_records() -> list[Record]:
    """T6 and T7."""
    ends = two_head_flow(np.array([1e3, 1e4]), start=START, **SETTING)
    power = {name: np.log10(one[1] / one[0]) for name, one in vars(ends).items() if name in SCALES}
    asked = {
        f"T6-{name}-{one}": {"flow": power[one]} for name in ("half", "sixth") for one in SCALES
    }
    return records("softmax-", asked | {"T7": {"descent": asymmetry()}})


def asymmetry() -> float:
    """|sum of omega| and |sum of mu| after 2,000 steps of descent from an exact pair."""
    omega, mu = np.array([START, -START]), np.array([START, -START])
    for _ in range(2000):
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - 0.005 * d_omega, mu - 0.005 * d_mu
    return float(max(abs(omega.sum()), abs(mu.sum())))
