"""Figure 8: softmax and linear attention, trained at 40 pairs, tested at 10 to 400.

He et al. 2025, arXiv 2503.12734, figure 8. Linear attention has the fixed factor 1/40 in its scores. All curves share
20,000 prompts per length. Run: python analyses/softmax_figure_08.py (a minute; --quick 1,000 prompts)
"""

import numpy as np
from measured import Claim, Measured, checkpoint, run

from mechinterp.analysis.learners.losses import shared_losses
from mechinterp.config import TaskConfig
from mechinterp.theory.softmax import linear_attention_risk

LENGTHS = (*range(10, 101, 10), 150, 200, 300, 400)
NAMES = ("softmax-h1-s0", "softmax-h2-s0", "softmax-h4-s0", "linear-h1-s0", "linear-h2-s0")


def measure(quick: bool) -> Measured:
    models = {name: checkpoint(name) for name in NAMES}
    n_prompts = 1000 if quick else 20_000
    found = shared_losses(models, TaskConfig(), context_lengths=LENGTHS, n_prompts=n_prompts)
    loss = dict(zip(NAMES, found.loss.T, strict=True))
    sem = dict(zip(NAMES, found.loss_sem.T, strict=True))
    at, far = LENGTHS.index(40), LENGTHS.index(100)
    linear, softmax = loss["linear-h1-s0"], loss["softmax-h2-s0"]
    exact = [
        linear_attention_risk(trained_length=40, context_length=length, d_x=5, noise_var=0.1)
        for length in LENGTHS
    ]
    best = LENGTHS[int(np.argmin(linear))]
    claims = [
        Claim(
            "L1",
            "linear attention fails beyond its length, softmax does not",
            "linear-h1-s0, softmax-h2-s0",
            "loss at 100 over loss at 40: 7.2 (exact), 0.68",
            f"{linear[far] / linear[at]:.1f}, {softmax[far] / softmax[at]:.2f}; linear is best at L = {best}",
            bool(linear[far] > 5 * linear[at] and softmax[far] < 0.75 * softmax[at]),
        ),
        Claim(
            "",
            "trained linear attention is one vanilla gradient step",
            "linear-h1-s0",
            f"exact {exact[at]:.4f} at 40, {exact[far]:.3f} at 100",
            f"{linear[at]:.4f} ± {sem['linear-h1-s0'][at]:.4f}, {linear[far]:.3f} ± {sem['linear-h1-s0'][far]:.3f}",
            bool(abs(linear[at] - exact[at]) < 0.002 + 3 * sem["linear-h1-s0"][at]),
        ),
    ]
    figure = found.plot().update_yaxes(type="log")
    return Measured(found.to_frame(), {"losses": figure}, claims)


if __name__ == "__main__":
    run(measure, __file__)
