"""C11 of sparse regression with every choice of one head in each later layer, not only the best by
masking.

If the heads of a layer are similar, the best one by masking is random. The choice that is best on a
few hundred prompts is measured on others. All heads of layer 1 are kept.
Run: python -m analyses sparse/choices (two minutes; --quick seconds)"""

from itertools import product

import numpy as np
import pandas as pd

from analyses.lib import Measured, record
from analyses.sparse.setting import NOISES, NOTE, SEVERAL, prompts_of, ratio, shipped, trained
from mechinterp import Prompts
from mechinterp.analysis.ablation.measured import masked_errors
from mechinterp.analysis.stats import halves

LATER = 3  # layers after the first


def masked(n_heads: int, choice: tuple[int, ...]) -> list[tuple[int, int]]:
    """Heads that are masked when one head of each later layer is kept."""
    return [(at, h) for at, one in enumerate(choice, 1) for h in range(n_heads) if h != one]


def best_choice(
    name: str, scored: Prompts, measured: Prompts
) -> tuple[pd.DataFrame, tuple[float, float]]:
    """Risk of every choice, and risk of the best choice relative to the full model, on other
    prompts."""
    model, heads = trained(name).model, trained(name).config.model.n_heads
    every = list(product(range(heads), repeat=LATER))
    errors = masked_errors(model, scored, [masked(heads, choice) for choice in every])
    risk, sems = errors.mean(0), errors.std(0, ddof=1) / np.sqrt(len(errors))
    kept = masked_errors(model, measured, [[], masked(heads, every[int(risk.argmin())])])
    frame = pd.DataFrame(every, columns=["L1", "L2", "L3"])
    frame = frame.assign(model=name, risk=risk, risk_sem=sems)
    return frame, ratio(kept[:, 1], kept[:, 0])


def measure(quick: bool) -> Measured:
    frames, pairs = [], {}
    for noise in NOISES:
        scored, measured = halves(prompts_of(noise, 128 if quick else 4096))
        few = scored[: 64 if quick else 256]
        for name in shipped(noise, SEVERAL).values():
            frame, pairs[name] = best_choice(name, few, measured)
            frames.append(frame)
    over = {"prompts": len(measured), "selection": "chosen on other prompts, one split"}
    claim = record("sparse-C11-every-choice", pairs, over=over, note=NOTE)
    return Measured(pd.concat(frames), claims=[claim])
