"""Figure 18: four heads for two tasks (Mode III), and five.

He et al. 2025, arXiv 2503.12734, figure 18. Run: python analyses/softmax_figure_18.py (seconds)
"""

from collections import Counter

from measured import Claim, Measured, numbers, run
from softmax_tasks import CONVENTIONS, ON, eta, labels, pages, table


def measure(quick: bool) -> Measured:
    claims = []
    for convention in CONVENTIONS:
        for n_heads in (4, 5):
            found = labels(n_heads, convention)
            models = f"{convention}-h{n_heads}-*"
            modes = Counter(one.pattern for one in found.values())
            text = ", ".join(f"{count} {mode}" for mode, count in modes.items())
            on = [abs(one.scales.theta[ON] - eta(name)).max() for name, one in found.items()]
            off = [abs(one.scales.theta[~ON]).max() for one in found.values()]
            leaks = [one.task_leak.max() for one in found.values() if one.pattern == "task_heads"]
            text += f"; leaks {numbers(leaks, 2)}" if leaks else ""
            pairs = "a pair of heads per task" + ("" if n_heads == 4 else ", with a fifth head")
            claims += [
                Claim("M-III", pairs, models, "shown" if n_heads == 4 else "not shown", text, modes["task_heads"] == len(found)),
                Claim("M-III", "each task takes its own step: theta_n = eta on its support, 0 off it", models, "exact", f"within {numbers(on)} on it, {numbers(off)} off it", bool(max(on + off) < 0.03)),
            ]  # fmt: skip
    return Measured(table(4), pages(4), claims)


if __name__ == "__main__":
    run(measure, __file__)
