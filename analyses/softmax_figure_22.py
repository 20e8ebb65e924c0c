"""Figure 22: two opposite heads under gradient flow: growth, overshoot, slow drift.

He et al. 2025, arXiv 2503.12734, figure 22 and appendix B; start 0.001. The second case's parameters are not known.
Run: python analyses/softmax_figure_22.py (seconds)
"""

import numpy as np
import pandas as pd
from measured import SETTING, Claim, Measured, run

from mechinterp import figures
from mechinterp.theory.approximate_loss import loss_gradients
from mechinterp.theory.two_heads import late_mu, two_head_flow

START, AT = 1e-3, np.array([8.0, 12.0, 30.0, 100.0])
# The published Euler steps (step 0.01) at times AT.
PAPER = {"omega": [0.5742, 0.5046, 0.3979, 0.3106], "half_loss": [0.1404, 0.1267, 0.1163, 0.1126]}


def measure(quick: bool) -> Measured:
    time = np.geomspace(0.1, 1e4, 400)
    flow = two_head_flow(time, start=START, **SETTING)
    at = two_head_flow(AT, start=START, **SETTING)
    off = {name: abs(getattr(at, name) / np.array(values) - 1).max() for name, values in PAPER.items()}  # fmt: skip
    ends = two_head_flow(np.array([1e3, 1e4]), start=START, **SETTING)
    powers = [float(np.log10(getattr(ends, name)[1] / getattr(ends, name)[0])) for name in ("mu", "omega")]  # fmt: skip
    claims = [
        Claim("T5", "trajectory after the growth, t from 8 to 100", "gradient flow", "omega 0.5742 to 0.3106", f"omega within {off['omega']:.2%}, half the loss within {off['half_loss']:.2%}", max(off.values()) < 0.01),
        Claim("T5", "peak of omega", "gradient flow", "0.5766 at t = 7.71 (Euler)", f"{flow.peak_omega:.4f} at t = {flow.peak_time:.3f}", abs(flow.peak_omega / 0.5766 - 1) < 0.01),
        Claim("T6", "late drift: mu ~ t^(1/2), omega ~ t^(-1/2)", "gradient flow", "0.5, -0.5", f"{powers[0]:.3f}, {powers[1]:.3f}", abs(powers[0] - 0.5) < 0.05),
        Claim("T7", "opposite heads stay opposite", "descent, 2,000 steps", "exactly", f"within {asymmetry():.0e}", asymmetry() < 1e-9),
    ]  # fmt: skip
    curves = {"omega": flow.omega, "mu": flow.mu, "mu * omega": flow.mu * flow.omega, "half the loss": flow.half_loss}  # fmt: skip
    curves["mu, power 1/6"] = late_mu(time, **SETTING)
    page = figures.lines(time, curves, title="Two opposite heads under gradient flow", x_title="time", y_title="", log_x=True, log_y=True)  # fmt: skip
    frame = pd.DataFrame({"time": time, "omega": flow.omega, "mu": flow.mu, "half_loss": flow.half_loss})  # fmt: skip
    return Measured(frame, {"flow": page}, claims)


def asymmetry() -> float:
    """|sum of omega| and |sum of mu| after 2,000 steps of descent from an exact pair."""
    omega, mu = np.array([START, -START]), np.array([START, -START])
    for _ in range(2000):
        d_omega, d_mu = loss_gradients(omega, mu, **SETTING)
        omega, mu = omega - 0.005 * d_omega, mu - 0.005 * d_mu
    return float(max(abs(omega.sum()), abs(mu.sum())))


if __name__ == "__main__":
    run(measure, __file__)
