"""Commit and day of the evidence that no test measures again: `make attack`, `make test-gpu`, `make bench-gpu` and
`make test-versions` write them into evidence.json, and the pages that show the evidence take them from there."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")


def evidence() -> dict[str, dict]:
    """By name: the page that shows it, the folders that it speaks of, and the commit and day it was made on."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def stamp(name: str) -> None:
    """Note the present commit and day for this evidence."""
    found = evidence()
    found[name] |= {
        "commit": git("rev-parse", "--short=8", "HEAD"),
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
    }
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def files_changed_since(commit: str, folders: list[str]) -> int:
    """Number of files in these folders that differ between a commit and the present one."""
    return len(git("diff", "--name-only", commit, "HEAD", "--", *folders).splitlines())
