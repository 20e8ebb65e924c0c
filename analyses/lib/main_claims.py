"""Tables of main claims, of one paper or of all: analyses/claims/main.toml with measured numbers.

A row is one clause, so that its count, its number and its bound agree.
"""

import os
import re
import tomllib
from functools import cache
from pathlib import Path

from analyses.lib.records import CLAIMS, Record, all_records, span

ROOT = CLAIMS.parents[1]
SIGNS = {"at most": "≤", "below": "<", "at least": "≥", "above": ">", "equal to": "="}
HEADER = ("claim", "holds in", "number (bound)", "said by", "bound by", "more")
NEEDED = {"claim", "clause", "what"}
KEYS = NEEDED | {"show", "of", "code", "lead"}


@cache
def main() -> dict[str, list[dict]]:
    """The rows of each paper's page."""
    every = tomllib.loads((CLAIMS / "main.toml").read_text(encoding="utf-8"))
    for row in (row for rows in every.values() for row in rows):
        check(row)
    return every


def check(row: dict) -> None:
    """Refuses a row that is not one clause."""
    if not NEEDED <= set(row) <= KEYS:
        raise ValueError(
            f"a row of main.toml must have {', '.join(sorted(NEEDED))}, and may have "
            f"{', '.join(sorted(KEYS - NEEDED))}; got {', '.join(sorted(row))}."
        )


def holds_in(record: Record, of: str) -> str:
    """Number of models, seeds or other units for which a claim holds, and of failed trainings."""
    if "seeds" in record.over and "share" in record.values:
        seeds = int(record.over["seeds"])
        return f"{seeds - round(record.values['share'] * seeds)} of {seeds} seeds"
    if record.models == "closed form" or record.n == 1:
        return "yes" if record.holding else "no"
    apart = f" ({record.over['failed']} trainings failed)" if "failed" in record.over else ""
    return f"{len(record.holding)} of {record.n} {of}{apart}"


def bound(record: Record, show: str) -> str:
    """The relation and its bound, in the form of the number."""
    form = show if "%" in show else ".4g"
    ends = record.bound if isinstance(record.bound, tuple) else (record.bound,)
    texts = [re.sub(r"\.0+%$", "%", f"{end:{form}}") for end in ends]
    margin = f" by {record.margin:g} s.e." if record.margin else ""
    return minus(f"{SIGNS.get(record.relation, '')} {' to '.join(texts)}{margin}".strip())


def measured(record: Record, show: str) -> str:
    """The range of a record's values."""
    return minus(re.sub(r"^0e\+00 to ", "up to ", span(record.values.values(), show)))


def minus(text: str) -> str:
    """The text with minus signs in place of hyphens before digits."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)


def cells(row: dict, record: Record) -> tuple[str, ...]:
    """Count, number and bound of a row, all of its one clause, and whose claim and bound they are."""
    number = row["what"]
    if "show" in row:
        number += f": {measured(record, row['show'])} ({bound(record, row['show'])})"
    return (holds_in(record, row.get("of", "models")), number, record.source, record.bound_by)


def rows(results: Path, page: str, paper: str = "") -> list[tuple[str, ...]]:
    """Rows for a page: all of one paper, or of all papers those that lead."""
    found = {record.id: (script, record) for script, record in all_records(results)}

    def link(text: str, file: str) -> str:
        return f"[{text}]({os.path.relpath(ROOT / file, (ROOT / page).parent)})"

    made = []
    for name, claims in main().items():
        for row in claims:
            if not (name == paper if paper else row.get("lead")):
                continue
            script, record = found[row["clause"]]
            more = link("script", f"analyses/{script}.py")
            more += "" if paper else f", {link('page', f'docs/papers/{name}.md')}"
            code = f" ({row['code']})" if paper and "code" in row else ""
            made.append((row["claim"] + code, *cells(row, record), more))
    return made
