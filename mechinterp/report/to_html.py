"""HTML page of sections that opens offline, with style.css, page.js and one copy of plotly.js inside."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import plotly.graph_objects as go
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from mechinterp import figures, heatmaps
from mechinterp.analysis.labels import ALGORITHM_LABELS, PATTERNS, TEXTS
from mechinterp.analysis.number_format import cell
from mechinterp.analysis.result import Card, Table
from mechinterp.checkpoints.io.files import visible
from mechinterp.display import counted
from mechinterp.report.text import narrow, unbroken

GLOSSARY: dict[str, str] = {
    **TEXTS["words"],
    **{name: label.meaning for name, label in (PATTERNS | ALGORITHM_LABELS).items()},
    **TEXTS["more_words"],
}
"""Glossary of the pages."""
PAPERS: dict[str, str] = TEXTS["papers"]
HERE = Path(__file__).parent
LONGEST_WORD = 24
"""Columns with longer entries are set as text."""
TITLE_HEIGHT = 26
"""Height of the title of a figure, in pixels."""
SHOWN_SECTIONS = 6
"""Number of sections whose first figure is shown at once; more make the page of a deep model too long."""
SHOWN_ROWS = 12
"""Largest number of rows for which the first table of a section is shown at once; longer ones unfold."""
EVERYDAY = {"positive", "negative", "mixed", "mismatched"}
"""Terms that texts also use as everyday words; they get no links."""
TERMS = {term: number for number, words in enumerate(GLOSSARY) for term in words.split(", ")}
"""Number of the glossary's entry of each term."""
LINKED = re.compile(
    rf"(?<![\w./-])({'|'.join(sorted(TERMS.keys() - EVERYDAY, key=len, reverse=True))})(?![\w-])"
)
PAGE_MARK = re.compile(r'<meta name="generator" content="mechinterp" data-files="([^"]*)">')
"""Mark in the head of our pages, with the names of the report's files."""
HEAD = 2**16
"""Number of bytes in which the mark is looked for."""


@dataclass(frozen=True)
class Section:
    """One section of a page."""

    title: str
    text: str
    method: str
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    """Figures by name; figures with frames share one slider. The first is shown, the others unfold."""
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Tables by name, each also written as <name>.csv. A table with at most `longest_table` rows is on the page."""
    cards: tuple[Card, ...] = ()
    legend: str = ""
    """Explanation of the bands beside numbers."""
    switches: Mapping[str, Any] | None = None
    """Numbers for switches of the heads, for the script of the page."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of pages, by checkpoint."""
    unfolded: bool = False
    """True: every table is shown, and may have 1000 rows."""

    @property
    def meanings(self) -> list[tuple[str, str]]:
        """Columns with their meanings; a column that has two meanings in two tables comes twice."""
        pairs = (pair for table in self.tables.values() for pair in table.meanings.items())
        return list(dict.fromkeys(pairs))

    @property
    def longest_table(self) -> int:
        """Largest number of rows of a table on the page."""
        return 1000 if self.unfolded else 128


def page(
    name: str,
    about: str,
    verdict: str,
    sections: Sequence[Section],
    *,
    files: Sequence[str],
    loss: str = "",
) -> str:
    """HTML of a page about one or several models.

    Args:
        name: Title.
        about: One line about the subject.
        verdict: Main result.
        files: Names of the page and of its tables.
        loss: Line below the verdict.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "figure": _drawn,
        "head_color": figures.head_color,
        "least_width": _least_width,
        "narrow": narrow,
        "texts": _texts,
        "linked": _linked,
        "breakable": _breakable,
        "cell": cell,
        "counted": counted,
    }
    return environment.get_template("page.html.jinja").render(
        name=visible(name),
        about=visible(about),
        verdict=visible(verdict),
        loss=visible(loss),
        shown_rows=SHOWN_ROWS,
        shown_sections=SHOWN_SECTIONS,
        sections=sections,
        words=GLOSSARY,
        papers=PAPERS,
        files="/".join(files),
        title_height=TITLE_HEIGHT,
        looks={"templates": figures.templates(), "scales": heatmaps.scales()},
        style=_text("style.css"),
        script=_text("page.js"),
        plotly_js=Markup(get_plotlyjs()),
    )


def _linked(text: str) -> Markup:
    """The text with no-break spaces, and with a link from the first use of each term to the glossary."""
    used: set[str] = set()
    meanings = [*GLOSSARY.values()]

    def link(found: re.Match[str]) -> str:
        term = found[0]
        if term in used:
            return term
        used.add(term)
        tag = Markup('<a class="term" href="#word-{}" title="{}">{}</a>')
        return tag.format(TERMS[term], meanings[TERMS[term]], term)

    return Markup(LINKED.sub(link, str(escape(unbroken(text)))))


def files_of(page: Path) -> frozenset[str]:
    """Names of the files of a report, from its page; empty if the page is missing or not ours."""
    if page.is_symlink() or not page.is_file():
        return frozenset()
    with page.open("rb") as stream:
        mark = PAGE_MARK.search(stream.read(HEAD).decode(errors="replace"))
    return frozenset(html.unescape(mark[1]).split("/")) if mark else frozenset()


def _drawn(figure: go.Figure) -> dict:
    """Figure as plotly.js draws it, without template, slider and titles, which the page adds."""
    drawn = json.loads(figure.to_json())
    layout = drawn["layout"]
    for name in ("template", "sliders", "title"):
        layout.pop(name, None)
    layout["height"] -= TITLE_HEIGHT
    layout["margin"]["t"] -= TITLE_HEIGHT
    frames = drawn.get("frames", [])
    titles = {frame["name"]: frame.pop("layout")["title"]["text"] for frame in frames}
    return {**drawn, "titles": titles}


def _least_width(figure: go.Figure) -> int:
    """Smallest readable width in pixels of a figure with several columns; a narrower page scrolls.

    Columns with titles of their own at the y axis need twice the room.
    """
    columns = len({axis.domain for axis in figure.select_xaxes()})
    titled = {
        figure.layout[axis.anchor.replace("x", "xaxis")].domain
        for axis in figure.select_yaxes(lambda axis: axis.anchor and axis.title.text)
    }
    if len(titled) > 1:
        return 90 + 230 * columns
    return 90 + 110 * columns if columns > 2 else 0


def _breakable(name: str) -> Markup:
    """Name of a column, with possible line breaks."""
    return Markup(re.sub(r"([_.])(?=[a-z])", r"\1<wbr>", html.escape(name)))


def _texts(table: pd.DataFrame) -> set[str]:
    """Columns with long entries, which are set as text."""
    return {
        name
        for name in table.columns
        if any(isinstance(value, str) and len(value) > LONGEST_WORD for value in table[name])
    }


def _text(file: str) -> Markup:
    return Markup((HERE / file).read_text(encoding="utf-8"))
