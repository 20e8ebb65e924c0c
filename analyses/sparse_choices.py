"""C11 of sparse regression once more: every choice of one head in each later layer, not the best by masking alone.

Where the heads of a layer are alike, which one masking calls the best is chance. The choice that is best on a few
hundred prompts is measured on others. All heads of layer 1 are kept.
Run: python analyses/sparse_choices.py (two minutes; --quick seconds)
"""

from itertools import product

import numpy as np
import pandas as pd
from measured import Claim, Measured, run
from sparse_models import SEVERAL, prompts_of, trained
from sparse_setting import each, ratio

from mechinterp.analysis.head_sets import halves
from mechinterp.analysis.masking import masked_errors


def choices(name: str) -> list[tuple[int, ...]]:
    """The head kept in the second, third, ... layer."""
    model = trained(name).config.model
    return list(product(range(model.n_heads), repeat=model.n_layers - 1))


def masked(name: str, choice: tuple[int, ...]) -> list[tuple[int, int]]:
    """The heads that such a choice lets go."""
    n_heads = trained(name).config.model.n_heads
    return [(at, h) for at, one in enumerate(choice, 1) for h in range(n_heads) if h != one]


def measure(quick: bool) -> Measured:
    scored, measured = halves(prompts_of(128 if quick else 4096))
    frames, claims = [], []
    for name in SEVERAL:
        model, every = trained(name).model, choices(name)
        few = scored[: 64 if quick else 256]
        errors = masked_errors(model, few, [masked(name, choice) for choice in every])
        risk = errors.mean(0)
        best = every[int(risk.argmin())]
        kept = masked_errors(model, measured, [[], masked(name, best)])
        value = ratio(kept[:, 1], kept[:, 0])
        sems = errors.std(0, ddof=1) / np.sqrt(len(errors))
        frames.append(pd.DataFrame(every, columns=["L1", "L2", "L3"]).assign(model=name, risk=risk, risk_sem=sems))  # fmt: skip
        claims.append(Claim("C11", f"the best of all {len(every)} choices of one head in each later layer will do: risk at most 1.25 times", name, "preserved", each({"ratio": value}, 2), value[0] <= 1.25))  # fmt: skip
    return Measured(pd.concat(frames), claims=claims)


if __name__ == "__main__":
    run(measure, __file__)
