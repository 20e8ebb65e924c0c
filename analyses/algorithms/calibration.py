"""How often the label of a model of several layers is wrong: on models whose right label is known.

    python -m analyses.algorithms.calibration --seeds 2  (of the confirming half; about ten minutes on one core)
    python -m analyses.algorithms.calibration --seeds 32 --family "weights: summed scores, exact"

The models and functions are those of analyses/algorithms/models.py. On one seed every limit is moved, the others at
their defaults, and its cost is counted: five for a wrong label, one for a model that must get its
label and is left undetermined. On other seeds, and on as many families of near misses again, the labels at the
defaults are counted. Models that the files in analyses/results/algorithms have already are not asked again: without
algorithm_calibration_models.csv all begins anew. Writes algorithm_calibration_{models,rates,limits}.csv there, the last once the tuning half has been asked in one run.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest

from analyses.algorithms.models import CONFIRMED_ONLY, NONE, Case, cases
from analyses.algorithms.unseen_misses import UNSEEN
from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.analysis.multi_layer.algorithm_evidence import AlgorithmEvidence
from mechinterp.analysis.multi_layer.algorithm_labels import AlgorithmLimits, Measured, decide
from mechinterp.analysis.multi_layer.algorithm_scores import Scores

ROOT = Path(__file__).parents[2]
NAME = "algorithms/algorithm_calibration"
TUNED, CONFIRMED = 0, 5
"""Seed of the tuning half, and the first of the confirming one."""
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


def mixtures_by_tie(measured: Measured) -> Measured:
    """The same where mixtures of two members must lead by as much as members, and no share of the rest will do."""

    def strict(scores: Scores) -> Scores:
        mixed = [name.startswith("a mixture of") for name in scores.names]
        each = zip(mixed, scores.allowance, strict=True)
        return replace(scores, allowance=tuple(-np.inf if yes else a for yes, a in each))

    path = None if measured.path is None else strict(measured.path)
    return replace(measured, function=strict(measured.function), path=path)


def moved_limits(tuning: Sequence[Known]) -> pd.DataFrame:
    """What labels of the prompts as they are cost with one limit moved, first with none."""
    defaults, rows = AlgorithmLimits(), []
    moves = [("none", np.nan), ("mixtures", defaults.tie)]
    moves += [(name, value) for name in MOVED for value in MOVED[name]]
    for name, value in moves:
        limits = replace(defaults, **{name: value}) if name in MOVED else defaults
        known = [(case, found.measured) for case, found in tuning]
        if name == "mixtures":
            known = [(case, mixtures_by_tie(measured)) for case, measured in known]
        verdicts = [judged(case, decide(measured, limits).label) for case, measured in known]
        counts = {verdict: verdicts.count(verdict) for verdict in COST}
        cost = sum(COST[verdict] * count for verdict, count in counts.items())
        rows.append({"limit": name, "value": value, "models": len(tuning), **counts, "cost": cost})
    return pd.DataFrame(rows)


def row_of(case: Case, found: AlgorithmEvidence) -> dict[str, object]:
    """A model's right label and its label."""
    return {
        "family": case.family,
        "seed": case.seed,
        "half": "tuning" if case.seed == TUNED else "confirming",
        "truth": case.truth,
        "demand": case.demand,
        "label": found.label,
        "verdict": judged(case, found.label),
        "frequency": found.frequency[0],
        "n_prompts": found.n_prompts,
        "reason": found.reason.partition("; next")[0],
    }


def known_rows(file: Path, name: str) -> set[tuple[str, int]]:
    """Names and seeds that a file has."""
    if not file.exists():
        return set()
    return set(pd.read_csv(file)[[name, "seed"]].itertuples(index=False, name=None))


def append(file: Path, row: dict[str, object]) -> None:
    table = pd.DataFrame([row])
    table.to_csv(file, mode="a", header=not file.exists(), index=False, float_format="%.6g")


def asked(chosen: Sequence[Case], file: Path, until: float) -> list[Known]:
    """The evidence on models that a file does not have, which gets a row for each, until a time."""
    answers = []
    for case in chosen:
        if monotonic() > until or (case.family, case.seed) in known_rows(file, "family"):
            continue
        found = name_algorithm(case.source, task=case.task, seed=case.seed)
        answers.append((case, found))
        append(file, row_of(case, found))
        print(case.family, case.seed, case.truth, found.label, sep=" | ", flush=True)
    return answers


def rates(models: pd.DataFrame) -> pd.DataFrame:
    """Wrong labels and misses of the confirming half with Wilson intervals: in all, of near misses, of those
    whose families no rule was set on, of those that were written last, and by family."""
    confirming = models[models.half == "confirming"]
    near = confirming[confirming.truth == NONE]
    groups = [
        ("all", confirming),
        ("near misses", near),
        ("near misses, no rule set on them", near[near.family.isin(CONFIRMED_ONLY)]),
        ("near misses, written after the rules", near[near.family.isin(UNSEEN)]),
        *confirming.groupby("family"),
    ]
    rows = []
    for family, group in groups:
        wrong, n = int((group.verdict == "wrong").sum()), len(group)
        interval = binomtest(wrong, n).proportion_ci(method="wilson") if n else None
        counts = {name: int((group.verdict == name).sum()) for name in COST}
        must = int((group.demand == "must").sum())
        row = {"family": family, "models": n, "must": must, **counts}
        if interval is not None:
            row |= {"wrong_rate": wrong / n, "low": interval.low, "high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def rates_table(results: Path) -> str:
    """What docs/algorithms.md shows of the rates."""
    table = pd.read_csv(results / f"{NAME}_rates.csv")
    lines = ["| models and functions | asked | wrong name | 95% interval | missed |"]
    lines.append("|---|---|---|---|---|")
    for row in table[:4].itertuples():
        missed = f"{row.missed} of {row.must}" if row.must else ""
        lines.append(
            f"| {row.family} | {row.models} | {row.wrong} ({row.wrong_rate:.1%}) "
            f"| {row.low:.1%} to {row.high:.1%} | {missed} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="models of each family to confirm")
    parser.add_argument("--family", help="one family alone")
    parser.add_argument("--minutes", type=float, default=1e6, help="when to stop")
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    files = {name: arguments.out / f"{NAME}_{name}.csv" for name in ("models", "rates", "limits")}
    files["models"].parent.mkdir(parents=True, exist_ok=True)
    until = monotonic() + 60 * arguments.minutes
    confirming = cases(range(CONFIRMED, CONFIRMED + arguments.seeds))
    confirming = [each for each in confirming if arguments.family in (None, each.family)]
    asked(confirming, files["models"], until)
    if arguments.family is None and monotonic() < until:
        seen = [case for case in cases([TUNED]) if case.family not in CONFIRMED_ONLY]
        tuning = asked(seen, files["models"], np.inf)
        if len(tuning) == len(seen):
            limits = moved_limits(tuning)
            limits.to_csv(files["limits"], index=False, float_format="%.6g")
    models = pd.read_csv(files["models"])
    table = rates(models)
    table.to_csv(files["rates"], index=False, float_format="%.6g")
    print(rates_table(arguments.out))
    print(models[models.verdict.isin(["wrong", "missed"])].to_string())


if __name__ == "__main__":
    main()
