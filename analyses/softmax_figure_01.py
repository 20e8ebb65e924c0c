"""Figure 1: circuits of a two-head model, and how omega and mu moved during training.

He et al. 2025, arXiv 2503.12734, figure 1. Run: python analyses/softmax_figure_01.py (seconds)
"""

from measured import Claim, Measured, checkpoint, near, numbers, run

from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.analysis.dynamics.milestones import milestones
from mechinterp.analysis.dynamics.training import training_dynamics

NAME = "softmax-h2-s0"


def measure(quick: bool) -> Measured:
    model = checkpoint(NAME)
    found, dynamics = circuits(model), training_dynamics(model.history)
    peaks = milestones(dynamics)
    sums = abs(dynamics.mu[dynamics.step >= 5000].sum(1)).max()
    omega, mu = abs(found.omega_mean), abs(found.mu[:, 0])
    claims = [
        Claim("", "two heads: |omega|", NAME, "0.126 to 0.130", numbers(omega), near(omega, 0.128, within=0.03)),
        Claim("", "two heads: |mu|", NAME, "3.40 to 3.53", numbers(mu, 2), near(mu, 3.46, within=0.03)),
        Claim("", "|omega| peaks at steps 1,000 to 2,000", NAME, "0.31 and 0.23", f"{numbers(peaks.peak_omega, 2)} at steps {numbers(peaks.peak_step, 0)}", bool((peaks.peak_step <= 2000).all())),
        Claim("", "|sum of mu| stays within 0.15 from step 5,000 on", NAME, "0.1", f"{sums:.2f}", bool(sums < 0.15)),
    ]  # fmt: skip
    figures = {
        "qk": found.plot(),
        "ov": found.plot_ov(),
        "omega": dynamics.plot(),
        "mu": dynamics.plot_mu(),
    }
    return Measured(dynamics.to_frame(), figures, claims)


if __name__ == "__main__":
    run(measure, __file__)
