"""Figure 1: circuits of a two-head model, and how omega and mu moved during training.

He et al. 2025, arXiv 2503.12734, figure 1. Run: python -m analyses.softmax.figure_1_two_heads (seconds)
"""

import numpy as np

from analyses.lib.measured import Measured, checkpoint, run
from analyses.lib.records import record
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.training.milestones import milestones
from mechinterp.analysis.training.over_training import training_dynamics

NAME = "softmax-h2-s0"


def of_heads(values: np.ndarray) -> dict[str, float]:
    return {f"head {head}": float(value) for head, value in enumerate(values)}


def measure(quick: bool) -> Measured:
    model = checkpoint(NAME)
    found, dynamics = circuits(model), training_dynamics(model.history)
    peaks = milestones(dynamics)
    sums = abs(dynamics.mu[dynamics.step >= 5000].sum(1)).max()
    scales = {"omega": abs(found.omega_mean), "mu": abs(found.mu[:, 0])}
    claims = [record(f"softmax-two-heads-{name}", of_heads(scales[name])) for name in scales]
    claims += [
        record("softmax-two-heads-peak", of_heads(peaks.peak_step)),
        record("softmax-two-heads-sum", {NAME: sums}),
    ]
    figures = {
        "qk": found.plot(),
        "ov": found.plot_ov(),
        "omega": dynamics.plot(),
        "mu": dynamics.plot_mu(),
    }
    return Measured(dynamics.to_frame(), figures, claims)


if __name__ == "__main__":
    run(measure, __file__)
