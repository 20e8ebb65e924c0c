"""Figure 3: circuits of a one-head model, and four heads during training.

He et al. 2025, arXiv 2503.12734, figure 3. Run: python -m analyses.softmax.figure_3_one_and_four_heads
(seconds)
"""

import numpy as np
import pandas as pd

from analyses.lib.measured import SETTING, Measured, checkpoint, run, shipped
from analyses.lib.records import Record
from analyses.softmax.setting import label
from mechinterp.analysis.one_layer.circuits import circuits
from mechinterp.analysis.training.over_training import training_dynamics
from mechinterp.theory.approximate_loss import single_head

ONE, FOUR = "softmax-h1-s0", "softmax-h4-s0"


def measure(quick: bool) -> Measured:
    singles = shipped("softmax-h1-s*")
    omega = [abs(circuits(checkpoint(name)).omega_mean[0]) for name in singles]
    mu = [abs(circuits(checkpoint(name)).mu[0, 0]) for name in singles]
    predicted = single_head(**SETTING)
    four = {name: training_dynamics(checkpoint(name).history) for name in shipped("softmax-h4-s*")}
    sums = np.array([found.group_mu[-20:].mean(0) for found in four.values()])
    scales = {"omega": omega, "mu": mu}
    common = {"relation": "between", "models": "softmax-h1-s*"}
    smoothers = {name: float(label(name).pattern == "kernel_regression") for name in singles}
    records = [
        Record(
            id="softmax-S1-smoother",
            statement="one head is a kernel smoother",
            relation="equal to",
            bound=1,
            models="softmax-h1-s*",
            values=smoothers,
        )
    ]
    records += [
        Record(
            id=f"softmax-S1-{name}",
            statement=f"one head ends at {name} {target} +- {within}",
            quantity=f"|{name}|",
            bound=(target - within, target + within),
            paper=paper,
            values=dict(zip(singles, scales[name], strict=True)),
            **common,
        )
        for name, target, within, paper in (
            ("omega", 0.52, 0.015, "0.517 to 0.518"),
            ("mu", 1.49, 0.04, "1.48 to 1.49"),
        )
    ]
    records += [
        Record(
            id=f"softmax-S1-theory-{name}",
            statement=f"one head ends where the approximate loss is least, {form}, within 20%",
            quantity=f"|{name}|, here at L = 40",
            bound=(0.8 * value, 1.2 * value),
            paper=f"{value:.3f}",
            values=dict(zip(singles, scales[name], strict=True)),
            **common,
        )
        for name, form, value in (
            ("omega", "1/sqrt(d)", predicted[0]),
            ("mu", "sqrt(d)/(1 + e (1 + s^2) d/L)", predicted[1]),
        )
    ]
    records += [
        Record(
            id=f"softmax-four-heads-{name}",
            statement=f"four heads: the sum of {name} mu is the published one within 3%",
            quantity="|sum|",
            relation="between",
            bound=(0.97 * low, 1.03 * high),
            paper=f"{low} to {high}",
            models="softmax-h4-s*",
            values=dict(zip(four, abs(sums[:, column]), strict=True)),
        )
        for column, name, low, high in ((0, "positive", 3.38, 3.54), (1, "negative", 3.35, 3.5))
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
