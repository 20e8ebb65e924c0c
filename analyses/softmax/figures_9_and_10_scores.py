"""Figures 9 and 10: two heads with other score functions: circuits, and omega and mu during
training.

He et al. 2025, arXiv 2503.12734, figures 9 and 10: attention weights f(s_i) / sum_j f(s_j).
Run: python -m analyses softmax/figures_9_and_10_scores (seconds)"""

import pandas as pd

from analyses.lib import Measured, failures, record, trained
from analyses.lib.milestones import PATTERNS as PARTS
from analyses.lib.milestones import milestones
from analyses.softmax.setting import circuit_pages, dynamics, label, scale_pages

PATTERNS = ("tanh-h2-s*", "affine-*-h2-s*", "square-*-h2-s*")
FAMILIES = {
    "softmax": "softmax-h2-s[0-2]",
    "tanh": "tanh-h2-s*",
    "affine": "affine-1.0-h2-s*",
    "square": "square-1.0-h2-s*",
}


def moved(family: str, name: str) -> dict[str, object]:
    """Milestones of a model, and the overshoot of omega."""
    found = milestones(dynamics(name))
    peak = {"overshoot": found.overshoot.min(), "peak_step": found.peak_step.max()}
    return {"model": name, "family": family} | peak | {part: getattr(found, part) for part in PARTS}


def measure(quick: bool) -> Measured:
    names = [name for pattern in PATTERNS for name in trained(pattern)]
    paired = {name for name in names if label(name).label == "debiased_gd"}
    data = pd.concat([label(n).to_frame().assign(model=n, pattern=label(n).label) for n in names])
    pages = {}
    for name in (one for one in names if one.endswith("s0")):
        pages |= circuit_pages(name) | scale_pages(name)
    chosen = [(family, n) for family, pattern in FAMILIES.items() for n in trained(pattern)]
    rows = [moved(*one) for one in chosen if label(one[1]).label == "debiased_gd"]
    training = pd.DataFrame(rows)
    heights = training.groupby("family", sort=False).overshoot.agg(["min", "max"]).itertuples()
    text = "; ".join(f"{family} {low:.1f} to {high:.1f}" for family, low, high in heights)
    diagonal = {n: label(n).circuits.qk_diagonal.min() for n in names if n in paired}
    signs = {name: float(name in paired) for name in names}
    apart = sum(len(failures(pattern)) for pattern in PATTERNS)
    claims = [
        record("softmax-scores-signs", signs, over={"failed": apart}),
        record("softmax-scores-diagonal", diagonal, over={"selection": "models of both signs"}),
        record("softmax-A2", {}, text=text),
    ]
    return Measured(pd.concat([data, training]), pages, claims)
