"""Evidence that no test measures again says when it was made, and a page whose code has changed since says at which commit."""

from pathlib import Path

import pytest

from tests.evidence import evidence, files_changed_since, git

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", evidence())
def test_a_page_names_the_commit_of_its_evidence(name: str):
    found = evidence()[name]
    page = (ROOT / found["page"]).read_text(encoding="utf-8").replace("<!-- /v -->", "")
    commit, day = found["commit"], found["day"]
    assert git("show", "--no-patch", "--format=%cs", commit) <= day, "the commit is a later one"
    assert commit in page
    assert day in page
    if files_changed_since(commit, found["folders"]):
        start = page.index(commit)
        sentence = page[page.rindex(". ", 0, start) if ". " in page[:start] else 0 : start]
        assert "at commit" in sentence.lower(), f"{found['page']} must say 'at commit {commit}'"


def test_changed_files_are_counted():
    head = git("rev-parse", "HEAD")
    assert files_changed_since(head, ["mechinterp"]) == 0
    assert files_changed_since("7ed058ce", ["mechinterp/checkpoints"]) > 10
