"""Figure 18: four heads for two tasks (Mode III), and five.

He et al. 2025, arXiv 2503.12734, figure 18. Run: python -m analyses.softmax.mode_3 (seconds)
"""

from analyses.lib.measured import Measured, run
from analyses.softmax.tasks import (
    CONVENTIONS,
    clause,
    is_pattern,
    labels,
    pages,
    table,
    theta_clauses,
)


def measure(quick: bool) -> Measured:
    records = []
    for convention in CONVENTIONS:
        for n_heads in (4, 5):
            found = labels(n_heads, convention)
            of = ("M-III", n_heads, convention)
            records += [
                clause(
                    *of,
                    "pairs",
                    "a pair of heads per task" + (", and a fifth" if n_heads == 5 else ""),
                    values=is_pattern(found, "task_heads"),
                    tag="paper" if n_heads == 4 else "ours",
                ),
                *theta_clauses(*of, found, off=0.03),
                clause(
                    *of,
                    "zero-sum",
                    "mu sums to zero",
                    quantity="largest |sum mu|",
                    relation="below",
                    bound=0.15,
                    values={n: abs(one.circuits.mu.sum(0)).max() for n, one in found.items()},
                ),
            ]
    return Measured(table(4), pages(4), records)


if __name__ == "__main__":
    run(measure, __file__)
