"""A tenth of all records, measured again from the shipped checkpoints and compared with what is
stored.

python -m analyses.lib.check  (under a minute)

The scripts are drawn in an order that a hash of the commit decides, among those that take few
seconds; the numbers must agree within their standard errors. Fails with a line for each record that
does not.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from analyses.lib.measured import RESULTS, ROOT
from analyses.lib.records import Record, agree, all_records, digest, load

SLOWEST, BUDGET = 12, 35  # seconds of processor time, of one script and of all


def drawn(commit: str, results: Path) -> list[str]:
    """Scripts whose records are a tenth of all or more, if they can be measured in time."""
    wanted, left, found = len(all_records(results)) / 10, BUDGET, []
    files = results.glob("*.records.json")
    for file in sorted(files, key=lambda file: digest(f"{commit} {file.name}".encode())):
        content = json.loads(file.read_text(encoding="utf-8"))
        seconds = content["seconds"]
        if wanted > 0 and content["records"] and seconds and seconds <= min(left, SLOWEST):
            found.append(content["script"])
            wanted, left = wanted - len(content["records"]), left - seconds
    return found


def differences(stored: list[Record], again: list[Record]) -> list[str]:
    """A line for each record that was not measured again, or not as it is stored."""
    new = {record.id: record for record in again}
    lines = []
    for record in stored:
        if record.id not in new:
            lines.append(f"{record.id} was not measured again.")
        elif not agree(record, new[record.id]):
            lines.append(f"{record.id} is {new[record.id].measured}, stored: {record.measured}.")
    return lines


def main() -> None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    torch.set_num_threads(1)
    lines, count = [], 0
    for script in drawn(commit, RESULTS):
        stored = load(RESULTS / f"{script.replace('/', '_')}.records.json")
        module = importlib.import_module(f"analyses.{script.replace('/', '.')}")
        claims = module.measure(False).claims
        lines += differences(stored, list(claims))
        count += len(stored)
        print(f"{script}: {len(stored)} records")
    print("\n".join([*lines, f"{count - len(lines)} of {count} records agree"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
