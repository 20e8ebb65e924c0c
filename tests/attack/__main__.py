"""Attack the package with spoilt files: `python -m tests.attack [COUNT [SEED...]]`, so many cases for each seed.

Cases run in worker processes that live on, within limits of time and memory. Prints what came of each subject, and
ends with 1 if there was a hang, a crash, a file lost or another fault; each is named by what makes it again.
"""

import sys
from collections import Counter

from tests.attack.runner import FAULTS, attack

COUNT, SEEDS = 1000, (1, 2, 3)


def main(count: int, seeds: tuple[int, ...]) -> int:
    total: Counter[str] = Counter()
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
        print(f"seed {seed}: {_summary(sum(by_subject.values(), Counter()))}", flush=True)
    print(f"all seeds: {_summary(total)}")
    return int(any(total[fault] for fault in FAULTS))


def _summary(outcomes: Counter[str]) -> str:
    faults = ", ".join(f"{fault} {outcomes[fault]}" for fault in FAULTS)
    answered, refused = outcomes["answered"], outcomes["refused"]
    return f"{outcomes.total()} cases, {answered} answered, {refused} refused; {faults}"


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(numbers[0] if numbers else COUNT, tuple(numbers[1:]) or SEEDS))
