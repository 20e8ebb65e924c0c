"""The tables that are made from the records of all scripts: that of analyses/README.md and that of README.md.

python analyses/claims_table.py  (at once; every script of a figure or table must have run)
"""

from pathlib import Path

from main_claims import rows
from records import Record, all_records

HERE = Path(__file__).parent
HEADER = ("id", "claim", "script", "models", "asked", "measured", "verdict", "by")


def row(script: str, record: Record) -> tuple[str, ...]:
    """The cells of one record."""
    claim = f"{record.statement}: {record.quantity}" if record.quantity else record.statement
    what = (record.models, record.asked, record.measured, record.verdict, record.tag)
    return (record.id, claim, f"`{script}.py`", *what)


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, ("---",) * len(header)]
    lines += [tuple(cell.replace("|", "\\|") for cell in cells) for cells in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table(results: Path) -> str:
    """All records, in the order of the scripts' names."""
    return markdown(HEADER, [row(*found) for found in all_records(results)])


def main_table(results: Path) -> str:
    """The table of README.md."""
    return markdown(("claim", "measured", "verdict"), rows(one for _, one in all_records(results)))


def replaced(text: str, name: str, table: str) -> str:
    """The text with this table between the marks of that name.

    Example:
        >>> replaced("<!-- a: begin --><!-- a: end -->", "a", "| x |").splitlines()
        ['<!-- a: begin -->', '| x |', '<!-- a: end -->']
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    tables = {HERE: table(HERE / "results"), HERE.parent: main_table(HERE / "results")}
    for folder, made in tables.items():
        file = folder / "README.md"
        text = replaced(file.read_text(encoding="utf-8"), "claims", made)
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
