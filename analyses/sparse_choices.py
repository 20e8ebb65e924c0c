"""C11 of sparse regression once more: every choice of one head in each later layer, not the best by masking alone.

Where the heads of a layer are alike, which one masking calls the best is chance. The choice that is best on a few
hundred prompts is measured on others. All heads of layer 1 are kept.
Run: python analyses/sparse_choices.py (two minutes; --quick seconds)
"""

from itertools import product

import numpy as np
import pandas as pd
from measured import Claim, Measured, run
from sparse_models import (  # fmt: skip
    NOISES,
    SEVERAL,
    named,
    over_seeds,
    prompts_of,
    seeds,
    trained,
    verdict,
)
from sparse_setting import each, ratio

from mechinterp.analysis.heads.errors import masked_errors
from mechinterp.analysis.heads.pairs import halves
from mechinterp.icl.prompts import Prompts

LATER = 3  # layers after the first


def masked(n_heads: int, choice: tuple[int, ...]) -> list[tuple[int, int]]:
    """The heads that go when of each later layer one is kept."""
    return [(at, h) for at, one in enumerate(choice, 1) for h in range(n_heads) if h != one]


def best_choice(heads: int, noise: float, seed: int, scored: Prompts, measured: Prompts) -> tuple[pd.DataFrame, tuple[float, float]]:  # fmt: skip
    """Risk of every choice, and that of the best over the full model's on other prompts."""
    model, every = trained(named(heads, noise, seed)).model, list(product(range(heads), repeat=LATER))  # fmt: skip
    errors = masked_errors(model, scored, [masked(heads, choice) for choice in every])
    risk, sems = errors.mean(0), errors.std(0, ddof=1) / np.sqrt(len(errors))
    kept = masked_errors(model, measured, [[], masked(heads, every[int(risk.argmin())])])
    frame = pd.DataFrame(every, columns=["L1", "L2", "L3"])
    return frame.assign(model=named(heads, noise, seed), risk=risk, risk_sem=sems), ratio(kept[:, 1], kept[:, 0])  # fmt: skip


def measure(quick: bool) -> Measured:
    frames, claims = [], []
    for noise, heads in product(NOISES, SEVERAL):
        scored, measured = halves(prompts_of(noise, 128 if quick else 4096))
        values = {}
        for seed in seeds(noise):
            frame, values[f"s{seed}"] = best_choice(heads, noise, seed, scored[: 64 if quick else 256], measured)  # fmt: skip
            frames.append(frame)
        held = verdict(value <= 1.25 for value, _ in values.values())
        claims.append(Claim("C11", f"the best of all {heads**LATER} choices of one head in each later layer will do: risk at most 1.25 times", over_seeds(heads, noise), "preserved", each(values, 2), held))  # fmt: skip
    return Measured(pd.concat(frames), claims=claims)


if __name__ == "__main__":
    run(measure, __file__)
