"""Counts of the labels in the calibrations, for the sentences of answers.

    python -m analyses.calibration.counts  (a second); writes mechinterp/analysis/calibration.csv

Only models that were made after the rules count: the second set of one layer (fresh.py), families of several layers in
the part "after" of analyses/algorithms, and the last draws of functions and of trained layers of analyses/recurrent.
"""

from pathlib import Path

import pandas as pd

from analyses.lib.measured import RESULTS, ROOT
from mechinterp.analysis.labels import TEXTS

FILE = ROOT / "mechinterp" / "analysis" / "calibration.csv"


def counts(results: Path) -> pd.DataFrame:
    """Number of models that got each label, and of those that got it although it is wrong."""
    one = pd.read_csv(results / "calibration_second_models.csv")
    deep = pd.read_csv(results / "algorithms" / "algorithm_calibration_models.csv")
    along = [
        pd.read_csv(results / "recurrent" / f"calibration_{of}.csv") for of in ("models", "trained")
    ]
    algorithms = pd.concat([deep[deep.half == "after"], *along])
    rows = []
    for kind, models in (("patterns", one), ("algorithms", algorithms)):
        for label in TEXTS[kind]:
            verdicts = models.verdict[models.label == label]
            wrong = int((verdicts == "wrong").sum())
            rows.append({"label": label, "named": len(verdicts), "wrong": wrong})
    return pd.DataFrame(rows)


def main() -> None:
    counts(RESULTS).to_csv(FILE, index=False)


if __name__ == "__main__":
    main()
