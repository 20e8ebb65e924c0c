"""Page on several methods scored on the models with known answers, with its CSV files."""

from pathlib import Path

from mechinterp.known.comparing import MethodComparison
from mechinterp.report.page import Report, write_page
from mechinterp.report.to_html import Section

METHOD = (
    "Each method was scored by mechinterp score on the models with known answers; a difference is over entries that both "
    "methods have the score on."
)


def write_methods_page(found: MethodComparison, out: str | Path) -> Report:
    """Write `out/index.html` and the tables of a comparison as CSV files.

    Raises:
        ValueError: If `out` is a file or a nonempty folder, or cannot be written.
    """
    first, rest = found.sentences()
    tables = found.tables()
    section = Section("Scores", rest, METHOD, {"means": found.plot()}, tables, unfolded=True)
    about = "Scores on models with known answers"
    return write_page(Path(out), "Comparison of methods", about, first, [section])
