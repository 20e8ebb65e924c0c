"""Figure 4: heads of rank 1, 2, 4 and 8 in eight dimensions have long plateaus at every R-th level.

Zhang et al. 2025, arXiv 2501.16265, figure 4: 9 heads, eigenvalues 8 to 1 over 36. Long and short
plateaus differ in their growth when the initial weights shrink from 1e-2 to 1e-3: long ones by a
factor of ten, short ones by a constant that a few decades hardly show. Run: python -m analyses
linear/figure_4_ranks (a minute; --quick 1 seed)"""

import numpy as np
import pandas as pd

from analyses.lib import Measured, Record, record
from analyses.lib.plateaus import crossings
from analyses.lib.theory.linear_jumps import long_levels
from analyses.linear.setting import INITS, LENGTH, losses, page, trained
from mechinterp.theory.linear import modes, population_moments, separate_heads

EIGHT = population_moments(np.arange(8, 0, -1) / 36, context_length=LENGTH)
MODES = modes(EIGHT)
RANKS = (1, 2, 4, 8)


def measure(quick: bool) -> Measured:
    return ranks(RANKS, 1 if quick else 10)


def ranks(chosen: tuple[int, ...], n_seeds: int) -> Measured:
    """Residence times at every level for several ranks, and the loss of one run for each rank."""
    stays, claims, shown = [], [], {}
    for rank in chosen:
        for init in INITS:
            for seed in range(n_seeds):
                found = trained(separate_heads(9, 8, std=init, seed=seed, rank=rank), EIGHT, 1e-4)
                shown.setdefault(f"rank {rank}", found)
                stay = np.diff(crossings(found, MODES.levels), prepend=0.0)
                row = {"rank": rank, "init": init, "seed": seed, "level": np.arange(8)}
                stays.append(pd.DataFrame(row | {"loss": MODES.levels[:8], "residence": stay}))
        claims += rank_claims(rank, pd.concat(stays).query("rank == @rank"))
    time = np.geomspace(100, max(found.time[-1] for found in shown.values()), 400)
    drawn = ", ".join(map(str, chosen))
    title = f"Heads of rank {drawn} in 8 dimensions, init {INITS[0]:g}; levels dotted"
    figure = page(time, losses(time, shown), title, levels=MODES.levels, log_x=True)
    return Measured(pd.concat(stays), {"loss": figure}, claims)


def rank_claims(rank: int, stays: pd.DataFrame) -> list[Record]:
    wide = stays.pivot(index="level", columns=["init", "seed"], values="residence")
    ratio = (wide[min(INITS)] / wide[max(INITS)]).median(axis=1).to_numpy()
    long = long_levels(MODES, rank=rank)[:-1]
    short = [level for level in range(8) if level not in long]
    levels = {"long": long, "short": short, "ten": long}
    return [
        record(f"linear-16-{name}-rank{rank}", {f"level {level}": ratio[level] for level in chosen})
        for name, chosen in levels.items()
        if len(chosen)
    ]
