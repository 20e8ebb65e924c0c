"""Error rates of the classifier's labels, on models whose right label is known.

    python -m analyses.calibration.errors               (about a minute on one core) python -m
    analyses.calibration.errors --thresholds  (two minutes more)

Models are built with noise or faults of known size, drawn at random, or are snapshots of training
(analyses/calibration/ models.py). The confirming models were drawn after the rules and thresholds
were fixed; their labels are counted at the defaults. `--thresholds` moves every threshold on
earlier models, with the others at their defaults, and counts the cost: five for a wrong label, one
for an undetermined model that must get its label. Writes analyses/results/calibration_*.csv."""

import tomllib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from analyses.calibration.models import Case, confirming, earlier
from analyses.lib.measured import ROOT, parsed, parser_of, provenance
from analyses.lib.records import save
from mechinterp import classify
from mechinterp.analysis.one_layer.thresholds import Thresholds

MOVED = tomllib.loads((ROOT / "analyses" / "calibration" / "moved.toml").read_text())
COST = {"right": 0, "undetermined": 0, "missed": 1, "wrong": 5}
ABOUT = ("source", "truth", "size", "demand")


def verdict(case: Case, label: str) -> str:
    """Verdict on a label: right, wrong, missed (it should have been found) or undetermined."""
    if label in ("undetermined", "unstructured"):
        return "missed" if case.demand == "must" else "undetermined"
    right = label in case.truth.split("|") and case.demand != "none"
    return "right" if right else "wrong"


def labels_of(cases: Iterable[Case], thresholds: Thresholds) -> list[str]:
    return [classify(case.weights, task=case.task, thresholds=thresholds).label for case in cases]


def labelled(cases: list[Case]) -> pd.DataFrame:
    """One row per model: its properties, its label under the defaults, and the verdict."""
    frame = pd.DataFrame([[getattr(case, name) for name in ABOUT] for case in cases])
    frame.columns = ABOUT
    frame["label"] = labels_of(cases, Thresholds())
    frame["verdict"] = list(map(verdict, cases, frame["label"]))
    return frame


def changed_labels(results: Path) -> list[str]:
    """A line for each confirming model whose recomputed label differs from the stored one."""
    stored = pd.read_csv(results / "calibration_models.csv")
    again = labelled(confirming())
    if len(again) != len(stored):
        return [f"calibration has {len(again)} confirming models, stored: {len(stored)}."]
    rows = zip(again.itertuples(), stored.itertuples(), strict=True)
    return [
        f"calibration model {new.Index} ({new.source}, {new.truth}) is {new.label}, stored: {old.label}."
        for new, old in rows
        if (new.source, new.truth, new.label) != (old.source, old.truth, old.label)
    ]


def moved_thresholds(cases: list[Case]) -> pd.DataFrame:
    """One row per threshold and value: verdicts with the other thresholds at their defaults."""
    standard = Thresholds()
    rows = [{"threshold": "defaults", "value": np.nan, **counts(cases, standard)}]
    for name, values in MOVED.items():
        for value in values:
            row = {"threshold": name, "value": value, "default": asdict(standard)[name]}
            rows.append(row | counts(cases, replace(standard, **{name: value})))
    return pd.DataFrame(rows)


def counts(cases: list[Case], thresholds: Thresholds) -> dict[str, int]:
    """Number of each verdict, and the cost."""
    verdicts = list(map(verdict, cases, labels_of(cases, thresholds)))
    found = {name: verdicts.count(name) for name in COST}
    return found | {"cost": sum(COST[name] for name in verdicts)}


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Verdicts by source and truth, and the fraction of wrong labels among named models, with
    Wilson's interval."""
    rows = []
    for keys, group in frame.groupby(["source", "truth"]):
        row = dict(zip(("source", "truth"), keys, strict=True)) | {"models": len(group)}
        row["must"] = int((group.demand == "must").sum())
        row |= {name: int((group.verdict == name).sum()) for name in COST}
        named = row["named"] = row["right"] + row["wrong"]
        if named:
            interval = binomtest(row["wrong"], named).proportion_ci(method="wilson")
            row |= {"wrong_rate": row["wrong"] / named, "low": interval.low, "high": interval.high}
        rows.append(row)
    return pd.DataFrame(rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--thresholds", action="store_true", help="also move the thresholds")
    arguments = parsed(parser)
    frame = labelled(confirming())
    tables = {"models": frame, "errors": errors(frame)}
    tables["labels"] = frame.groupby(["truth", "label"]).size().unstack(fill_value=0).reset_index()
    if arguments.thresholds:
        tables["thresholds"] = moved_thresholds(earlier())
    for name, table in tables.items():
        file = arguments.out / f"calibration_{name}.csv"
        table.to_csv(file, index=False, float_format="%.6g")
        print(table.to_string() if name != "models" else f"{len(table)} models", flush=True)
    print(frame[frame.verdict == "wrong"].to_string())
    save(arguments.out, "calibration_errors", [], provenance(tables["errors"], [], None))


if __name__ == "__main__":
    main()
