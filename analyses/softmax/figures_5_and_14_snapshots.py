"""Figures 5 and 14: circuits at snapshots of training, of two heads and of a model with a dummy head.

He et al. 2025, arXiv 2503.12734, figures 5 and 14. Run: python -m analyses softmax/figures_5_and_14_snapshots
(seconds)
"""

import pandas as pd

from analyses.lib import Measured, checkpoint, record, shipped
from analyses.softmax.setting import circuit_pages, label
from mechinterp import circuits

STEPS = (0, 1_000, 2_000, 10_000, 100_000, 500_000)


def measure(quick: bool) -> Measured:
    names = shipped("softmax-h[348]-s*")
    with_dummy = [name for name in names if "dummy" in label(name).labels]
    frames, pages = [], {}
    for name in ("softmax-h2-s0", with_dummy[0]):
        for step in STEPS:
            found = circuits(checkpoint(name).snapshots[step])
            frames.append(found.to_frame().assign(model=name, step=step))
            pages |= circuit_pages(name, step)
    early = {name: checkpoint(name).snapshots[2000] for name in shipped("softmax-h2-s*")}
    clear = {name: circuits(weights).qk_diagonal.min() for name, weights in early.items()}
    claims = [
        record("softmax-early-pattern", clear),
        record("softmax-O1e-some", {"models": len(with_dummy)}),
    ]
    return Measured(pd.concat(frames), pages, claims)
