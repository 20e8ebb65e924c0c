"""The tables that are made from the results of all scripts: those of analyses/README.md, of README.md and
of the papers' pages in docs/papers; and of speeds, from what `make bench` wrote.

python -m analyses.lib.pages  (at once; every script of a figure or table must have run)
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from analyses import pool_tables
from analyses.lib import coefficient_tables, result_tables, speeds
from analyses.lib.main_claims import PAPERS, leads, rows
from analyses.lib.records import Record, all_records
from analyses.lib.result_tables import markdown
from analyses.sparse import models_table as sparse_table
from analyses.sparse import settings_table as sparse_settings_table

HERE = Path(__file__).parents[1]
DOCS = HERE.parent / "docs"
PAGES = DOCS / "papers"
HEADER = ("id", "claim", "script", "models", "asked", "measured", "verdict", "by")


def row(script: str, record: Record) -> tuple[str, ...]:
    """The cells of one record."""
    claim = f"{record.statement}: {record.quantity}" if record.quantity else record.statement
    what = (record.models, record.asked, record.measured, record.judged, record.tag)
    return (record.id, claim, f"`{script}.py`", *what)


def table(results: Path) -> str:
    """All records, in the order of the scripts' names."""
    return markdown(HEADER, [row(*found) for found in all_records(results)])


def main_table(results: Path, *, paper: str = "") -> str:
    """The main claims of a paper, or of all papers those that lead a family."""
    records = [one for _, one in all_records(results)]
    found = rows(records, paper) if paper else leads(records)
    return markdown(("claim", "measured", "verdict"), found)


TABLES: dict[Path, dict[str, Callable[[Path], str]]] = {
    HERE / "README.md": {
        "claims": table,
        "trained": sparse_table.markdown,
        "emergence": result_tables.emergence,
        "calibration labels": result_tables.calibration_labels,
        "calibration errors": result_tables.calibration_errors,
    },
    HERE.parent / "README.md": {"claims": main_table},
    DOCS / "heads.md": {"speeds": speeds.masking},
    DOCS / "how" / "train.md": {"speeds": speeds.packs},
    **{PAGES / f"{paper}.md": {"claims": partial(main_table, paper=paper)} for paper in PAPERS},
}
"""The tables of each page, by the name of their marks."""
TABLES[DOCS / "learning_coefficient.md"] = {
    "coefficients": coefficient_tables.coefficients,
    "staircase": coefficient_tables.staircase,
    "softmax": coefficient_tables.softmax_coefficients,
    "pairs": coefficient_tables.pairs,
}
TABLES[DOCS / "pools.md"] = {"one layer": pool_tables.one_layer, "map": pool_tables.pool_map}
TABLES[PAGES / "softmax_attention.md"]["shipped"] = result_tables.shipped
TABLES[PAGES / "sparse_regression.md"] |= {
    "trained": result_tables.trained,
    "settings claims": sparse_settings_table.claims,
    "settings": sparse_settings_table.models,
    "settings seeds": sparse_settings_table.seeds,
    "settings steps": sparse_settings_table.steps,
}


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
    for file, tables in TABLES.items():
        text = file.read_text(encoding="utf-8")
        for name, made in tables.items():
            text = replaced(text, name, made(HERE / "results"))
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
