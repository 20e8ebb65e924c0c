"""Attack the package with spoilt files: `python -m tests.attack [COUNT [SEED...]]` runs COUNT cases for each seed.

Cases run in worker processes that live on, within limits of time and memory. Prints the outcomes of each subject, and
ends with 1 if there was a hang, a crash, a lost file or another fault, each named by what makes it again. Without
arguments it writes outcomes.csv, the table of docs/reliability.md, with the commit and day.
"""

import csv
import sys
from collections import Counter
from pathlib import Path

from tests.attack.runner import FAULTS, attack
from tests.evidence import stamp

COUNT, SEEDS = 1000, (1, 2, 3)
FILE = Path(__file__).with_name("outcomes.csv")
COLUMNS = {
    "answered": "answered",
    "refused": "refused in one line",
    "hang": "hangs",
    "crash": "crashes",
    "memory": "out of memory",
    "fault": "other faults",
    "lost": "files lost",
}
"""Columns of outcomes.csv, by outcome."""


def main(count: int, seeds: tuple[int, ...], *, write: bool = False) -> int:
    """Run the cases of all seeds; with `write` keep their table with its commit and day."""
    total: Counter[str] = Counter()
    rows = []
    for seed in seeds:
        by_subject: dict[str, Counter[str]] = {}
        for case, outcome, note in attack(count, seed):
            by_subject.setdefault(case.partition(" ")[0], Counter())[outcome] += 1
            if outcome in FAULTS:
                print(f"{outcome}: {case}: {note}", flush=True)
        for name, outcomes in by_subject.items():
            counts = ", ".join(
                f"{number} {outcome}" for outcome, number in sorted(outcomes.items())
            )
            print(f"seed {seed}: {name}: {counts}")
            total += outcomes
        of_seed = sum(by_subject.values(), Counter())
        rows.append([seed, of_seed.total(), *(of_seed[outcome] for outcome in COLUMNS)])
        print(f"seed {seed}: {_summary(of_seed)}", flush=True)
    print(f"all seeds: {_summary(total)}")
    if write:
        with FILE.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [["seed", "cases", *COLUMNS.values()], *rows]
            )
        stamp("attack")
    return int(any(total[fault] for fault in FAULTS))


def _summary(outcomes: Counter[str]) -> str:
    faults = ", ".join(f"{fault} {outcomes[fault]}" for fault in FAULTS)
    answered, refused = outcomes["answered"], outcomes["refused"]
    return f"{outcomes.total()} cases, {answered} answered, {refused} refused; {faults}"


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0] if numbers else COUNT, tuple(numbers[1:]) or SEEDS, write=not numbers))
