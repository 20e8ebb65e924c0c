"""The built site (`make docs`): nothing that the source says is lost, and nothing comes from the network."""

import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

SITE = os.environ.get("SITE")
HTML = """
html head body meta title link script style noscript template header footer main nav aside
article section div h1 h2 h3 h4 h5 h6 p a span em strong b i code pre kbd sup sub small br wbr hr ul
ol li dl dt dd details summary blockquote table thead tbody tfoot tr th td caption colgroup col
figure figcaption img svg path iframe form label input button select option
"""
"""Tags that pages have."""
SHOWN_AS_IT_IS = {"code", "pre", "script", "style"}


class Page(HTMLParser):
    """Tags, anchors, links and prose of a page, and the addresses that it loads."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.prose: list[str] = []
        self.inside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags[tag] += 1
        self.anchors.add(found.get("id") or "")
        if tag == "a":
            self.links.append(found.get("href") or "")
        elif source := found.get("src") or (found.get("href") if tag == "link" else None):
            self.loaded.append(source)
        if tag in SHOWN_AS_IT_IS:
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        if not self.inside:
            self.prose.append(data)


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    if not SITE:
        pytest.skip("make docs builds the site and runs these tests")
    return {
        file: Page(file.read_text(encoding="utf-8")) for file in sorted(Path(SITE).rglob("*.html"))
    }


def test_the_reader_sees_a_lost_formula():
    page = Page("<p>the product <w, x> costs $x$, <code>$HOME</code></p>")
    assert set(page.tags) - set(HTML.split()) == {"w,"}
    assert "".join(page.prose).count("$") == 2


def test_every_tag_is_one_of_html(pages: dict[Path, Page]):
    unknown = {file.name: set(page.tags) - set(HTML.split()) for file, page in pages.items()}
    assert not {name: tags for name, tags in unknown.items() if tags}


def test_no_formula_is_left_in_dollars(pages: dict[Path, Page]):
    assert [file.name for file, page in pages.items() if "$" in "".join(page.prose)] == []


def test_pages_load_nothing_from_the_network(pages: dict[Path, Page]):
    addresses = {one for page in pages.values() for one in page.loaded}
    assert not {one for one in addresses if re.match(r"(https?:)?//", one)}
    assert any("katex.min.js" in one for one in addresses)


def test_links_arrive(pages: dict[Path, Page]):
    anchors = {file.resolve(): page.anchors for file, page in pages.items()}
    lost = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            target = (file.parent / path).resolve() if path else file.resolve()
            if re.match(r"\w+:", link) or target.suffix != ".html" or file.name == "404.html":
                continue
            if target not in anchors or (anchor and anchor not in anchors[target]):
                lost.append(f"{file.name}: {link}")
    assert not lost
    assert sum("words.html#" in link for page in pages.values() for link in page.links) > 20
