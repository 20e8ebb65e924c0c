"""Figure 10: omega and mu during training, for other score functions than softmax.

He et al. 2025, arXiv 2503.12734, figure 10. Run: python -m analyses.softmax.figure_10_score_dynamics
(seconds)
"""

import pandas as pd

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import record
from mechinterp.analysis.one_layer.classify import classify
from mechinterp.analysis.training.milestones import PATTERNS as PARTS
from mechinterp.analysis.training.milestones import milestones
from mechinterp.analysis.training.over_training import training_dynamics

FAMILIES = {
    "softmax": "softmax-h2-s[0-2]",
    "tanh": "tanh-h2-s*",
    "affine": "affine-1.0-h2-s*",
    "square": "square-1.0-h2-s*",
}


def measure(quick: bool) -> Measured:
    rows, pages, texts = [], {}, []
    for family, pattern in FAMILIES.items():
        for name in shipped(pattern):
            if classify(checkpoint(name)).pattern != "debiased_gd":
                continue
            dynamics = training_dynamics(checkpoint(name).history)
            found = milestones(dynamics)
            row = {
                "model": name,
                "family": family,
                "overshoot": found.overshoot.min(),
                "peak_step": found.peak_step.max(),
            }
            rows.append(row | {part: getattr(found, part) for part in PARTS})
            if name.endswith("s0"):
                pages[f"{name}-omega"] = dynamics.plot().update_layout(title_text=f"omega, {name}")
                pages[f"{name}-mu"] = dynamics.plot_mu().update_layout(title_text=f"mu, {name}")
    data = pd.DataFrame(rows)
    for family, group in data.groupby("family", sort=False):
        texts.append(f"{family} {group.overshoot.min():.1f} to {group.overshoot.max():.1f}")
    claim = record("softmax-A2", {}, text="; ".join(texts))
    return Measured(data, pages, [claim])


if __name__ == "__main__":
    run(measure, __file__)
