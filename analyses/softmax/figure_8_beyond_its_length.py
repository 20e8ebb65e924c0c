"""Figure 8: softmax and linear attention, trained at 40 pairs and tested at 10 to 400.

He et al. 2025, arXiv 2503.12734, figure 8. Linear attention has the fixed factor 1/40 in its
scores. All curves share 20,000 prompts per length. Run: python -m analyses
softmax/figure_8_beyond_its_length (a minute; --quick 1,000 prompts)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, checkpoint, records
from analyses.lib.shared_losses import SharedLosses, shared_losses
from analyses.lib.theory.softmax import linear_attention_risk
from mechinterp import TaskConfig

# Single steps near 40, to find the smallest loss.
NEAR = (*range(36, 40), *range(41, 50))
LENGTHS = tuple(sorted({*range(10, 101, 10), *NEAR, 150, 200, 300, 400}))
NAMES = ("softmax-h1-s0", "softmax-h2-s0", "softmax-h4-s0", "linear-h1-s0", "linear-h2-s0")
RISK = {"trained_length": 40, "d_x": 5, "noise_var": 0.1}


def measure(quick: bool) -> Measured:
    models = {name: checkpoint(name) for name in NAMES}
    n_prompts = 1000 if quick else 20_000
    found = shared_losses(models, TaskConfig(), context_lengths=LENGTHS, n_prompts=n_prompts)
    shown = found.plot().update_yaxes(type="log")
    return Measured(found.to_frame(), {"losses": shown}, [*exact(), *trained(found)])


def exact() -> list[Record]:
    """L1 for linear attention at its optimum, in closed form."""
    risk = {n: linear_attention_risk(context_length=n, **RISK) for n in range(10, 101)}
    best = min(risk, key=lambda length: risk[length])
    asked = {"": {"closed form": risk[100] / risk[40]}, "-best": {"closed form": best}}
    return records("softmax-L1-exact", asked)


def trained(found: SharedLosses) -> list[Record]:
    """L1 for trained models."""
    loss = pd.DataFrame(found.loss, index=LENGTHS, columns=NAMES)
    sem = pd.DataFrame(found.loss_sem, index=LENGTHS, columns=NAMES)
    linear, softmax = ["linear-h1-s0", "linear-h2-s0"], ["softmax-h2-s0", "softmax-h4-s0"]
    ratio = loss.loc[100] / loss.loc[40]
    error = ratio * np.hypot(sem.loc[100] / loss.loc[100], sem.loc[40] / loss.loc[40])
    off = (loss.loc[40] - linear_attention_risk(context_length=40, **RISK)) / sem.loc[40]
    pairs = {name: (ratio[name], error[name]) for name in NAMES}
    asked = {
        "L1-linear": {name: pairs[name] for name in linear},
        "L1-linear-best": loss[linear].idxmin(),
        "L1-softmax": {name: pairs[name] for name in softmax},
        "linear-loss": {name: (off[name], 1.0) for name in linear},
    }
    return records("softmax-", asked, over={"prompts": found.n_prompts})
