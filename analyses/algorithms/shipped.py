"""Which algorithm the shipped models of several layers carry out, over seeds of the prompts.

    python -m analyses.algorithms.shipped --seeds 10    (about ten minutes on one core)

Writes analyses/results/algorithms/algorithm_shipped.csv, a row per model: the label and how many seeds give it, the
function, the least share of resamples with the label, and of the first seed the nearest algorithm with R² ± one standard
error at the model's own length, the least R² over layers, what the stream holds of its x, and the reason.
docs/algorithms.md shows it.
"""

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from mechinterp.analysis.multi_layer.algorithm import name_algorithm
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.load import load

ROOT = Path(__file__).parents[2]
FILE = "algorithm_shipped.csv"


def deep_checkpoints() -> dict[str, Checkpoint]:
    """The shipped models of several layers, by name."""
    folders = sorted(folder for folder in (ROOT / "checkpoints").iterdir() if folder.is_dir())
    known = {folder.name: load(folder) for folder in folders}
    return {name: each for name, each in known.items() if each.predictor.n_layers > 1}


def row_of(name: str, checkpoint: Checkpoint, seeds: int) -> dict[str, object]:
    """The labels of a model, with the numbers behind the first."""
    each = [name_algorithm(checkpoint, seed=seed) for seed in range(seeds)]
    labels, functions = (
        Counter(getattr(found, answer) for found in each) for answer in ("label", "function")
    )
    (label, count), found = labels.most_common(1)[0], each[0]
    print(name, dict(labels), found.reason, sep=" | ", flush=True)
    best = found.best
    row: dict[str, object] = {
        "checkpoint": name,
        "label": label,
        "seeds": seeds,
        "seeds_with_label": count,
        "other_labels": " ".join(other for other in labels if other != label),
        "least_frequency": min(one.frequency[0] for one in each),
        "most_prompts": max(one.n_prompts for one in each),
        "function": functions.most_common(1)[0][0],
        "relative_risk": found.relative_risk[0],
        "reason": found.reason,
    }
    if best is None:
        return row
    nearest = found.members[best]
    return row | {
        "nearest": nearest,
        "r2": found.r2[best, 0],
        "r2_sem": found.r2_sem[best, 0],
        "path": found.path_r2[best].min(),
        "covariates": found.measured.covariates_r2.get(nearest, np.nan),
    }


def markdown(table: pd.DataFrame) -> str:
    """The table as docs/algorithms.md has it."""
    lines = [
        "| checkpoint | label | seeds | other labels | what decided, of the first seed |",
        "|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        others = "none" if pd.isna(row.other_labels) or not row.other_labels else row.other_labels
        reason = row.reason.partition("; next")[0]
        lines.append(
            f"| {row.checkpoint} | `{row.label}` | {row.seeds_with_label} of {row.seeds} | {others} | {reason} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results" / "algorithms")
    parser.add_argument("--seeds", type=int, default=10, help="seeds of the prompts of each model")
    parser.add_argument("--only", help="models whose names begin so, for a trial")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = [
        row_of(name, checkpoint, arguments.seeds)
        for name, checkpoint in deep_checkpoints().items()
        if name.startswith(arguments.only or "")
    ]
    table = pd.DataFrame(rows)
    table.to_csv(arguments.out / FILE, index=False, float_format="%.6g")
    print(markdown(table))


if __name__ == "__main__":
    main()
