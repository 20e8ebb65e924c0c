"""Figure 12: the remaining ranks 3, 5, 6 and 7, in eight dimensions.

Zhang et al. 2025, arXiv 2501.16265, figure 12; measured as figure 4.
Run: python -m analyses linear/figure_12_other_ranks (two minutes; --quick 1 seed)"""

from analyses.lib import Measured
from analyses.linear.figure_4_ranks import ranks

RANKS = (3, 5, 6, 7)


def measure(quick: bool) -> Measured:
    return ranks(RANKS, 1 if quick else 5)
