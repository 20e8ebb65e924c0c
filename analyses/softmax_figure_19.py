"""Figure 19: three heads for two tasks, superposition (Mode IV).

He et al. 2025, arXiv 2503.12734, figure 19. Run: python analyses/softmax_figure_19.py (seconds)
"""

from collections import Counter

from measured import Claim, Measured, numbers, run
from softmax_tasks import CONVENTIONS, ON, eta, labels, pages, table


def measure(quick: bool) -> Measured:
    claims = []
    for convention in CONVENTIONS:
        found = labels(3, convention)
        modes = Counter(one.pattern for one in found.values())
        text = ", ".join(f"{count} {mode}" for mode, count in modes.items())
        on = [abs(one.scales.theta[ON] - eta(name)).max() for name, one in found.items()]
        off = [abs(one.scales.theta[~ON]).max() for one in found.values()]
        claims += [
            Claim("M-IV", "three heads superpose: heads serve both tasks, or are of mixed sign", f"{convention}-h3-*", "shown", text, modes["superposition"] == len(found)),
            Claim("M-IV", "theta_n = eta on its support, below 0.08 off it", f"{convention}-h3-*", "0.00 to 0.02 off it", f"within {numbers(on)} on it, {numbers(off)} off it", bool(max(on) < 0.06 and max(off) < 0.08)),
        ]  # fmt: skip
    return Measured(table(3), pages(3), claims)


if __name__ == "__main__":
    run(measure, __file__)
