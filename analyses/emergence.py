"""What random seeds end as: the probability of each pattern at the end of training, with its 95% interval.

    python analyses/emergence.py          (hours on one core; goes on where it was stopped)
    python analyses/emergence.py --quick  (about a minute, 16 seeds of two heads and a tenth of the steps)

Trains the softmax paper's setting for 30,000 steps from many seeds, in packs of 128 heads, classifies each model at
several steps and writes analyses/results/emergence_seeds.csv (a row per seed and step, added pack by pack) and
emergence.csv (the fractions). The paper (He et al. 2025, arXiv 2503.12734) says its pattern consistently appears.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from scipy.stats import binomtest

from mechinterp.analysis.patterns import classify
from mechinterp.config import ExperimentConfig, override, preset
from mechinterp.models.functional import AttentionWeights
from mechinterp.training.trainer import Pack

OUT = Path(__file__).parent / "results"
SEEDS = {2: 512, 3: 256, 4: 256, 8: 128}
STEPS, AT, HEADS = 30_000, (2_500, 5_000, 10_000, 20_000, 30_000), 128


def pack_rows(pack: Pack) -> list[dict]:
    """One row per model: what it is at this step."""
    task, n_heads = pack.config.task, pack.config.model.n_heads
    rows = []
    for index, (name, config) in enumerate(pack.models.items()):
        weights = pack.weights[slice(index * n_heads, (index + 1) * n_heads)]
        found = classify(weights, task)
        active = [label for label in found.labels if label != "dummy"]
        rows.append(
            {
                "n_heads": n_heads,
                "seed": config.seed,
                "step": pack.step,
                "pattern": found.pattern,
                "one_sign": one_sign(weights, found.labels),
                "active": len(active),
                "dummies": n_heads - len(active),
                "eval_loss": pack.rows["eval_loss"][-1][index].item(),
                "substitution_r2": found.substitution.r2,
            }
        )
        assert name == str(config.seed)
    return rows


def one_sign(weights: AttentionWeights, labels: tuple[str, ...]) -> bool:
    """Whether omega and mu of all heads in use have one sign, whatever else the heads look like."""
    used = torch.tensor([label != "dummy" for label in labels])
    omega, mu = weights.omega.mean(1)[used], weights.mu[used, 0]
    return bool(used.any()) and len({*omega.sign().tolist(), *mu.sign().tolist()}) == 1


def fractions(rows: pd.DataFrame) -> pd.DataFrame:
    """Fraction of seeds that are each pattern, have one sign, or have a dummy, with Wilson intervals."""
    kinds = {
        "debiased_gd": rows.pattern == "debiased_gd",
        "kernel_regression": rows.pattern == "kernel_regression",
        "undetermined": rows.pattern == "undetermined",
        "unstructured": rows.pattern == "unstructured",
        "one sign": rows.one_sign,
        "a dummy head": rows.dummies > 0,
    }
    found = []
    for (n_heads, step), group in rows.groupby(["n_heads", "step"]):
        for kind, chosen in kinds.items():
            count, n = int(chosen[group.index].sum()), len(group)
            interval = binomtest(count, n).proportion_ci(method="wilson")
            row = {"n_heads": n_heads, "step": step, "what": kind, "seeds": n, "count": count}
            found.append(row | {"fraction": count / n, "low": interval.low, "high": interval.high})
    return pd.DataFrame(found)


def train(configs: list[ExperimentConfig], at: list[int]) -> pd.DataFrame:
    """The rows of one pack."""
    pack = Pack({str(config.seed): config for config in configs})
    rows = []
    while not pack.finished:
        pack.advance()
        if pack.step in at:
            rows += pack_rows(pack)
    return pd.DataFrame(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="16 seeds of two heads, 3,000 steps")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    scale = 10 if arguments.quick else 1
    file = arguments.out / "emergence_seeds.csv"
    rows = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["n_heads", "seed"])
    at = [step // scale for step in AT]
    for n_heads, count in {2: 16}.items() if arguments.quick else SEEDS.items():
        base = override(
            preset(f"softmax-h{n_heads}"), f"train.steps={at[-1]}", f"train.log_every={at[0]}"
        )
        done = set(rows.seed[rows.n_heads == n_heads])
        left = [seed for seed in range(count) if seed not in done]
        size = HEADS // n_heads
        for start in range(0, len(left), size):
            seeds = left[start : start + size]
            found = train([override(base, f"seed={seed}") for seed in seeds], at)
            rows = pd.concat([rows, found]) if len(rows) else found
            rows.to_csv(file, index=False, float_format="%.6g")
            print(f"{n_heads} heads: {seeds[-1] + 1} of {count} seeds", flush=True)
    rows = rows.reset_index(drop=True)
    table = fractions(rows)
    table.to_csv(arguments.out / "emergence.csv", index=False, float_format="%.6g")
    last = table[table.step == at[-1]]
    print(last.to_string(index=False))


if __name__ == "__main__":
    main()
