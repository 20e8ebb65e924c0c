"""Measures all fast records again from the shipped checkpoints, and computes all calibration labels
anew.

python -m analyses.lib.check [--records]  (two minutes; the records alone take one)

Both are compared with the stored results: numbers must agree within their standard errors, labels
exactly. Prints a line for each record or label that differs, and then fails."""

import json
import sys
from pathlib import Path

import torch

from analyses.calibration.errors import changed_labels
from analyses.lib.measured import RESULTS, module_of
from analyses.lib.records import Record, agree, load

SLOWEST = 8  # largest processor time of a fast script, in seconds


def fast(results: Path) -> list[str]:
    """Scripts that take at most SLOWEST seconds, the fastest first."""
    files = [json.loads(file.read_text("utf-8")) for file in results.glob("*.records.json")]
    timed = [one for one in files if one["records"] and one["seconds"]]
    timed.sort(key=lambda one: (one["seconds"], one["script"]))
    return [one["script"] for one in timed if one["seconds"] <= SLOWEST]


def differences(stored: list[Record], again: list[Record]) -> list[str]:
    """A line for each record that was not measured again, or that differs from the stored one."""
    new = {record.id: record for record in again}
    lines = []
    for record in stored:
        if record.id not in new:
            lines.append(f"{record.id} was not measured again.")
        elif not agree(record, new[record.id]):
            lines.append(f"{record.id} is {new[record.id].measured}, stored: {record.measured}.")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    lines, count = [], 0
    for script in fast(RESULTS):
        stored = load(RESULTS / f"{script.replace('/', '_')}.records.json")
        lines += differences(stored, list(module_of(script).measure(False).claims))
        count += len(stored)
        print(f"{script}: {len(stored)} records")
    print("\n".join([*lines, f"{count - len(lines)} of {count} records agree"]))
    if sys.argv[1:] == ["--records"]:
        sys.exit(bool(lines))
    changed = changed_labels(RESULTS)
    print("\n".join([*changed, f"{len(changed)} labels of the calibration changed"]))
    sys.exit(bool(lines or changed))


if __name__ == "__main__":
    main()
