"""Figure 16: one head for two tasks (Mode I), and the losses of one to five heads.

He et al. 2025, arXiv 2503.12734, figure 16. Run: python -m analyses.softmax.mode_1 (seconds)
"""

import numpy as np

from analyses.lib.measured import Measured, checkpoint, run, shipped
from analyses.lib.records import Record
from analyses.softmax.tasks import (
    CONVENTIONS,
    SUFFIX,
    VECTORS,
    clause,
    is_pattern,
    labels,
    overlap_ratio,
    pages,
    table,
)


def measure(quick: bool) -> Measured:
    records = []
    for convention in CONVENTIONS:
        found = labels(1, convention)
        mu = {name: one.circuits.mu[0] for name, one in found.items()}
        of = ("M-I", 1, convention)
        records += [
            clause(
                *of, "smoother", "a kernel smoother", values=is_pattern(found, "kernel_regression")
            ),
            clause(
                *of,
                "mu",
                "mu is the same for both tasks within 3%",
                quantity="relative difference",
                relation="at most",
                bound=0.03,
                values={name: abs(one[0] / one[1] - 1) for name, one in mu.items()},
            ),
            clause(
                *of,
                "omega",
                "omega is larger on the shared coordinates, 1.20 +- 0.06 times",
                quantity="ratio",
                relation="between",
                bound=(1.14, 1.26),
                values={name: overlap_ratio(one.circuits.omega[0]) for name, one in found.items()},
            ),
            losses(convention),
        ]
    return Measured(table(1), pages(1), records)


def losses(convention: str) -> Record:
    """The best seed's loss by number of heads."""
    best = []
    for n_heads in range(1, 5):
        names = shipped(f"{convention}-h{n_heads}-s*")
        best.append(np.min([checkpoint(n).history["eval_loss"].iloc[-1] for n in names]))
    return Record(
        id=f"softmax-M-loss{SUFFIX[convention]}",
        statement=f"{VECTORS[convention]}: the best seed's loss falls with the heads, 1 to 4",
        quantity="fall per head (y²)",
        relation="above",
        bound=0,
        models=f"{convention}-*",
        values={f"{n} to {n + 1} heads": best[n - 1] - best[n] for n in range(1, 4)},
        over={"selection": "best of three seeds"},
    )


if __name__ == "__main__":
    run(measure, __file__)
