"""Algorithms of the shipped models of several layers, over seeds of the prompts.

    python -m analyses.algorithms.shipped --seeds 10    (about ten minutes on one core)

Writes analyses/results/algorithms/algorithm_shipped.csv, one row per model and seed: label,
function, share of resamples with the label, number of prompts, and reason. Models and seeds that
the file already has are skipped. docs/results/algorithms.md shows the table by model."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import pandas as pd
import torch

from analyses.algorithms.calibration import append, known_rows
from mechinterp.analysis.multi_layer import naming
from mechinterp.analysis.multi_layer.naming_result import Naming
from mechinterp.checkpoints.checkpoint import Checkpoint
from mechinterp.checkpoints.load import load
from mechinterp.icl.prompts import Prompts

ROOT = Path(__file__).parents[2]
FILE = "algorithms/algorithm_shipped.csv"
N_PROMPTS = 256
"""Number of prompts of the first stage, as in `classify`."""


def deep_checkpoints() -> dict[str, Checkpoint]:
    """Shipped models of several layers, by name."""
    folders = sorted(folder for folder in (ROOT / "checkpoints").iterdir() if folder.is_dir())
    known = {folder.name: load(folder) for folder in folders}
    return {name: each for name, each in known.items() if each.predictor.n_layers > 1}


@contextmanager
def same_last_prompts() -> Iterator[None]:
    """Reuse the numbers of one model on the last prompts, which are the same for every seed."""
    named, last = naming._named, {}

    def once(subject: object, prompts: Prompts, *rest: object) -> Naming:
        if len(prompts) < N_PROMPTS * naming.GROWTH[-1]:
            return named(subject, prompts, *rest)
        if not last:
            last["answer"] = named(subject, prompts, *rest)
        return last["answer"]

    naming._named = once
    yield
    naming._named = named


def row_of(name: str, checkpoint: Checkpoint, seed: int) -> dict[str, object]:
    """Label of a model on the prompts of a seed, with the numbers behind it."""
    found = naming.name_algorithm(checkpoint, n_prompts=N_PROMPTS, seed=seed)
    return {
        "checkpoint": name,
        "seed": seed,
        "label": found.label,
        "function": found.function,
        "frequency": max(found.frequency.values()),
        "n_prompts": found.n_prompts,
        "relative_risk": found.measured.relative_risk,
        "reason": found.reason,
    }


def shipped_table(results: Path) -> str:
    """Table by model on docs/results/algorithms.md."""
    rows = pd.read_csv(results / FILE)
    lines = [
        "| checkpoint | label | seeds | least share of resamples | prompts | reason, of the first seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in rows.sort_values(["checkpoint", "seed"]).groupby("checkpoint"):
        counts = each.label.value_counts()
        labels = ", ".join(f"`{label}` {count}" for label, count in counts.items())
        prompts = " to ".join(
            f"{n:,}" for n in sorted({each.n_prompts.min(), each.n_prompts.max()})
        )
        lines.append(
            f"| {name} | {labels if len(counts) > 1 else f'`{counts.index[0]}`'} | {len(each)} "
            f"| {each.frequency.min():.0%} | {prompts} | {each.reason.iloc[0].partition('; next')[0]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "analyses" / "results")
    parser.add_argument("--seeds", type=int, default=10, help="number of prompt seeds per model")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit")
    parser.add_argument("--only", help="only models whose names start with this, for a trial")
    arguments = parser.parse_args()
    (arguments.out / FILE).parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    file, until = arguments.out / FILE, monotonic() + 60 * arguments.minutes
    for name, checkpoint in deep_checkpoints().items():
        if not name.startswith(arguments.only or ""):
            continue
        with same_last_prompts():
            for seed in range(arguments.seeds):
                if monotonic() < until and (name, seed) not in known_rows(file, "checkpoint"):
                    row = row_of(name, checkpoint, seed)
                    append(file, row)
                    print(name, seed, row["label"], row["n_prompts"], sep=" | ", flush=True)
    print(shipped_table(arguments.out))


if __name__ == "__main__":
    main()
