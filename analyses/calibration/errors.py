"""How often the classifier's labels are wrong: on models whose right label is known.

    python -m analyses.calibration.errors          (about ten minutes on one core)
    python -m analyses.calibration.errors --quick  (about a minute, a tenth of the models)

Models are built with noise or faults of known size, drawn at random, or are snapshots of the
shipped ones (analyses/calibration/models.py). On one half every threshold is moved, the others at
their defaults, and its cost is counted: five for a wrong label, one for an undetermined model that
must get its label. On the other half the labels at the defaults are counted. Writes
analyses/results/calibration_{thresholds,labels,errors}.csv.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, replace

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from analyses.calibration.models import Case, built, leaking, near_misses, snapshots, untrained
from analyses.lib.measured import ROOT, parsed, parser_of, provenance
from analyses.lib.records import save
from mechinterp import classify
from mechinterp.analysis.one_layer.thresholds import Thresholds

MOVED = tomllib.loads((ROOT / "analyses" / "calibration" / "moved.toml").read_text())
COST = {"right": 0, "undetermined": 0, "missed": 1, "wrong": 5}


def verdict(case: Case, label: str) -> str:
    """What a label is worth: right, wrong, missed (it must have been found) or undetermined."""
    if label in ("undetermined", "unstructured"):
        return "missed" if case.demand == "must" else "undetermined"
    return "right" if label == case.truth and case.demand != "none" else "wrong"


def labels_of(cases: Iterable[Case], thresholds: Thresholds) -> list[str]:
    return [classify(case.weights, case.task, thresholds=thresholds).pattern for case in cases]


def counts(cases: list[Case], thresholds: Thresholds) -> dict[str, int]:
    """Verdicts and their cost."""
    verdicts = list(map(verdict, cases, labels_of(cases, thresholds)))
    found = {name: verdicts.count(name) for name in COST}
    return found | {"cost": sum(COST[name] for name in verdicts)}


def moved_thresholds(cases: list[Case]) -> pd.DataFrame:
    """One row per threshold and value: verdicts with the others at their defaults."""
    standard = Thresholds()
    rows = [{"threshold": "defaults", "value": np.nan, **counts(cases, standard)}]
    for name, values in MOVED.items():
        for value in values:
            row = {"threshold": name, "value": value, "default": asdict(standard)[name]}
            rows.append(row | counts(cases, replace(standard, **{name: value})))
    return pd.DataFrame(rows)


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Rate of wrong labels and of misses with Wilson intervals, by where the models come from and
    their truth."""
    rows = []
    for keys, group in frame.groupby(["source", "truth"]):
        wrong, n = int((group.verdict == "wrong").sum()), len(group)
        interval = binomtest(wrong, n).proportion_ci(method="wilson")
        row = dict(zip(("source", "truth"), keys, strict=True)) | {"models": n}
        row["must"] = int((group.demand == "must").sum())
        row |= {name: int((group.verdict == name).sum()) for name in COST}
        rows.append(row | {"wrong_rate": wrong / n, "low": interval.low, "high": interval.high})
    return pd.DataFrame(rows)


def halves(cases: list[Case], random: np.random.Generator) -> tuple[list[Case], list[Case]]:
    """Two random halves, the snapshots of one run all in one of them."""
    runs: dict[str, list[Case]] = {}
    for index, case in enumerate(cases):
        runs.setdefault(case.run or f"{index}", []).append(case)
    groups = list(runs.values())
    order = random.permutation(len(groups))
    first, second = ([case for i in order[half::2] for case in groups[i]] for half in (0, 1))
    return first, second


def main() -> None:
    arguments = parsed(parser_of(__doc__, quick="a tenth of the models"))
    scale, random = 10 if arguments.quick else 1, np.random.default_rng(0)
    cases = [
        *built(20 // scale, random),
        *leaking(20 // scale, random),
        *untrained(400 // scale, random),
        *near_misses(200 // scale, random),
        *snapshots(ROOT / "checkpoints", 2000 // scale),
    ]
    tuning, confirming = halves(cases, random)
    print(f"{len(cases)} models", flush=True)
    columns = ("source", "truth", "size", "demand")
    frame = pd.DataFrame([[getattr(case, name) for name in columns] for case in confirming])
    frame.columns = columns
    frame["label"] = labels_of(confirming, Thresholds())
    frame["verdict"] = list(map(verdict, confirming, frame["label"]))
    labels = frame.groupby(["truth", "label"]).size().unstack(fill_value=0)
    print(labels.to_string(), errors(frame).to_string(), sep="\n", flush=True)
    print(frame[frame.verdict == "wrong"].to_string(), flush=True)
    tables = {"labels": labels.reset_index(), "errors": errors(frame)}
    tables["thresholds"] = moved_thresholds(tuning)
    print(tables["thresholds"].to_string())
    for name, table in tables.items():
        file = arguments.out / f"calibration_{name}.csv"
        table.to_csv(file, index=False, float_format="%.6g")
    save(arguments.out, "calibration_errors", [], provenance(tables["errors"], [], None))


if __name__ == "__main__":
    main()
