"""Probability of each pattern at the end of training over random seeds, with its 95% interval.

    python -m analyses.softmax.emergence          (two hours on one core; resumes if stopped) python
    -m analyses.softmax.emergence --quick  (about a minute, 16 seeds, a tenth of the steps)

Trains the softmax paper's setting from many seeds, in packs of 128 heads, and classifies each model
at several steps. Writes results/softmax_emergence_seeds.csv (one row per arm, seed and step,
appended pack by pack) and softmax_emergence.csv (the fractions). Arms: "adam" is the paper's
training for 30,000 steps; "small init" starts from a tenth of the initial weights; "sgd" takes
plain gradient steps; "stuck" continues the first 16 two-head seeds that have one sign after 30,000
steps to 500,000 steps. The paper (He et al. 2025, arXiv 2503.12734) says that its pattern
consistently appears."""

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.lib import Measured, Record, record
from analyses.lib.measured import parsed, parser_of, write
from mechinterp import ExperimentConfig, classify, override, preset
from mechinterp.models.weights import Weights
from mechinterp.training.one_layer.step import Pack

AT, LATE, HEADS = (2_500, 5_000, 10_000, 20_000, 30_000), (30_000, 100_000, 200_000, 500_000), 128
SGD_RATE = 0.1
# Arm, number of heads, number of seeds.
JOBS = [
    ("adam", 2, 512),
    ("adam", 3, 256),
    ("adam", 4, 256),
    ("adam", 8, 128),
    ("small init", 2, 128),
    ("sgd", 2, 128),
    ("stuck", 2, 16),
]
QUICK = [("adam", 2, 16)]


class PlainDescent(Pack):
    """A pack that takes plain gradient steps instead of Adam's."""

    def update(self) -> None:
        self.flat -= SGD_RATE * self.gradient


def pack_rows(pack: Pack, arm: str) -> list[dict]:
    """One row per model with its state at this step."""
    task, n_heads = pack.config.task, pack.config.model.n_heads
    rows = []
    for index, (name, config) in enumerate(pack.models.items()):
        weights = pack.weights[slice(index * n_heads, (index + 1) * n_heads)]
        found = classify(weights, task=task)
        active = [label for label in found.labels if label != "dummy"]
        row = {"arm": arm, "n_heads": n_heads, "seed": config.seed, "step": pack.step}
        row |= {"pattern": found.label, "one_sign": one_sign(weights, found.labels)}
        row |= {"active": len(active), "dummies": n_heads - len(active)}
        row["eval_loss"] = pack.rows["eval_loss"][-1][index].item()
        rows.append(row | {"substitution_r2": found.substitution.r2})
        assert name == str(config.seed)
    return rows


def one_sign(weights: Weights, labels: tuple[str, ...]) -> bool:
    """True if omega and mu of all active heads have one sign, whatever their structure."""
    used = torch.tensor([label != "dummy" for label in labels])
    omega, mu = weights.omega.mean(1)[used], weights.mu[used, 0]
    return bool(used.any()) and len({*omega.sign().tolist(), *mu.sign().tolist()}) == 1


def fractions(rows: pd.DataFrame) -> pd.DataFrame:
    """Fraction of seeds with each pattern, with one sign, or with a dummy head, with Wilson
    intervals."""
    patterns = ("debiased_gd", "kernel_regression", "undetermined", "unstructured")
    kinds = {name: rows.pattern == name for name in patterns}
    kinds |= {"one sign": rows.one_sign, "a dummy head": rows.dummies > 0}
    found = []
    for (arm, n_heads, step), group in rows.groupby(["arm", "n_heads", "step"]):
        for kind, chosen in kinds.items():
            count, n = int(chosen[group.index].sum()), len(group)
            interval = binomtest(count, n).proportion_ci(method="wilson")
            row = {"arm": arm, "n_heads": n_heads, "step": step, "what": kind}
            row |= {"seeds": n, "count": count}
            found.append(row | {"fraction": count / n, "low": interval.low, "high": interval.high})
    return pd.DataFrame(found)


def train(configs: list[ExperimentConfig], arm: str, at: list[int]) -> pd.DataFrame:
    """Rows of one pack."""
    pack = (PlainDescent if arm == "sgd" else Pack)({str(c.seed): c for c in configs})
    if arm == "small init":
        pack.flat.mul_(0.1)
    rows = []
    while not pack.finished:
        pack.advance()
        if pack.step in at:
            rows += pack_rows(pack, arm)
    return pd.DataFrame(rows)


def seeds_of(arm: str, count: int, rows: pd.DataFrame) -> list[int]:
    """Seeds of an arm: 0, 1, ...; or for "stuck" the first ones with one sign after 30,000 steps."""
    if arm != "stuck":
        return list(range(count))
    ended = rows[(rows.arm == "adam") & (rows.n_heads == 2) & (rows.step == AT[-1])]
    return sorted(ended.seed[ended.one_sign.astype(bool)])[:count]


def records(table: pd.DataFrame) -> list[Record]:
    """Records of how often seeds end as the paper says, for every arm that has run."""
    last = table.groupby(["arm", "n_heads", "what"], sort=False).last()
    found = []
    for arm, n_heads in last.index.droplevel("what").unique():
        name = f"{arm.replace(' ', '-')}-h{n_heads}"
        seeds, step = last.loc[arm, n_heads, "one sign"][["seeds", "step"]].astype(int)
        over = {"seeds": int(seeds), "steps": int(step)}
        kinds = {"signs": "one sign"} | ({"dummy": "a dummy head"} if n_heads > 2 else {})
        for kind, what in kinds.items():
            one = last.loc[arm, n_heads, what]
            id, value = f"softmax-emergence-{kind}-{name}", {"share": one.fraction}
            found.append(record(id, value, text=share(one), over=over))
    return found


def share(row: pd.Series) -> str:
    """A count with its share and 95% interval."""
    interval = f"{row.low:.1%} to {row.high:.1%}"
    return f"{int(row['count'])} of {int(row.seeds)} seeds: {row.fraction:.1%} ({interval})"


def main() -> None:
    arguments = parsed(parser_of(__doc__, quick="16 seeds of two heads, 3,000 steps"))
    scale = 10 if arguments.quick else 1
    file = arguments.out / "softmax_emergence_seeds.csv"
    rows = pd.read_csv(file) if file.exists() else pd.DataFrame(columns=["arm", "n_heads", "seed"])
    for arm, n_heads, count in QUICK if arguments.quick else JOBS:
        at = [step // scale for step in (LATE if arm == "stuck" else AT)]
        every = np.gcd.reduce(at)
        base = override(
            preset(f"softmax-h{n_heads}"), f"train.steps={at[-1]}", f"train.log_every={every}"
        )
        done = set(rows.seed[(rows.arm == arm) & (rows.n_heads == n_heads)])
        remaining = [seed for seed in seeds_of(arm, count, rows) if seed not in done]
        size = HEADS // n_heads
        for start in range(0, len(remaining), size):
            seeds = remaining[start : start + size]
            found = train([override(base, f"seed={seed}") for seed in seeds], arm, at)
            rows = pd.concat([rows, found]) if len(rows) else found
            rows.to_csv(file, index=False, float_format="%.6g")
            print(
                f"{arm}, {n_heads} heads: {start + len(seeds)} of {len(remaining)} seeds",
                flush=True,
            )
    table = fractions(rows.reset_index(drop=True))
    write(Measured(table, claims=records(table)), "softmax_emergence", arguments.out)


if __name__ == "__main__":
    main()
