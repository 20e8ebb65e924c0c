"""The main claims of each paper, for its page in docs/papers, and those that lead the table of docs/trust.md:
analyses/claims/main.toml, with the numbers of the records."""

import re
import tomllib
from functools import cache
from pathlib import Path

from analyses.lib.records import CLAIMS, Record, all_records, span

SIGNS = {"at most": "≤", "below": "<", "at least": "≥", "above": ">", "equal to": "="}
HEADER = ("claim", "holds in", "the number that matters (asked)", "more")


@cache
def main() -> dict[str, list[dict]]:
    """The rows of each paper's page."""
    return tomllib.loads((CLAIMS / "main.toml").read_text(encoding="utf-8"))


def holds_in(record: Record, of: str) -> str:
    """How many models, seeds or clauses a claim holds for."""
    if "seeds" in record.over and "share" in record.values:
        seeds = int(record.over["seeds"])
        return f"{seeds - round(record.values['share'] * seeds)} of {seeds} seeds"
    if record.models == "closed form" or record.n == 1:
        return "yes" if record.holding else "no"
    return f"{len(record.holding)} of {record.n} {of}"


def asked(record: Record, show: str) -> str:
    """The relation and its bound, in the form of the number."""
    form = show if "%" in show else ".4g"
    ends = record.bound if isinstance(record.bound, tuple) else (record.bound,)
    texts = [re.sub(r"\.0+%$", "%", f"{end:{form}}") for end in ends]
    return f"{SIGNS.get(record.relation, '')} {' to '.join(texts)}".strip()


def measured(record: Record, show: str) -> str:
    """The range of a record's values."""
    text = re.sub(r"^0e\+00 to ", "up to ", span(record.values.values(), show))
    return re.sub(r"(?<!\w)-(?=\d)", "−", text)


def rows(results: Path, paper: str = "") -> list[tuple[str, ...]]:
    """All rows of one paper with their scripts, or of all papers those that lead with their pages."""
    found = {record.id: (script, record) for script, record in all_records(results)}
    made = []
    for page, claims in main().items():
        for row in claims:
            if not (row.get("lead") if not paper else page == paper):
                continue
            (script, counted), (_, record) = found[row["models"]], found[row["number"]]
            number = f"{row['what']}: {measured(record, row['show'])}"
            number += f" ({asked(record, row['show'])})"
            link = f"[script](../../analyses/{script}.py)"
            link = link if paper else f"[{page.partition('_')[0]}](papers/{page}.md)"
            code = f" ({row['code']})" if paper and "code" in row else ""
            claim, holds = row["claim"] + code, holds_in(counted, row.get("of", "models"))
            made.append((claim, holds, number, link))
    return made
