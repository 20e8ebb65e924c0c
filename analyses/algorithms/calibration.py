"""Error rates of the labels of models of several layers, on models whose right label is known.

    python -m analyses.algorithms.calibration --seeds 3  (confirming half; about ten minutes on one core)
    python -m analyses.algorithms.calibration --seeds 30 --after  (families after the rules; about an hour)
    python -m analyses.algorithms.calibration --seeds 32 --family "weights: summed scores, exact"

The models and functions are those of analyses/algorithms/models.py. On the families of the tuning half, one seed each,
every limit is moved with the others at their defaults. The cost is five for a wrong label, and one for a model that must
get its label but stays undetermined. The other families (new_families.py) were not used to set a rule or a limit; their
labels are counted at the defaults. Models that analyses/results/algorithms already has are skipped; delete
algorithm_calibration_models.csv to start again. Writes algorithm_calibration_{models,moved,rates,limits}.csv there; the
second has the labels of the tuning half under moved limits, which the last counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from analyses.algorithms.models import AFTER, CONFIRMED_ONLY, FAMILIES, LATER, NONE, Case, cases
from analyses.lib.measured import parsed, parser_of
from mechinterp.analysis.multi_layer.naming import name_algorithm
from mechinterp.analysis.multi_layer.naming_result import Naming
from mechinterp.analysis.multi_layer.naming_rules import Limits, decide

NAME = "algorithms/algorithm_calibration"
TUNED, CONFIRMED = 0, 5
"""Seed of the tuning half, and first seed of the confirming half."""
MOVED = {
    "explained": (0.97, 0.99),
    "tie": (0.0025, 0.01),
    "rest": (0.5, 0.8, 0.95),
    "rest_of_function": (0.25, 0.75),
}
COST = {"right": 0, "undetermined": 0, "missed": 1, "wrong": 5}
PARTS = {
    "after": "families after the rules",
    "later": "later families",
    "confirming": "confirming half",
    "tuning": "tuning half",
}
ALIKE = ("gd_plus_plus", "newton")


def judged(case: Case, label: str) -> str:
    """Verdict on a label: right, wrong, missed (it should have been found) or undetermined."""
    open_path = label == "ridge_like" and case.truth in ALIKE
    if label in ("undetermined", "unstructured") or open_path:
        return "missed" if case.demand == "must" else "undetermined"
    return "right" if label == case.truth and case.demand != "none" else "wrong"


def moved_rows(case: Case, found: Naming) -> list[dict[str, object]]:
    """Rows of one model: the verdict on its label with one limit moved; the first row moves none."""
    moves = [("none", np.nan), *((name, value) for name in MOVED for value in MOVED[name])]
    rows = []
    for name, value in moves:
        limits = replace(Limits(), **{name: value}) if name in MOVED else Limits()
        verdict = judged(case, decide(found.measured, limits).label)
        model = {"family": case.family, "seed": case.seed}
        rows.append({**model, "limit": name, "value": value, "verdict": verdict})
    return rows


def moved_limits(moved: pd.DataFrame) -> pd.DataFrame:
    """Cost of the labels with one limit moved."""
    rows = []
    for (name, value), group in moved.groupby(["limit", "value"], sort=False, dropna=False):
        counts = {verdict: int((group.verdict == verdict).sum()) for verdict in COST}
        cost = sum(COST[verdict] * count for verdict, count in counts.items())
        rows.append({"limit": name, "value": value, "models": len(group), **counts, "cost": cost})
    return pd.DataFrame(rows)


def half_of(family: str) -> str:
    """Part of the calibration that a family belongs to."""
    if family in AFTER:
        return "after"
    if family in LATER:
        return "later"
    return "confirming" if family in CONFIRMED_ONLY else "tuning"


def row_of(case: Case, found: Naming) -> dict[str, object]:
    """A model's right label and its label."""
    return {
        "family": case.family,
        "seed": case.seed,
        "half": half_of(case.family),
        "truth": case.truth,
        "demand": case.demand,
        "label": found.label,
        "verdict": judged(case, found.label),
        "frequency": max(found.frequency.values()),
        "n_prompts": found.n_prompts,
        "reason": found.reason.partition("; next")[0],
    }


def known_rows(file: Path, name: str) -> set[tuple[str, int]]:
    """Pairs of name and seed that a file already has."""
    if not file.exists():
        return set()
    return set(pd.read_csv(file)[[name, "seed"]].itertuples(index=False, name=None))


def append(file: Path, row: dict[str, object]) -> None:
    table = pd.DataFrame([row])
    table.to_csv(file, mode="a", header=not file.exists(), index=False, float_format="%.6g")


def ask(chosen: Sequence[Case], files: Mapping[str, Path], until: float) -> None:
    """Name the models that a file does not have, until a time; a row for each is appended."""
    for case in chosen:
        if monotonic() > until or (case.family, case.seed) in known_rows(files["models"], "family"):
            continue
        found = name_algorithm(case.source, task=case.task, seed=case.seed)
        if case.seed == TUNED and half_of(case.family) == "tuning":
            for row in moved_rows(case, found):
                append(files["moved"], row)
        append(files["models"], row_of(case, found))
        print(case.family, case.seed, case.truth, found.label, sep=" | ", flush=True)


def rates(models: pd.DataFrame) -> pd.DataFrame:
    """Wrong and missed labels with Wilson intervals: for both halves, for near misses and
    algorithms in each, and by family of the confirming half."""
    groups = []
    for half, name in PARTS.items():
        of_half = models[models.half == half]
        near = of_half.truth == NONE
        groups += [(name, of_half), (f"{name}, near misses", of_half[near])]
        groups.append((f"{name}, algorithms", of_half[~near]))
    groups += models[models.half != "tuning"].groupby("family")
    rows = []
    for family, group in groups:
        wrong, n = int((group.verdict == "wrong").sum()), len(group)
        interval = binomtest(wrong, n).proportion_ci(method="wilson") if n else None
        counts = {name: int((group.verdict == name).sum()) for name in COST}
        must = int((group.demand == "must").sum())
        row = {"family": family, "families": group.family.nunique(), "models": n, "must": must}
        row |= counts
        if interval is not None:
            row |= {"wrong_rate": wrong / n, "low": interval.low, "high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def rates_table(results: Path) -> str:
    """Table of error rates on docs/results/algorithms.md."""
    table = pd.read_csv(results / f"{NAME}_rates.csv")
    lines = ["| models and functions | families | labelled | wrong name | 95% interval | missed |"]
    lines.append("|---|---|---|---|---|---|")
    for row in table[: 3 * len(PARTS)].itertuples():
        missed = f"{row.missed} of {row.must}" if row.must else ""
        lines.append(
            f"| {row.family} | {row.families} | {row.models} | {row.wrong} ({row.wrong_rate:.1%}) "
            f"| {row.low:.1%} to {row.high:.1%} | {missed} |"
        )
    return "\n".join(lines)


def named_table(results: Path) -> str:
    """Table of wrong names among the named models of the families after the rules, by label."""
    models = pd.read_csv(results / f"{NAME}_models.csv")
    models = models[(models.half == "after") & ~models.label.isin(["undetermined", "unstructured"])]
    lines = ["| label | named | wrong | 95% interval |", "|---|---|---|---|"]
    for label, group in [*models.groupby("label"), ("all", models)]:
        wrong = int((group.verdict == "wrong").sum())
        interval = binomtest(wrong, len(group)).proportion_ci(method="exact")
        name = label if label == "all" else f"`{label}`"
        lines.append(
            f"| {name} | {len(group)} | {wrong} | {interval.low:.1%} to {interval.high:.1%} |"
        )
    return "\n".join(lines)


def limits_table(results: Path) -> str:
    """Table of moved limits on docs/results/algorithms.md."""
    table = pd.read_csv(results / f"{NAME}_limits.csv")
    lines = [
        "| limit moved | right | undetermined | missed | wrong | cost |",
        "|---|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        moved = "none" if np.isnan(row.value) else f"`{row.limit}` to {row.value:g}"
        lines.append(
            f"| {moved} | {row.right} | {row.undetermined} | {row.missed} | {row.wrong} | {row.cost} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of confirming models per family"
    )
    parser.add_argument("--family", help="only this family")
    parser.add_argument("--after", action="store_true", help="only families after the rules")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit")
    arguments = parsed(parser)
    names = ("models", "moved", "rates", "limits")
    files = {name: arguments.out / f"{NAME}_{name}.csv" for name in names}
    files["models"].parent.mkdir(parents=True, exist_ok=True)
    until = monotonic() + 60 * arguments.minutes
    every = AFTER if arguments.after else (*CONFIRMED_ONLY, *LATER)
    wanted = every if arguments.family is None else (arguments.family,)
    ask(cases(range(CONFIRMED, CONFIRMED + arguments.seeds), wanted), files, until)
    if arguments.family is None and not arguments.after:
        ask(cases([TUNED], [each for each in FAMILIES if half_of(each) == "tuning"]), files, until)
        limits = moved_limits(pd.read_csv(files["moved"]))
        limits.to_csv(files["limits"], index=False, float_format="%.6g")
    models = pd.read_csv(files["models"])
    table = rates(models)
    table.to_csv(files["rates"], index=False, float_format="%.6g")
    print(rates_table(arguments.out))
    print(models[models.verdict.isin(["wrong", "missed"])].to_string())


if __name__ == "__main__":
    main()
