"""Sentences of every page are short enough to be read once.

`python -m tests.test_prose` prints words, mean sentence length and the share of sentences over 35 words, a row per page.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "notebooks/README.md")),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob(".github/*.md"),
    ]
)
MEAN, LONG, MOST = 20, 35, 1_200
"""Largest mean number of words of a page's sentences, the number above which a sentence counts as long, and words of a page."""


def sentences(text: str) -> list[str]:
    """Sentences of the prose of a Markdown page; code, tables, headings and comments are left out.

    Example:
        >>> sentences("# Title\\n\\nOne `x = 1` here.\\nTwo, [so](a.md).\\n\\n- item\\n\\n| a | b |")
        ['One code here.', 'Two, so.', 'item']
    """
    text = re.sub(r"^```.*?^```$|<!--.*?-->|^\$\$.*?^\$\$", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]+`|\$[^$\n]+\$", "code", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\][(\[][^)\]]*[)\]]", r"\1", text)
    text = re.sub(r"^(#.*|\|.*)$", "", text, flags=re.M)
    paragraphs = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", text, flags=re.M)
    parts = (re.split(r"(?<=[.!?])[*_)]*\s+", " ".join(one.split())) for one in paragraphs)
    return [one for sentence in parts for one in sentence if re.search(r"\w", one)]


def lengths(page: Path) -> list[int]:
    """Number of words of each sentence of a page."""
    found = sentences(page.read_text(encoding="utf-8"))
    return [len(re.findall(r"\S*\w\S*", one)) for one in found]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pages_and_sentences_are_short(page: Path):
    words = lengths(page)
    assert sum(words) / len(words) <= MEAN
    assert sum(words) <= MOST


def main() -> None:
    print(f"{'page':40} {'words':>6} {'mean':>5} {f'over {LONG}':>8}")
    for page in PAGES:
        words = lengths(page)
        share = sum(one > LONG for one in words) / len(words)
        print(f"{named(page):40} {sum(words):6,} {sum(words) / len(words):5.1f} {share:8.0%}")


if __name__ == "__main__":
    main()
