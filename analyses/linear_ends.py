"""What training conserves, and the losses at which merged heads and separate ones of any rank end.

Zhang et al. 2025, arXiv 2501.16265, section 4 and appendix E.8: heads and ranks on four directions, N(0, 0.01^2).
Run: python analyses/linear_ends.py (half a minute; --quick 1 seed)
"""

import numpy as np
import pandas as pd
from linear_setting import FOUND, MOMENTS, separate, trained
from measured import Claim, Measured, run

from mechinterp import figures
from mechinterp.theory.linear_heads import merged_heads, separate_heads
from mechinterp.training.flow import flow

# Heads and rank.
SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (1, 2), (2, 2), (3, 2), (1, 3), (3, 3), (1, 4), (2, 4))  # fmt: skip


def ends(seed: int) -> list[dict[str, float | str]]:
    """Where heads of all shapes end, and the level of their number."""
    made = {f"{n} of rank {rank}": (separate_heads(n, 4, std=1e-2, seed=seed, rank=rank), min(n * rank, 4)) for n, rank in SHAPES}  # fmt: skip
    made["8 merged"] = (merged_heads(8, 4, std=1e-2, seed=seed), 4)
    return [
        {"heads": name, "seed": seed, "learned": number, "loss": flow(heads, MOMENTS, duration=1e6).loss[-1], "level": FOUND.levels[number]}
        for name, (heads, number) in made.items()
    ]  # fmt: skip


def measure(quick: bool) -> Measured:
    seeds = range(1 if quick else 5)
    kept = [trained(merged_heads(8, 4, std=1e-2, seed=seed)).heads.conserved() for seed in seeds]
    kept += [quantity for seed in seeds for quantity in separate(1e-2, seed)[0].heads.conserved()]
    drift = max(np.abs(quantity - quantity[0]).max() for quantity in kept)
    data = pd.DataFrame([row for seed in seeds for row in ends(seed)])
    off, whole = (data.loss - data.level).abs(), data.learned == 4
    claims = [
        Claim("L-6", "v v^T - U U^T, and K K^T - Q Q^T and v^2 - tr K K^T of every head, drift by less than 1e-8", f"8 merged, 5 separate heads, {len(seeds)} seeds", "conserved", f"at most {drift:.0e}", bool(drift < 1e-8)),
        Claim("L-17", "merged and separate heads of every rank end at L(M_D) if R H >= D, within 1e-5", f"{data[whole].heads.nunique()} shapes, {len(seeds)} seeds", "the same loss", f"within {off[whole].max():.0e}", bool(off[whole].max() < 1e-5)),
        Claim("L-17", "and at L(M_RH) if R H < D", f"{data[~whole].heads.nunique()} shapes, {len(seeds)} seeds", "not asked", f"within {off[~whole].max():.0e}", bool(off[~whole].max() < 1e-5)),
    ]  # fmt: skip
    first = data[data.seed == 0]
    curves = {"loss": first.loss.to_numpy(), "level": first.level.to_numpy()}
    page = figures.bars(list(first.heads), curves, errors={name: np.zeros(len(first)) for name in curves}, title="Loss at the end of training, and the level of R H directions", y_title="loss (y²)")  # fmt: skip
    return Measured(data, {"ends": page}, claims)


if __name__ == "__main__":
    run(measure, __file__)
