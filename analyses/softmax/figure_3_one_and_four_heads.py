"""Figure 3: circuits of a one-head model, and four heads during training.

He et al. 2025, arXiv 2503.12734, figure 3. Run: python -m analyses.softmax.figure_3_one_and_four_heads
(seconds)
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from analyses.softmax.setting import label
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.training.over_training import training_dynamics

ONE, FOUR = "softmax-h1-s0", "softmax-h4-s0"


def measure(quick: bool) -> Measured:
    singles = shipped("softmax-h1-s*")
    omega = [abs(circuits(checkpoint(name)).omega_mean[0]) for name in singles]
    mu = [abs(circuits(checkpoint(name)).mu[0, 0]) for name in singles]
    four = {name: training_dynamics(checkpoint(name).history) for name in shipped("softmax-h4-s*")}
    sums = np.array([found.group_mu[-20:].mean(0) for found in four.values()])
    scales = {"omega": omega, "mu": mu}
    smoothers = {name: float(label(name).pattern == "kernel_regression") for name in singles}
    records = [record("softmax-S1-smoother", smoothers)]
    records += [
        record(f"softmax-S1-{name}", dict(zip(singles, scales[name], strict=True)))
        for name in scales
    ]
    records += [
        record(f"softmax-S1-theory-{name}", dict(zip(singles, scales[name], strict=True)))
        for name in scales
    ]
    records += [
        record(f"softmax-four-heads-{name}", dict(zip(four, abs(sums[:, column]), strict=True)))
        for column, name in enumerate(("positive", "negative"))
    ]
    dynamics = four[FOUR]
    single = circuits(checkpoint(ONE))
    figures = {
        "qk": single.plot(),
        "ov": single.plot_ov(),
        "omega": dynamics.plot(),
        "mu": dynamics.plot_mu(),
        "groups": dynamics.plot_groups(),
    }
    data = pd.concat([found.to_frame().assign(model=name) for name, found in four.items()])
    return Measured(data, figures, records)


if __name__ == "__main__":
    run(measure, __file__)
