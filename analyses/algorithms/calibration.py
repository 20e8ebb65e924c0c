"""How often the label of a model of several layers is wrong: on models whose right label is known.

    python -m analyses.algorithms.calibration          (about ten minutes on one core)
    python -m analyses.algorithms.calibration --seeds 3  (of the confirming half; one if it is not said)

The models and functions are those of analyses/algorithms/models.py. On one seed every limit is moved, the others at
their defaults, and its cost is counted: five for a wrong label, one for a model that must get its
label and is left undetermined. On other seeds, and on as many families of near misses again, the labels at the
defaults are counted. No trained model is among them. Writes
analyses/results/algorithms/algorithm_calibration_{models,rates,limits}.csv.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.algorithms.models import CONFIRMED_ONLY, Case, cases
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_labels import AlgorithmLimits, decide

ROOT = Path(__file__).parents[2]
TUNED, CONFIRMED = range(1), 5
"""Seeds of the tuning half, and the first of the confirming one."""
MOVED = {
    "explained": (0.97, 0.99),
    "tie": (0.0025, 0.01),
    "rest": (0.5, 0.8, 0.95),
    "held": (0.3, 0.7),
    "followed": (0.8, 0.95),
}
COST = {"right": 0, "undetermined": 0, "missed": 1, "wrong": 5}
ALIKE = ("gd_plus_plus", "newton")
Known = tuple[Case, AlgorithmEvidence]


def judged(case: Case, label: str) -> str:
    """What a label is worth: right, wrong, missed (it must have been found) or undetermined."""
    open_path = label == "ridge_like" and case.truth in ALIKE
    if label in ("undetermined", "unstructured") or open_path:
        return "missed" if case.demand == "must" else "undetermined"
    return "right" if label == case.truth and case.demand != "none" else "wrong"


def measured(chosen: Sequence[Case]) -> list[Known]:
    """The evidence on each model."""
    found = []
    for case in chosen:
        found.append((case, name_algorithm(case.source, task=case.task, seed=case.seed)))
        print(case.family, case.seed, case.truth, found[-1][1].label, sep=" | ", flush=True)
    return found


def moved_limits(tuning: Sequence[Known]) -> pd.DataFrame:
    """What labels of the prompts as they are cost with one limit moved, first with none."""
    defaults, rows = AlgorithmLimits(), []
    moves = [("none", np.nan), *((name, value) for name in MOVED for value in MOVED[name])]
    for name, value in moves:
        limits = defaults if name == "none" else replace(defaults, **{name: value})
        verdicts = [judged(case, decide(found.measured, limits).label) for case, found in tuning]
        counts = {verdict: verdicts.count(verdict) for verdict in COST}
        cost = sum(COST[verdict] * count for verdict, count in counts.items())
        rows.append({"limit": name, "value": value, "models": len(tuning), **counts, "cost": cost})
    return pd.DataFrame(rows)


def table_of(known: Sequence[Known], half: str) -> pd.DataFrame:
    """A row per model: its right label and its label."""
    rows = [
        {
            "family": case.family,
            "seed": case.seed,
            "half": half,
            "truth": case.truth,
            "demand": case.demand,
            "label": found.label,
            "verdict": judged(case, found.label),
            "frequency": found.frequency[0],
            "n_prompts": found.n_prompts,
        }
        for case, found in known
    ]
    return pd.DataFrame(rows)


def rates(models: pd.DataFrame) -> pd.DataFrame:
    """Wrong labels and misses of the confirming half with Wilson intervals, in all and by family."""
    confirming = models[models.half == "confirming"]
    groups = [("all", confirming), *confirming.groupby("family", sort=False)]
    rows = []
    for family, group in groups:
        wrong, n = int((group.verdict == "wrong").sum()), len(group)
        interval = binomtest(wrong, n).proportion_ci(method="wilson")
        counts = {name: int((group.verdict == name).sum()) for name in COST}
        must = int((group.demand == "must").sum())
        row = {"family": family, "models": n, "must": must, **counts, "wrong_rate": wrong / n}
        rows.append(row | {"low": interval.low, "high": interval.high})
    return pd.DataFrame(rows)


def sentence(table: pd.DataFrame) -> str:
    """What docs/algorithms.md quotes of the rates."""
    row = table[table.family == "all"].iloc[0]
    return (
        f"Of {row.models} built models and functions, {row.wrong} got a wrong label: "
        f"{row.wrong_rate:.1%} ({row.low:.1%} to {row.high:.1%}); of {row.must} that must get their "
        f"label, {row.missed} did not."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="models of each family to confirm")
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results" / "algorithms")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    confirmed = range(CONFIRMED, CONFIRMED + arguments.seeds)
    confirming = measured(cases(confirmed))
    tuning = measured([case for case in cases(TUNED) if case.family not in CONFIRMED_ONLY])
    models = pd.concat([table_of(tuning, "tuning"), table_of(confirming, "confirming")])
    tables = {"models": models, "rates": rates(models), "limits": moved_limits(tuning)}
    for name, table in tables.items():
        file = arguments.out / f"algorithm_calibration_{name}.csv"
        table.to_csv(file, index=False, float_format="%.6g")
    print(sentence(tables["rates"]))
    print(tables["rates"].to_string(), tables["limits"].to_string(), sep="\n")
    print(models[models.verdict.isin(["wrong", "missed"])].to_string())


if __name__ == "__main__":
    main()
