"""Figure 13: omega and mu during training for two, three and four heads; when each part of the pattern holds.

He et al. 2025, arXiv 2503.12734, figure 13. Run: python analyses/softmax_figure_13.py (seconds)
"""

import numpy as np
import pandas as pd
from measured import Claim, Measured, checkpoint, numbers, run, shipped

from mechinterp.analysis.circuits.patterns import classify
from mechinterp.analysis.dynamics.milestones import PATTERNS, milestones
from mechinterp.analysis.dynamics.training import TrainingDynamics, training_dynamics

NAMES = "softmax-h[2348]-s*"


def row(name: str) -> dict:
    """Milestones of a model, and the largest dip of its group sums."""
    dynamics = training_dynamics(checkpoint(name).history)
    found = milestones(dynamics)
    strong = np.argsort(-abs(dynamics.mu[-1]))[:2]
    early = (found.overshoot[strong] > 1.5) & (found.peak_step[strong] <= 3000)
    return {
        "model": name,
        **{part: getattr(found, part) for part in PATTERNS},
        "diagonal_early": diagonal_at(dynamics, 2000 if "-h2-" in name else 10_000),
        "early_peaks": early.sum(),
        "dip": max(dip(dynamics, sign) for sign in (0, 1)),
        "positive": dynamics.group_mu[-20:, 0].mean(),
        "gamma": np.average(
            abs(dynamics.omega[-20:].mean(0)), weights=abs(dynamics.mu[-20:].mean(0))
        ),
    }


def diagonal_at(dynamics: TrainingDynamics, step: int) -> float:
    """Least cosine of a head in use with its diagonal at a step."""
    at, used = dynamics.step == step, abs(dynamics.mu[-1]) > 0.3
    return dynamics.qk_diagonal[at][:, used].min()


def dip(dynamics: TrainingDynamics, sign: int) -> float:
    """How far the sum of mu of one sign fell below what it had reached between steps 1,000 and 300,000."""
    rows = (dynamics.step >= 1000) & (dynamics.step <= 300_000)
    sums = abs(dynamics.group_mu[rows, sign])
    highest = np.maximum.accumulate(sums).clip(min=1e-9)
    return float((1 - sums / highest).max())


def measure(quick: bool) -> Measured:
    paired = [n for n in shipped(NAMES) if classify(checkpoint(n)).pattern == "debiased_gd"]
    data = pd.DataFrame([row(name) for name in paired])
    n, small = len(data), data[~data.model.str.contains("h8")]
    signs, dips = data.sign_matching, data.dip
    early = (data.diagonal_early > 0.9) & ~data.model.str.contains("h[38]")
    asked = (~data.model.str.contains("h[38]")).sum()
    spread = [max(v) / min(v) - 1 for v in (data.positive, data.gamma)]
    two = f"{n} of {NAMES}"
    claims = [
        ("O1d", "signs of omega and mu match from step 1,000 on", two, "from step 1,000", f"in {(signs <= 1000).sum()} of {n}; the last at {signs.max():.0f}", bool((signs <= 1000).all())),
        ("O4a", "the diagonal is clear at step 2,000 (two heads), 10,000 (four)", "softmax-h2-*, h4-*", "shown", f"cosine above 0.9 in {early.sum()} of {asked}", bool(early.sum() == asked)),
        ("O4b", "|omega| of the strongest two heads peaks by step 3,000 above 1.5 times its end", two, "shown", f"{data.early_peaks.sum()} of {2 * n} heads", bool(data.early_peaks.sum() == 2 * n)),
        ("O4c", "group sums of |mu| do not fall by more than 2%", two, "shown", f"single logged steps dip by {dips.min():.1%} or more; by up to 5% in {(dips <= 0.05).sum()} of {n}, the others turned late (to {dips.max():.0%})", bool((dips <= 0.02).all())),
        ("O4d", "seeds end alike: group sums within 5%, gamma within 8%", two, "shown", f"within {spread[0]:.1%} and {spread[1]:.1%}", bool(spread[0] <= 0.05 and spread[1] <= 0.08)),
        ("", "zero sum holds from some step on, two to four heads", "softmax-h[234]-*", "shown", f"from steps {numbers(small.zero_sum, 0)}", bool(small.zero_sum.notna().all())),
    ]  # fmt: skip
    pages = {}
    for name in ("softmax-h2-s0", "softmax-h3-s0", "softmax-h4-s0"):
        dynamics = training_dynamics(checkpoint(name).history)
        pages[f"{name}-omega"] = dynamics.plot().update_layout(title_text=f"omega, {name}")
        pages[f"{name}-mu"] = dynamics.plot_mu().update_layout(title_text=f"mu, {name}")
    return Measured(data, pages, [Claim(*claim) for claim in claims])


if __name__ == "__main__":
    run(measure, __file__)
