"""Figure 3: circuits of a one-head model, and four heads during training.

He et al. 2025, arXiv 2503.12734, figure 3. Run: python analyses/softmax_figure_03.py (seconds)
"""

import numpy as np
import pandas as pd
from measured import SETTING, Claim, Measured, checkpoint, near, numbers, run, shipped

from mechinterp.analysis.circuits.circuits import circuits
from mechinterp.analysis.dynamics.training import training_dynamics
from mechinterp.theory.approximate_loss import single_head

ONE, FOUR = "softmax-h1-s0", "softmax-h4-s0"


def measure(quick: bool) -> Measured:
    singles = shipped("softmax-h1-s*")
    omega = [abs(circuits(checkpoint(name)).omega_mean[0]) for name in singles]
    mu = [abs(circuits(checkpoint(name)).mu[0, 0]) for name in singles]
    predicted = single_head(**SETTING)
    four = {name: training_dynamics(checkpoint(name).history) for name in shipped("softmax-h4-s*")}
    sums = np.array([found.group_mu[-20:].mean(0) for found in four.values()])
    claims = [
        Claim("", "one head: |omega|", "softmax-h1-*", "0.517 to 0.518", numbers(omega), near(omega, 0.518, within=0.03)),
        Claim("", "one head: |mu|", "softmax-h1-*", "1.48 to 1.49", numbers(mu, 2), near(mu, 1.49, within=0.03)),
        Claim("S1", "one head ends at omega = 1/sqrt(d), mu = sqrt(d)/(1 + e (1 + s^2) d/L), here at L = 40", "softmax-h1-*", f"{predicted[0]:.3f}, {predicted[1]:.3f}", f"{numbers(omega)}, {numbers(mu, 2)}", near(omega, predicted[0], within=0.05)),
        Claim("", "four heads: sums of mu of either sign", "softmax-h4-*", "-3.35, +3.38 and -3.5, +3.54", f"{numbers(sums[:, 1], 2)} and {numbers(sums[:, 0], 2)}", near(abs(sums).ravel(), 3.44, within=0.03)),
    ]  # fmt: skip
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
    return Measured(data, figures, claims)


if __name__ == "__main__":
    run(measure, __file__)
