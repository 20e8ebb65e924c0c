"""Names of files and folders with control characters: shown as escapes, on the terminal and on the page."""

from pathlib import Path

import pytest
import torch

from mechinterp.checkpoints.io.files import visible
from mechinterp.checkpoints.load import convert, load
from mechinterp.report.bars import progress_bar
from mechinterp.training.run import Progress
from tests.checkpoints.foreign_files import random_heads, softmax_paper_state
from tests.conftest import Run

# Escape sequences of 7 and 8 bits, a turned direction of writing, a bell, an end of line.
NAME = "a\x1b[2J\x9b31m\u202e\u2066\x07\nb"
SHOWN = r"a\x1b[2J\x9b31m\u202e\u2066\x07\nb"
FEW, CIRCUITS = ("--n-prompts", "64"), ("--analysis", "circuits")


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(softmax_paper_state(random_heads()), tmp_path / "x.pth")
    convert(load(tmp_path / "x.pth", anyway=True), "native", tmp_path / NAME)
    return tmp_path / NAME


def test_what_is_not_printable_is_visible():
    assert visible(NAME + "\udc80²±") == SHOWN.replace(r"\n", "\n") + r"\udc80" + "²±"


@pytest.mark.slow
def test_classify_shows_escapes(run: Run, folder: Path):
    for more in ((), ("--json",)):
        ran = run("classify", folder, "--anyway", *FEW, *more).done()
        assert harmless(ran.out + ran.err)
        assert more or SHOWN in ran.out


@pytest.mark.slow
def test_report_shows_escapes(run: Run, folder: Path, tmp_path: Path):
    for paths in ((folder,), (folder, folder, tmp_path / f"gone{NAME}")):
        out = tmp_path / f"report{len(paths)}{NAME}"
        ran = run(
            "report", *paths, "--out", out, "--anyway", *FEW, *(() if paths[1:] else CIRCUITS)
        )
        assert SHOWN in ran.out
        assert harmless(ran.out + ran.err)
        page = (out / "index.html").read_text(encoding="utf-8")
        assert SHOWN in page.replace("\\\\", "\\")
        for character in "\x1b\x9b\u2066\x07":
            assert character not in page.split("<main")[-1]


@pytest.mark.slow
def test_train_shows_escapes(run: Run, tmp_path: Path):
    small = ("--set", "train.steps=2", "--set", "train.batch_size=4")
    ran = run("train", "softmax-h1", *small, "--out", tmp_path / NAME).done()
    assert SHOWN in ran.out
    assert harmless(ran.out)


def test_a_model_that_diverges_is_named_in_escapes(capsys: pytest.CaptureFixture):
    progress = Progress(
        step=1, steps=2, n_models=1, loss=1.0, steps_per_second=1.0, diverged=(f"[bold]{NAME}",)
    )
    with progress_bar() as show:
        show(progress)
    err = capsys.readouterr().err.replace("\n", "")
    assert f"[bold]{SHOWN} has diverged" in err
