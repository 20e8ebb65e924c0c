"""Tables made from the results of all scripts: tables of pages (tables.toml), and all claims as a
CSV file and as a page with a search field.

python -m analyses.lib.pages  (takes seconds; every script of a figure or table must have run
before)"""

import html
import tomllib
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import pandas as pd

from analyses.lib import main_claims, numbers
from analyses.lib.records import Record, all_records
from analyses.lib.result_tables import from_csv, markdown

HERE = Path(__file__).parents[1]
HEADER = ("id", "claim", "said by", "script", "models")
HEADER += ("bound", "bound by", "measured", "verdict", "changed")


def row(script: str, record: Record) -> tuple[str, ...]:
    """Cells of one record."""
    claim = f"{record.statement}: {record.quantity}" if record.quantity else record.statement
    bound = (record.criterion, record.bound_by, record.measured, record.judged, record.moves)
    return (record.id, claim, record.source, f"{script}.py", record.models, *bound)


def all_claims(results: Path) -> pd.DataFrame:
    """All records, in the order of the scripts' names."""
    return pd.DataFrame([row(*one) for one in all_records(results)], columns=HEADER)


def claims_csv(results: Path) -> str:
    return all_claims(results).to_csv(index=False)


def claims_page(results: Path) -> str:
    """A page with one row per record and a search field."""
    cells = [[html.escape(cell) for cell in one] for one in all_claims(results).to_numpy()]
    body = "\n".join("<tr><td>" + "<td>".join(one) for one in cells)
    head = "<th>".join(HEADER)
    page = (HERE / "lib" / "claims_page.html").read_text(encoding="utf-8")
    return page.replace("HEAD", head).replace("BODY", body)


def main_table(results: Path, *, page: str, paper: str) -> str:
    """Main claims of one paper, or the leading claims of all papers ("all"), with links from a
    page."""
    chosen = "" if paper == "all" else paper
    return markdown(main_claims.HEADER, main_claims.rows(results, page, chosen))


FILES: dict[Path, Callable[[Path], str]] = {
    HERE / "claims.csv": claims_csv,
    HERE / "claims.html": claims_page,
}
"""Files that are written as a whole."""


@cache
def tables() -> dict[Path, dict[str, Callable[[Path], str]]]:
    """Functions from results to the tables of each page, by the name of their marks."""
    every = tomllib.loads((HERE / "tables.toml").read_text(encoding="utf-8"))
    return {
        HERE.parent / page: {name: made_by(source, page) for name, source in sources.items()}
        for page, sources in every.items()
    }


def made_by(source: str | dict, page: str) -> Callable[[Path], str]:
    """Function from results to one table of a page."""
    if isinstance(source, str):
        module, _, name = source.partition(":")
        return getattr(import_module(f"analyses.{module}"), name)
    return (
        partial(main_table, page=page, **source)
        if "paper" in source
        else partial(from_csv, **source)
    )


def replaced(text: str, name: str, table: str) -> str:
    """The text with a new table between the marks of this name.

    Example:
        >>> replaced("<!-- a: begin --><!-- a: end -->", "a", "| x |").splitlines()
        ['<!-- a: begin -->', '| x |', '<!-- a: end -->']
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Write all tables, files and numbers in prose."""
    for file, made in tables().items():
        text = file.read_text(encoding="utf-8")
        for name, make in made.items():
            text = replaced(text, name, make(HERE / "results"))
        file.write_text(text, encoding="utf-8")
    for file, make in FILES.items():
        file.write_text(make(HERE / "results"), encoding="utf-8")
    numbers.main()


if __name__ == "__main__":
    main()
