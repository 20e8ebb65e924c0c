"""Which algorithm the shipped models of several layers carry out.

    python -m analyses.algorithms.shipped    (about two minutes on one core)

Writes analyses/results/algorithms/algorithm_shipped.csv, a row per model: its label, what the evidence leaves, the
nearest algorithm with R² ± one standard error at the model's own length, the runner-up, and of the
nearest the least R² over layers. docs/algorithms.md shows it.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.checkpoints.checkpoint import load

ROOT = Path(__file__).parents[2]
FILE = "algorithm_shipped.csv"
N_PROMPTS = 256


def row_of(folder: Path) -> dict[str, object]:
    """The label of a model, with the numbers behind it."""
    found = name_algorithm(load(folder), n_prompts=N_PROMPTS)
    print(folder.name, found.label, found.reason, sep=" | ", flush=True)
    best, other = found.best, found.runner_up
    row: dict[str, object] = {
        "checkpoint": folder.name,
        "label": found.label,
        "candidates": " ".join(found.candidates),
        "relative_risk": found.relative_risk[0],
        "reason": found.reason,
    }
    if best is None or other is None:
        return row
    return row | {
        "nearest": found.members[best],
        "r2": found.r2[best, 0],
        "r2_sem": found.r2_sem[best, 0],
        "runner_up": found.members[other],
        "lead": found.difference[best, other, 0],
        "lead_sem": found.difference_sem[best, other, 0],
        "path": found.path_r2[best].min(),
        "answered": " ".join(np.array(found.settings)[found.answered]).replace(" length", ""),
    }


def markdown(table: pd.DataFrame) -> str:
    """The table as docs/algorithms.md has it."""
    lines = ["| checkpoint | label | nearest, R² | runner-up, lead | least R² over layers |"]
    lines.append("|---|---|---|---|---|")
    for row in table.itertuples():
        nearest = f"{row.nearest}, {row.r2:.3f} ± {row.r2_sem:.1g}"
        lead = f"{row.runner_up}, {row.lead:.4f} ± {row.lead_sem:.1g}"
        path = "none" if pd.isna(row.path) else f"{row.path:.2f}"
        lines.append(f"| {row.checkpoint} | `{row.label}` | {nearest} | {lead} | {path} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results" / "algorithms")
    parser.add_argument("--only", type=int, help="the first models, for a trial")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    folders = sorted((ROOT / "checkpoints").glob("sparse-*"))[: arguments.only]
    table = pd.DataFrame(list(map(row_of, folders)))
    table.to_csv(arguments.out / FILE, index=False, float_format="%.6g")
    print(markdown(table))


if __name__ == "__main__":
    main()
