"""Figure 22: two opposite heads under gradient flow: growth, overshoot, slow drift.

He et al. 2025, arXiv 2503.12734, figure 22 and appendix B; start 0.001. The second case's
parameters are not known. Run: python -m analyses.softmax.figure_22_flow (seconds)
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import SETTING, Measured, run
from analyses.lib.records import Record
from mechinterp import figures
from mechinterp.theory.approximate_loss import loss_gradients
from mechinterp.theory.two_heads import late_mu, two_head_flow

START, TIMES = 1e-3, (6.0, 8.0, 12.0, 30.0, 100.0)
# The published trajectory, Euler with step 0.01, at those times; the exact one grows 2% faster
# up to t = 6.
EULER = {
    "omega": (0.3374, 0.5742, 0.5046, 0.3979, 0.3106),
    "half_loss": (None, 0.1404, 0.1267, 0.1163, 0.1126),
}


def measure(quick: bool) -> Measured:
    time = np.geomspace(0.1, 1e4, 400)
    flow = two_head_flow(time, start=START, **SETTING)
    records = [*trajectory_records(), *late_records()]
    curves = {
        "omega": flow.omega,
        "mu": flow.mu,
        "mu * omega": flow.mu * flow.omega,
        "half the loss": flow.half_loss,
    }
    curves["mu, power 1/6"] = late_mu(time, **SETTING)
    page = figures.lines(
        time,
        curves,
        title="Two opposite heads under gradient flow",
        x_title="time",
        y_title="",
        log_x=True,
        log_y=True,
    )
    frame = pd.DataFrame(
        {"time": time, "omega": flow.omega, "mu": flow.mu, "half_loss": flow.half_loss}
    )
    return Measured(frame, {"flow": page}, records)


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
    texts = {
        "omega": "omega after the growth",
        "half_loss": "half the loss after the growth",
        "growth": "omega in the growth",
        "peak": "the peak of omega",
    }
    return [
        Record(
            id=f"softmax-T5-{name.replace('_', '-')}",
            statement=f"{texts[name]} of the exact flow is the published one within 1%",
            quantity="relative difference",
            relation="between",
            bound=(-0.01, 0.01),
            paper="0.5766 at t = 7.71" if name == "peak" else "",
            models="closed form",
            values=values,
        )
        for name, values in off.items()
    ]


def late_records() -> list[Record]:
    """T6 and T7."""
    ends = two_head_flow(np.array([1e3, 1e4]), start=START, **SETTING)
    power = {
        name: float(np.log10(getattr(ends, name)[1] / getattr(ends, name)[0]))
        for name in ("mu", "omega")
    }
    clauses = (
        ("half", "drift late as t^(1/2) and t^(-1/2)", {"mu": 0.5, "omega": -0.5}, 0.05, "paper"),
        ("sixth", "drift late as t^(1/6) and t^(-1/6)", {"mu": 0.17, "omega": -0.17}, 0.02, "ours"),
    )
    found = [
        Record(
            id=f"softmax-T6-{name}-{scale}",
            statement=f"mu and omega {text}: {scale}",
            quantity="power between t = 10^3 and 10^4",
            relation="between",
            bound=(powers[scale] - within, powers[scale] + within),
            tag=tag,
            models="closed form",
            values={"flow": power[scale]},
        )
        for name, text, powers, within, tag in clauses
        for scale in ("mu", "omega")
    ]
    opposite = Record(
        id="softmax-T7",
        statement="opposite heads stay opposite over 2,000 steps",
        quantity="largest |sum| of omega and of mu",
        relation="below",
        bound=1e-9,
        models="closed form",
        values={"descent": asymmetry()},
    )
    return [*found, opposite]


def asymmetry() -> float:
    """|sum of omega| and |sum of mu| after 2,000 steps of descent from an exact pair."""
    omega, mu = np.array([START, -START]), np.array([START, -START])
    for _ in range(2000):
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - 0.005 * d_omega, mu - 0.005 * d_mu
    return float(max(abs(omega.sum()), abs(mu.sum())))


if __name__ == "__main__":
    run(measure, __file__)
