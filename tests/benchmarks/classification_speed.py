"""Checkpoints classified per second of one core, from their files, and the ratio to doing it without caches.

    python tests/benchmarks/classification_speed.py

A plain classifier draws its prompts and its null of random weights for every checkpoint; ours draws them once
for all checkpoints of a task and shape. Rounds alternate, so that both meet the same machine.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mechinterp.analysis import null, substitution
from mechinterp.analysis.patterns import classify
from mechinterp.checkpoints.loading import load
from mechinterp.report.documents import classification_document

FOLDERS = sorted(
    file.parent for file in (Path(__file__).parents[2] / "checkpoints").glob("*/config.json")
)
ROUNDS = 7


def one(folder: Path) -> None:
    checkpoint = load(folder)
    classification_document(checkpoint, classify(checkpoint))


def one_without_caches(folder: Path) -> None:
    substitution.evaluation.cache_clear()
    null.null_of.cache_clear()
    one(folder)


def seconds(function: Callable[[Path], None], folders: list[Path]) -> float:
    start = time.process_time()
    for folder in folders:
        function(folder)
    return (time.process_time() - start) / len(folders)


def main() -> None:
    torch.set_num_threads(1)
    plain, ours = [], []
    for _ in range(ROUNDS):
        plain.append(seconds(one_without_caches, FOLDERS[::5]))
        seconds(one, FOLDERS)  # fills the caches again
        ours.append(seconds(one, FOLDERS * 4))
    ratios = [p / o for p, o in zip(plain, ours, strict=True)]
    print(f"{1 / statistics.median(ours):.0f} checkpoints/s (best round {1 / min(ours):.0f})")
    print(f"{statistics.median(ratios):.1f} times without caches")


if __name__ == "__main__":
    main()
