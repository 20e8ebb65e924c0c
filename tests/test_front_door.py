"""What a visitor sees first: README's commands are run before every change, its citation is of this version, and its picture is
that of the model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mechinterp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def first_block() -> list[str]:
    """The commands of README's first block, without their comments."""
    found = re.search(r"^```\n(.*?)^```", README, re.M | re.S)
    assert found
    return [line.partition("#")[0].strip() for line in found[1].splitlines()]


def test_the_first_commands_of_readme_are_those_that_a_change_must_pass():
    """`.ci/run` runs them on a clean checkout."""
    steps = re.findall(
        r"^step (make \S+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M
    )
    assert [command for command in first_block() if command not in steps] == []


def test_what_is_cited_is_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{mechinterp.__version__}}}" in README
    assert f"\nversion: {mechinterp.__version__}\n" in citation


@pytest.mark.exhaustive
def test_the_picture_is_that_of_the_model(tmp_path: Path):
    code = "import sys, pathlib; sys.path.insert(0, 'docs'); import picture; picture.FILE = pathlib.Path(sys.argv[1]); picture.main()"
    made = tmp_path / "prompt.svg"
    subprocess.run([sys.executable, "-c", code, made], cwd=ROOT, check=True)
    words = [
        re.findall(r"<text[^>]*>([^<]*)", file.read_text(encoding="utf-8"))
        for file in (made, ROOT / "docs" / "prompt.svg")
    ]
    assert words[0] == words[1]
