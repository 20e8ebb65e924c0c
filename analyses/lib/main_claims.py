"""Tables of main claims of one paper or of all papers: analyses/claims/main.toml with measured
numbers.

A row is one clause, so that its count, number and bound belong together."""

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
    """Rows of the page of each paper."""
    every = tomllib.loads((CLAIMS / "main.toml").read_text(encoding="utf-8"))
    for row in (row for rows in every.values() for row in rows):
        check(row)
    return every


def check(row: dict) -> None:
    """Refuse a row that is not one clause."""
    if not NEEDED <= set(row) <= KEYS:
        raise ValueError(
            f"a row of main.toml must have {', '.join(sorted(NEEDED))}; optional are "
            f"{', '.join(sorted(KEYS - NEEDED))}; got {', '.join(sorted(row))}."
        )


def holds_in(record: Record, of: str) -> str:
    """Number of models, seeds or other units for which a claim holds, and number of failed
    trainings."""
    if "seeds" in record.over and "share" in record.values:
        seeds = int(record.over["seeds"])
        return f"{seeds - round(record.values['share'] * seeds)} of {seeds} seeds"
    if record.models == "closed form" or record.n == 1:
        return "yes" if record.holding else "no"
    apart = f" ({record.over['failed']} trainings failed)" if "failed" in record.over else ""
    return f"{len(record.holding)} of {record.n} {of}{apart}"


def bound(record: Record, show: str) -> str:
    """Relation and bound as text, in the format of the number."""
    form = show if "%" in show else ".4g"
    ends = record.bound if isinstance(record.bound, tuple) else (record.bound,)
    texts = [re.sub(r"\.0+%$", "%", f"{end:{form}}") for end in ends]
    margin = f" by {record.margin:g} s.e." if record.margin else ""
    return minus(f"{SIGNS.get(record.relation, '')} {' to '.join(texts)}{margin}".strip())


def measured(record: Record, show: str) -> str:
    """Range of a record's values, as text."""
    return minus(re.sub(r"^0e\+00 to ", "up to ", span(record.values.values(), show)))


def minus(text: str) -> str:
    """The text with minus signs instead of hyphens before digits."""
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)


def cells(row: dict, record: Record) -> tuple[str, ...]:
    """Cells of a row: count, number and bound of its clause, source of the claim and source of the
    bound."""
    number = row["what"]
    if "show" in row:
        number += f": {measured(record, row['show'])} ({bound(record, row['show'])})"
    return (holds_in(record, row.get("of", "models")), number, record.source, record.bound_by)


def rows(results: Path, page: str, paper: str = "") -> list[tuple[str, ...]]:
    """Rows of a page: all rows of one paper, or the leading rows of all papers."""
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
