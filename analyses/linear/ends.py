"""Quantities that training conserves, and final losses of merged heads and of separate heads of any
rank.

Zhang et al. 2025, arXiv 2501.16265, section 4 and appendix E.8: heads and ranks on four directions,
N(0, 0.01^2).
Run: python -m analyses linear/ends (half a minute; --quick 1 seed)"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from analyses.lib import Measured, records
from analyses.lib.theory.linear import conserved
from analyses.linear.setting import FOUND, MOMENTS, named, separate, trained
from mechinterp.theory.linear import merged_heads, separate_heads
from mechinterp.training.linear import flow

# Number of heads and rank.
SHAPES = (*((n, 1) for n in range(1, 6)), *((n, 2) for n in range(1, 4)))
SHAPES += ((1, 3), (3, 3), (1, 4), (2, 4))


def ends(seed: int) -> list[dict[str, float | str]]:
    """Final losses of heads of all shapes, with the level of their number."""
    law, made = {"std": 1e-2, "seed": seed}, {}
    for n, rank in SHAPES:
        made[f"{n} of rank {rank}"] = separate_heads(n, 4, rank=rank, **law), min(n * rank, 4)
    made["8 merged"] = merged_heads(8, 4, **law), 4
    rows = []
    for name, (heads, number) in made.items():
        loss = flow(heads, MOMENTS, duration=1e6).loss[-1]
        row = {"heads": name, "seed": seed, "learned": number}
        rows.append(row | {"loss": loss, "level": FOUND.levels[number]})
    return rows


def drift(kept: Iterable[np.ndarray]) -> float:
    """Largest change of the conserved quantities."""
    return max(np.abs(quantity - quantity[0]).max() for quantity in kept)


def measure(quick: bool) -> Measured:
    seeds = range(1 if quick else 5)
    merged = [trained(merged_heads(8, 4, std=1e-2, seed=seed)) for seed in seeds]
    drifts = {
        "merged": [drift(conserved(one.heads)) for one in merged],
        "separate": [drift(conserved(separate(1e-2, seed)[0].heads)) for seed in seeds],
    }
    data = pd.DataFrame([row for seed in seeds for row in ends(seed)])
    data["off"] = (data.loss - data.level).abs()
    asked = {f"6-{kind}": named(np.array(one), "seed") for kind, one in drifts.items()}
    for name, part in (("whole", data[data.learned == 4]), ("part", data[data.learned < 4])):
        asked[f"17-{name}"] = part.groupby("heads").off.max()
    return Measured(data, claims=records("linear-", asked))
