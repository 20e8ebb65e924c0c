"""Figure 17: two heads for two tasks (Mode II).

He et al. 2025, arXiv 2503.12734, figure 17. Run: python -m analyses.softmax.mode_2 (seconds)
"""

from analyses.lib.measured import Measured, run
from analyses.softmax.tasks import (
    CONVENTIONS,
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
        found = labels(2, convention)
        ratios = {
            f"{name}, head {head}": overlap_ratio(omega)
            for name, one in found.items()
            for head, omega in enumerate(one.circuits.omega)
        }
        sums = {name: one.scales.zero_sum for name, one in found.items()}
        of, pair = ("M-II", 2, convention), "weighted_preconditioned_gd"
        records += [
            clause(*of, "pair", "an opposite pair, for both", values=is_pattern(found, pair)),
            clause(
                *of,
                "omega",
                "omega is larger on the shared coordinates, 1.085 +- 0.04 times",
                quantity="ratio",
                relation="between",
                bound=(1.045, 1.125),
                values=ratios,
            ),
            clause(
                *of,
                "zero-sum",
                "mu sums to zero",
                quantity="|sum mu| / sum |mu|",
                relation="at most",
                bound=0.03,
                values=sums,
            ),
        ]
    return Measured(table(2), pages(2), records)


if __name__ == "__main__":
    run(measure, __file__)
