"""The tables that are made from the results of all scripts: those of README.md, of analyses/ and of
docs/, of speeds from what `make bench` wrote, and all claims as a CSV file and a page with a search.

python -m analyses.lib.pages  (at once; every script of a figure or table must have run)
"""

import html
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from analyses.algorithms import calibration, shipped, trained
from analyses.coefficients import tables as coefficient_tables
from analyses.lib import main_claims, numbers, result_tables, speeds
from analyses.lib.records import Record, all_records
from analyses.lib.result_tables import markdown
from analyses.pools import tables as pool_tables
from analyses.sparse import settings_table

HERE = Path(__file__).parents[1]
DOCS = HERE.parent / "docs"
PAGES = DOCS / "papers"
HEADER = ("id", "claim", "script", "models", "asked", "measured", "verdict", "by")


def row(script: str, record: Record) -> tuple[str, ...]:
    """The cells of one record."""
    claim = f"{record.statement}: {record.quantity}" if record.quantity else record.statement
    what = (record.models, record.asked, record.measured, record.judged, record.tag)
    return (record.id, claim, f"{script}.py", *what)


def all_claims(results: Path) -> pd.DataFrame:
    """All records, in the order of the scripts' names."""
    return pd.DataFrame([row(*one) for one in all_records(results)], columns=HEADER)


def claims_csv(results: Path) -> str:
    return all_claims(results).to_csv(index=False)


def claims_page(results: Path) -> str:
    """A page with a row per record and a field that hides those without its words."""
    cells = [[html.escape(cell) for cell in one] for one in all_claims(results).to_numpy()]
    body = "\n".join("<tr><td>" + "<td>".join(one) for one in cells)
    head = "<th>".join(HEADER)
    page = (HERE / "lib" / "claims_page.html").read_text(encoding="utf-8")
    return page.replace("HEAD", head).replace("BODY", body)


def main_table(results: Path, *, paper: str = "") -> str:
    """The main claims of a paper, or of all papers those that lead README.md."""
    return markdown(main_claims.HEADER, main_claims.rows(results, paper))


FILES: dict[Path, Callable[[Path], str]] = {
    HERE / "claims.csv": claims_csv,
    HERE / "claims.html": claims_page,
}
"""What is made whole."""
TABLES: dict[Path, dict[str, Callable[[Path], str]]] = {
    HERE / "softmax" / "emergence.md": {"emergence": result_tables.emergence},
    HERE / "calibration" / "README.md": {
        "calibration labels": result_tables.calibration_labels,
        "calibration errors": result_tables.calibration_errors,
    },
    HERE.parent / "README.md": {"claims": main_table, "calibration": result_tables.two_by_two},
    DOCS / "reliability.md": {"outcomes": result_tables.attack},
    DOCS / "heads.md": {"speeds": speeds.masking},
    DOCS / "how" / "train.md": {"speeds": speeds.packs},
    **{
        PAGES / f"{paper}.md": {"claims": partial(main_table, paper=paper)}
        for paper in main_claims.main()
    },
}
"""The tables of each page, by the name of their marks."""
TABLES[DOCS / "learning_coefficient.md"] = {
    "coefficients": coefficient_tables.coefficients,
    "staircase": coefficient_tables.staircase,
    "softmax": coefficient_tables.softmax_coefficients,
    "pairs": coefficient_tables.pairs,
    "early": coefficient_tables.early,
    "grid": coefficient_tables.grid,
    "mini-batches": coefficient_tables.minibatches,
    "temperatures": coefficient_tables.temperatures,
}
TABLES[DOCS / "pools.md"] = {"one layer": pool_tables.one_layer, "map": pool_tables.pool_map}
TABLES[DOCS / "algorithms.md"] = {
    "rates": calibration.rates_table,
    "limits": calibration.limits_table,
    "shipped": shipped.shipped_table,
    "trained": trained.trained_table,
}
TABLES[PAGES / "softmax_attention.md"]["shipped"] = result_tables.shipped
TABLES[PAGES / "sparse_regression.md"] |= {
    "trained": result_tables.trained,
    "settings claims": settings_table.claims,
    "settings": settings_table.models,
    "settings seeds": settings_table.seeds,
    "settings steps": settings_table.steps,
}
TABLES.setdefault(DOCS / "algorithms.md", {})["GPT-2"] = result_tables.garg


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
    """Writes all of it, and the numbers in prose."""
    for file, tables in TABLES.items():
        text = file.read_text(encoding="utf-8")
        for name, made in tables.items():
            text = replaced(text, name, made(HERE / "results"))
        file.write_text(text, encoding="utf-8")
    for file, make in FILES.items():
        file.write_text(make(HERE / "results"), encoding="utf-8")
    numbers.main()


if __name__ == "__main__":
    main()
