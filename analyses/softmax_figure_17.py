"""Figure 17: two heads for two tasks (Mode II).

He et al. 2025, arXiv 2503.12734, figure 17. Run: python analyses/softmax_figure_17.py (seconds)
"""

from measured import Claim, Measured, numbers, run
from softmax_tasks import CONVENTIONS, labels, overlap_ratio, pages, table


def measure(quick: bool) -> Measured:
    claims = []
    for convention in CONVENTIONS:
        found = labels(2, convention)
        pairs = [one for one in found.values() if one.pattern == "weighted_preconditioned_gd"]
        text = f"{len(pairs)} of {len(found)}"
        if pairs:
            ratios = [overlap_ratio(omega) for one in pairs for omega in one.circuits.omega]
            text += f"; omega on shared coordinates {numbers(ratios, 2)} times that elsewhere, "
            text += f"|sum mu| / sum |mu| at most {max(one.scales.zero_sum for one in pairs):.3f}"
        claims.append(Claim("M-II", "two heads are an opposite pair that both tasks share", f"{convention}-h2-*", "shown; 1.085 (reduced model)", text, len(pairs) == len(found)))  # fmt: skip
    return Measured(table(2), pages(2), claims)


if __name__ == "__main__":
    run(measure, __file__)
