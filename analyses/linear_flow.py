"""Linear attention: how often does the loss drop, where does it rest, in which order and when?

    python analyses/linear_flow.py  (40 seconds; --quick takes 10, with 2 seeds)

Trains merged heads (8) and separate rank-one heads (5) by exact gradient flow on the population, eigenvalues 0.4,
0.3, 0.2, 0.1 and N 31, and compares every run with its levels, its principal component regression and the jumps
foretold from its initial weights (results/linear_drops.csv); runs stop 1e-8 above the least loss. Then times how
long heads (9) of rank 1, 2, 4, 8 stay at each level in 8 dimensions, eigenvalues 8 to 1 over 36, for two sizes of
initial weights (results/linear_ranks.csv). Times are in tau; initial weights are drawn from N(0, init^2). The paper
is Zhang, Singh, Latham, Saxe 2025, arXiv 2501.16265.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from mechinterp.analysis.plateaus import Plateaus, crossings, plateaus
from mechinterp.theory.linear import Moments, modes, population_moments
from mechinterp.theory.linear_heads import Heads, merged_heads, separate_heads
from mechinterp.theory.linear_jumps import long_levels
from mechinterp.training.flow import Flow, flow

OUT = Path(__file__).parent / "results"
FOUR = population_moments(np.array([0.4, 0.3, 0.2, 0.1]), context_length=31)
EIGHT = population_moments(np.arange(8, 0, -1) / 36, context_length=31)
INITS = (1e-2, 1e-3)
RANKS = (1, 2, 4, 8)


def trained(heads: Heads, moments: Moments, gap: float = 1e-8) -> Flow:
    return flow(heads, moments, duration=1e9, until_loss=modes(moments).levels[-1] + gap)


def misalignment(found: Plateaus) -> float:
    """Median of 1 - |cosine| between e_m and the key and query of the head that holds it, over plateaus."""
    misses = []
    for row in range(1, len(found.loss)):
        head = np.abs(found.value[row] * found.key_cosine[row, :, 0, row - 1]).argmax()
        misses.append(1 - np.abs(found.key_cosine[row, head, 0, row - 1]))
        misses.append(1 - np.abs(found.query_cosine[row, head, 0, row - 1]))
    return float(np.median(misses))


def drop_row(heads: Heads, moments: Moments) -> dict[str, float]:
    run = trained(heads, moments)
    found = plateaus(run, moments)
    # Learned in order: at every rest the learned directions are the first ones.
    half = found.learned > 0.5
    row = {
        "drops": len(found.drop_time),
        "end_gap": found.loss[-1] - found.levels[-1],
        "level_gap": np.abs(found.loss - found.level).max(),
        "in_order": bool(np.all(half == (np.arange(half.shape[1]) < half.sum(1)[:, None]))),
        "first_jump": found.crossing_time[0],
        "pcr_distance": found.pcr_distance.max(),
    }
    if found.predicted.time.size:
        errors = found.predicted.time / found.crossing_time - 1
        row["misalignment"] = misalignment(found)
        row |= {f"jump_error_{number}": value for number, value in enumerate(errors, 1)}
    return row


def rank_rows(rank: int, init: float, seed: int) -> list[dict[str, float]]:
    levels = modes(EIGHT).levels
    run = trained(separate_heads(9, 8, std=init, seed=seed, rank=rank), EIGHT, gap=1e-4)
    stay = np.diff(crossings(run, levels), prepend=0.0)
    divides = long_levels(modes(EIGHT), rank=rank)
    return [
        {"rank": rank, "init": init, "seed": seed, "level": level, "loss": levels[level]}
        | {"divides": level in divides, "residence": time}
        for level, time in enumerate(stay)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 seeds instead of 10")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    seeds = range(2 if arguments.quick else 10)
    rows = []
    for init in INITS:
        for seed in seeds:
            made: dict[str, Heads] = {
                "merged": merged_heads(8, 4, std=init, seed=seed),
                "separate": separate_heads(5, 4, std=init, seed=seed),
            }
            for name, heads in made.items():
                row = {"heads": name, "init": init, "seed": seed}
                rows.append(row | drop_row(heads, FOUR))
    drops = pd.DataFrame(rows).sort_values(["heads", "init", "seed"])
    drops["first_jump_times_init"] = drops.first_jump * drops.init
    drops.to_csv(arguments.out / "linear_drops.csv", index=False, float_format="%.6g")
    kinds = drops.drop(columns="seed").groupby(["heads", "init"])
    print(kinds.agg(["min", "median", "max"]).T.to_string(float_format="{:.3g}".format))
    ranks = pd.DataFrame(
        [row for r in RANKS for init in INITS for seed in seeds for row in rank_rows(r, init, seed)]
    )
    ranks.to_csv(arguments.out / "linear_ranks.csv", index=False, float_format="%.6g")
    keys = ["rank", "seed", "level"]
    wide = ranks.pivot(index=keys, columns="init", values="residence")
    wide["ratio"] = wide[min(INITS)] / wide[max(INITS)]
    median = wide.groupby(["rank", "level"]).median().unstack("level")
    print(median.stack(0, future_stack=True).to_string(float_format="{:.3g}".format))


if __name__ == "__main__":
    main()
