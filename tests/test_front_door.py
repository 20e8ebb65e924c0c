"""What a visitor does first: the picture is that of the model, and README's commands work in a fresh clone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mechinterp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = "tests/claims/test_plateaus.py"
"""The tests, fast and slow, that `make test` runs here in place of all."""


def first_block() -> list[str]:
    """The commands of README's first block, without their comments."""
    found = re.search(r"^```\n(.*?)^```", README, re.M | re.S)
    assert found
    return [line.partition("#")[0].strip() for line in found[1].splitlines()]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone whose environment has the packages of this one, so that nothing is downloaded."""
    folder = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, folder], check=True)
    shutil.copy(ROOT / "README.md", folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (packages,) = (folder / ".venv").glob("lib/*/site-packages")
    own = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "here.pth").write_text("\n".join(own))
    return folder


def make(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a command of a clone prints, with pip kept off the network."""
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "TESTS": QUICK}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    options = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(
        command.split(), cwd=folder, env=environment | offline, timeout=1800, **options
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_first_commands_of_readme_work_in_a_fresh_clone(clone: Path):
    report, tests = first_block()
    assert (report, tests) == ("make report", "make test")
    ran = make(report, clone)
    assert ran.returncode == 0, ran.stderr
    (page,) = re.findall(r"Report: (\S+)", ran.stdout)
    assert "debiased_gd" in (clone / page).read_text(encoding="utf-8")
    ran = make(tests, clone)
    assert ran.returncode == 0, ran.stdout
    assert "== all passed" in ran.stdout


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
