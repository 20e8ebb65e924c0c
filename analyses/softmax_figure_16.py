"""Figure 16: one head for two tasks (Mode I), and the losses of one to five heads.

He et al. 2025, arXiv 2503.12734, figure 16. Run: python analyses/softmax_figure_16.py (seconds)
"""

import numpy as np
from measured import Claim, Measured, checkpoint, numbers, run, shipped
from softmax_tasks import CONVENTIONS, labels, overlap_ratio, pages, table


def measure(quick: bool) -> Measured:
    claims = []
    for convention in CONVENTIONS:
        found = labels(1, convention)
        same = [name for name, one in found.items() if one.pattern == "kernel_regression"]
        ratios = [overlap_ratio(found[name].circuits.omega[0]) for name in same]
        mu = [found[name].circuits.mu[0] for name in same]
        uneven = [abs(one[0] / one[1] - 1) for one in mu]
        claims += [
            Claim("M-I", "one head is a kernel smoother for both tasks", f"{convention}-h1-*", "shown", f"{len(same)} of {len(found)}; mu equal within {max(uneven):.1%}", len(same) == len(found) and max(uneven) < 0.03),
            Claim("M-I", "its omega is larger on the shared coordinates", f"{convention}-h1-*", "1.20 (reduced model)", numbers(ratios, 2), bool(min(ratios) > 1.1)),
            _losses(convention),
        ]  # fmt: skip
    return Measured(table(1), pages(1), claims)


def _losses(convention: str) -> Claim:
    """Mean loss over seeds by number of heads."""
    means = []
    for n_heads in range(1, 6):
        names = shipped(f"{convention}-h{n_heads}-s*")
        means.append(np.min([checkpoint(n).history["eval_loss"].iloc[-1] for n in names]))
    text = ", ".join(f"{mean:.4f}" for mean in means)
    falls = bool((np.diff(means[:4]) < 0).all())
    return Claim("M-loss", "the best seed's loss falls with the number of heads, 1 to 4, and rests at 5", f"{convention}-*", "falls", text, falls)  # fmt: skip


if __name__ == "__main__":
    run(measure, __file__)
